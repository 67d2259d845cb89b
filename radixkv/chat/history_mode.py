"""Decide whether the turns of a session are appended to its token ids, or the whole history is rendered again.

Appending keeps the thinking of earlier replies, and a system prompt stays in the turn where it was. An appended history
may therefore differ from a rendered one. It must not lose text that the template would have written: a role, a tool
result, the number of a turn. Both ways are tried with the dialogues of `template_cases`; no token is sampled.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, TypeAlias

from radixkv.chat.messages import Message, calls_of
from radixkv.chat.rendering import Key, Memo
from radixkv.chat.template import ChatTemplate
from radixkv.chat.template_cases import DIALOGUES, TOOLS, Dialogue, sampled_text
from radixkv.errors import ChatError

HistoryMode: TypeAlias = Literal["auto", "append", "template"]
_TRIED: Memo[tuple[Key, frozenset[int]], Appending] = Memo()
_SHOWN = 5  # lost words that an error shows
_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an appended history differs from the rendered one, and the words that it lost.

    `appended` and `rendered` are the texts of the two tokens, empty after the end of a history.
    """

    dialogue: str
    with_tools: bool
    position: int
    appended: str
    rendered: str
    lost: tuple[str, ...]

    def __str__(self) -> str:
        """Describe the difference in one line."""
        where = f"{self.dialogue}: token {self.position} is {self.appended!r} where the template has {self.rendered!r}"
        words = list(dict.fromkeys(self.lost))
        lost = ", ".join(map(repr, words[:_SHOWN])) + (", ..." if len(words) > _SHOWN else "")
        return f"{where}; lost is {lost}" if lost else where


@dataclass(frozen=True, slots=True)
class Appending:
    """Results of the trial: differences by dialogue, and (dialogue, message) of those that the template refuses."""

    differences: tuple[Difference, ...]
    refused: tuple[tuple[str, str], ...]

    def loss(self, *, tools: bool) -> Difference | None:
        """Return the first dialogue that would lose text; dialogues with tools count only with `tools`."""
        return next((each for each in self.differences if each.lost and (tools or not each.with_tools)), None)


def history_mode(template: ChatTemplate, asked: HistoryMode) -> Literal["append", "template"]:
    """Resolve the mode of a session: "auto" appends unless thinking is stripped or text would be lost.

    Raises ChatError, with the tokens that differ, for "append" if text would be lost.
    """
    if asked == "template" or (asked == "auto" and template.strips_thinking):
        return "template"
    loss = try_appending(template).loss(tools=template.tools is not None)
    if loss is None:
        return "append"
    if asked == "auto":
        return "template"
    raise ChatError(f"history='append' would lose what the chat template writes ({loss}): use 'auto' or 'template'")


def try_appending(template: ChatTemplate) -> Appending:
    """Try the dialogues both ways, once for each tokenizer. Costs some milliseconds."""
    key = template.rendering.key, template.stop_ids
    return _TRIED.get(template.rendering.tokenizer, key, lambda: _try(template))


# ---- inside


def _try(template: ChatTemplate) -> Appending:
    tokenizer, stops, date = template.rendering.tokenizer, template.stop_ids, template.date
    arguments = template.rendering.arguments
    plain, with_tools = (ChatTemplate(tokenizer, stops, tools, date, arguments=arguments) for tools in (None, TOOLS))
    differences, refused = [], []
    for dialogue in DIALOGUES:
        try:
            found = _difference(with_tools if dialogue.with_tools else plain, dialogue)
        except ChatError as error:
            refused.append((dialogue.name, str(error)))
        else:
            differences += [] if found is None else [found]
    return Appending(tuple(differences), tuple(refused))


def _difference(template: ChatTemplate, dialogue: Dialogue) -> Difference | None:
    """Compare the two histories of a dialogue. Raises ChatError if the template refuses it."""
    messages = dialogue.messages(template.form)
    text = template.rendering.text
    # Encode both texts as a whole: differences from encoding piece by piece are not the fault of the template.
    appended, rendered = (
        template.rendering.encode(text(ids)) for ids in (_appended(template, messages), template.opening(messages))
    )
    if appended == rendered:
        return None
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(appended, rendered, strict=False)))
    lost = Counter(_WORDS.findall(text(rendered))) - Counter(_WORDS.findall(text(appended)))
    ours, its = text(appended[at : at + 1]), text(rendered[at : at + 1])
    return Difference(dialogue.name, dialogue.with_tools, at, ours, its, tuple(lost.elements()))


def _appended(template: ChatTemplate, messages: Sequence[Message]) -> array[int]:
    """Return the ids of a dialogue as an appending session makes them, with or without the stop tokens of replies."""
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    ids = template.opening(messages[: replies[0]])
    for at, following in zip(replies, [*replies[1:], len(messages)], strict=True):
        new = messages[at + 1 : following]
        ids.extend(template.rendering.encode(sampled_text(template, messages, at)))
        ids = template.continued(ids, new, calls_of(messages[at]))
    return ids


_SYSTEM = "Answer in one short sentence, politely."


@dataclass(frozen=True)
class Histories:
    """Results of the trial and the resulting mode of `history="auto"`, without and with tools."""

    tried: Appending
    appends: bool
    appends_with_tools: bool
    strips_thinking: bool
    shows_system: bool
    shows_tools: bool
    tool_format: str | None  # of calls; None if calls stay text

    @property
    def inexact(self) -> Difference | None:
        """The first dialogue that differs when it is appended, without losing text."""
        return next((each for each in self.tried.differences if not each.lost), None)


def histories(tokenizer: Any, stop_ids: frozenset[int]) -> Histories:
    """Try the template of a tokenizer. Costs some milliseconds; raises ChatError if it refuses a plain conversation."""
    template, with_tools = ChatTemplate(tokenizer, stop_ids), ChatTemplate(tokenizer, stop_ids, TOOLS)
    tried = try_appending(template)
    refused = dict(tried.refused)
    if "plain" in refused:
        raise ChatError(refused["plain"])
    return Histories(
        tried=tried,
        appends=history_mode(template, "auto") == "append",
        appends_with_tools=history_mode(with_tools, "auto") == "append",
        strips_thinking=template.strips_thinking,
        shows_system=_shows_system(template),
        shows_tools=with_tools.rendering.writes_tools,
        tool_format=with_tools.call_format.name if with_tools.call_format else None,
    )


def _shows_system(template: ChatTemplate) -> bool:
    """Whether a prompt contains the system prompt; False if the template refuses it."""
    asked = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "What is 2 + 2?"}]
    try:
        return _SYSTEM in template.rendering.render(asked)
    except ChatError:
        return False
