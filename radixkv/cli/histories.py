"""What becomes of conversations with a model's chat template: what it takes, and how a history grows.

Knows `radixkv.chat`'s trials of a template, and its choice between appending and rendering anew. Knows no engine: no
token is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.chat.appending import Appending, Difference, appending, history_mode
from radixkv.chat.canned import TOOLS
from radixkv.chat.messages import Message
from radixkv.chat.template import ChatTemplate
from radixkv.errors import ChatError

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
