"""Does a conversation that is only ever appended to read as the model's chat template would have rendered it?

Knows some canned dialogues, and `radixkv.chat`'s two ways to a history. Knows no engine: no token is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from radixkv.chat.messages import Message
from radixkv.chat.template import ChatTemplate
from radixkv.errors import ChatError

_USER, _REPLY, _SYSTEM = "What is 2 + 2?", "It is 4.", "Answer in one short sentence, politely."
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_train",
        "description": "Find a train.",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
    },
}
_SHOWN = 30  # letters of a difference


@dataclass(frozen=True)
class Histories:
    """What a chat template makes of conversations; `difference` says where an appended one first departs from it."""

    difference: str | None
    strips_thinking: bool
    shows_system: bool
    shows_tools: bool


def histories(tokenizer: Any, stop_ids: frozenset[int]) -> Histories:
    """Try the template of a model. Costs some milliseconds; raises ChatError if it refuses a plain conversation."""
    template = ChatTemplate(tokenizer, stop_ids)
    with_tools = ChatTemplate(tokenizer, stop_ids, tools=[_TOOL])
    shows_system = _shows(template, _SYSTEM, _said(1, system=True))
    dialogues = [_said(1), _said(3)] + [_said(2, system=True)] * shows_system
    found = (_difference(template, tokenizer, each) for each in dialogues)
    return Histories(
        difference=next((each for each in found if each is not None), None),
        strips_thinking=template.strips_thinking,
        shows_system=shows_system,
        shows_tools=_shows(with_tools, "find_train", _said(1)),
    )


def _said(turns: int, *, system: bool = False) -> list[Message]:
    """A dialogue of so many finished turns, and the question of the next one."""
    turn: list[Message] = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY}]
    opening: list[Message] = [{"role": "system", "content": _SYSTEM}] if system else []
    return [*opening, *turn * turns, turn[0]]


def _shows(template: ChatTemplate, words: str, dialogue: Sequence[Message]) -> bool:
    """Whether a dialogue's opening has these words; a template may also refuse it."""
    try:
        return words in template.said_text(template.opening(dialogue))
    except ChatError:
        return False


def _difference(template: ChatTemplate, tokenizer: Any, dialogue: list[Message]) -> str | None:
    """Where the two histories of a dialogue differ; None if they read the same."""
    rendered = template.said_text(template.opening(dialogue))
    appended = template.said_text(_appended(template, tokenizer, dialogue))
    if appended == rendered:
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(appended, rendered, strict=False)))
    ours, its = (text[same : same + _SHOWN] for text in (appended, rendered))
    return f"appended {ours!r}, rendered {its!r}, behind {rendered[max(0, same - _SHOWN) : same]!r}"


def _appended(template: ChatTemplate, tokenizer: Any, dialogue: Sequence[Message]) -> Sequence[int]:
    """Ids of a dialogue as a session makes them; whether a reply brought its stop token makes no difference there."""
    first = next(at for at, message in enumerate(dialogue) if message["role"] == "assistant")
    ids = template.opening(dialogue[:first])
    for reply, question in zip(dialogue[first::2], dialogue[first + 1 :: 2], strict=True):
        ids.extend(tokenizer.encode(reply["content"], add_special_tokens=False))
        ids = template.continued(ids, [question])
    return ids
