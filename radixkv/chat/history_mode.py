"""May a conversation be appended to, or would its template have written what appending loses?

Knows: both ways to the ids of a canned dialogue. Knows no engine: no token is sampled, replies are as the template
writes them.

An appended history need not read as one that the template renders anew: the thinking of earlier replies stays, and a
system prompt stays in the turn where it was. That is what appending means. But it must not lack anything that the
template would have written: a role, a tool's result, the number of a turn.

What becomes of conversations with a model's chat template: what it takes, and how a history grows.

Knows `radixkv.chat`'s trials of a template, and its choice between appending and rendering anew. Knows no engine: no
token is sampled.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.chat.template_cases import DIALOGUES, TOOLS, Dialogue, emitted
from radixkv.errors import ChatError

HistoryMode: TypeAlias = Literal["auto", "append", "template"]
_TRIED: WeakKeyDictionary[Any, dict[tuple[str, frozenset[int]], Appending]] = WeakKeyDictionary()
_SHOWN = 5  # lost words that an error shows
_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an appended history first departs from the one that the template renders, in tokens; and what it lacks.

    `appended` and `rendered` are the texts of the two tokens, empty behind the end.
    """

    dialogue: str
    with_tools: bool
    position: int
    appended: str
    rendered: str
    lost: tuple[str, ...]

    def __str__(self) -> str:
        """One line for people."""
        where = f"{self.dialogue}: token {self.position} is {self.appended!r} where the template has {self.rendered!r}"
        words = list(dict.fromkeys(self.lost))
        lost = ", ".join(map(repr, words[:_SHOWN])) + (", ..." if len(words) > _SHOWN else "")
        return f"{where}; lost is {lost}" if lost else where


@dataclass(frozen=True, slots=True)
class Appending:
    """What trying has shown: where dialogues differ, and those that the template refuses, with its words."""

    differences: tuple[Difference, ...]
    refused: tuple[tuple[str, str], ...]

    def loss(self, *, tools: bool) -> Difference | None:
        """The first dialogue that would lose something, of those without tools or of all."""
        return next((each for each in self.differences if each.lost and (tools or not each.with_tools)), None)


def history_mode(template: ChatTemplate, asked: HistoryMode) -> Literal["append", "template"]:
    """How the turns of a session become ids; "auto" appends unless that would differ from what the model knows.

    Raises ChatError, with the tokens that differ, for "append" where something would be lost.
    """
    if asked == "template" or (asked == "auto" and template.strips_thinking):
        return "template"
    loss = appending(template).loss(tools=template.tools is not None)
    if loss is None:
        return "append"
    if asked == "auto":
        return "template"
    raise ChatError(f"history='append' would lose what the chat template writes ({loss}): use 'auto' or 'template'")


def appending(template: ChatTemplate) -> Appending:
    """Try canned dialogues both ways; once for each tokenizer, that takes some milliseconds."""
    known = _TRIED.setdefault(template.rendering.tokenizer, {})
    key = template.rendering.template, template.stop_ids
    if key not in known:
        known[key] = _try(template)
    return known[key]


# ---- inside


def _try(template: ChatTemplate) -> Appending:
    tokenizer, stops, date = template.rendering.tokenizer, template.stop_ids, template.date
    plain, with_tools = (ChatTemplate(tokenizer, stops, tools, date) for tools in (None, TOOLS))
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
    """Where the two histories of a dialogue differ, if they do; raises ChatError if the template takes none."""
    messages = dialogue.messages(template.form)
    text = template.rendering.text
    # Both are encoded once more: how the pieces of an appended one were encoded is no matter of the template's.
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
    """Ids of a dialogue as a session makes them; whether a reply brought its stop token makes no difference there."""
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    ids = template.opening(messages[: replies[0]])
    for at, following in zip(replies, [*replies[1:], len(messages)], strict=True):
        new = messages[at + 1 : following]
        ids.extend(template.rendering.encode(emitted(template, messages, at)))
        ids = template.continued(ids, new, _calls(messages[at]))
    return ids


def _calls(message: Message) -> list[ToolCall]:
    return [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


_SYSTEM = "Answer in one short sentence, politely."
_TOOL = TOOLS[0]["function"]["name"]  # type: ignore[index] # a JSON schema


@dataclass(frozen=True)
class Histories:
    """What was tried, and what `history="auto"` makes of it, for conversations without tools and with some."""

    tried: Appending
    appends: bool
    appends_with_tools: bool
    strips_thinking: bool
    shows_system: bool
    shows_tools: bool

    @property
    def inexact(self) -> Difference | None:
        """The first dialogue that reads otherwise when it is appended to, and lacks nothing all the same."""
        return next((each for each in self.tried.differences if not each.lost), None)


def histories(tokenizer: Any, stop_ids: frozenset[int]) -> Histories:
    """Try the template of a model. Costs some milliseconds; raises ChatError if it refuses a plain conversation."""
    template, with_tools = ChatTemplate(tokenizer, stop_ids), ChatTemplate(tokenizer, stop_ids, TOOLS)
    tried = appending(template)
    refused = dict(tried.refused)
    if "plain" in refused:
        raise ChatError(refused["plain"])
    return Histories(
        tried=tried,
        appends=history_mode(template, "auto") == "append",
        appends_with_tools=history_mode(with_tools, "auto") == "append",
        strips_thinking=template.strips_thinking,
        shows_system=_shows(template, _SYSTEM, [{"role": "system", "content": _SYSTEM}]),
        shows_tools=_shows(with_tools, str(_TOOL), []),
    )


def _shows(template: ChatTemplate, words: str, opening: list[Message]) -> bool:
    """Whether a prompt has these words; a template may also refuse it."""
    try:
        return words in template.rendering.render([*opening, {"role": "user", "content": "What is 2 + 2?"}])
    except ChatError:
        return False
