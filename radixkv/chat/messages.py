"""What passes between a caller and a chat session: tool calls and their results, replies.

Knows: that thinking stands in <think> tags or in channels (channels.py). Knows no token, no template, and not how
models write tool calls (tool_calls.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from radixkv.engine import Usage
from radixkv.engine.output import FinishReason
from radixkv.errors import InvalidInput
from radixkv.sampling.params import TokenLogprobs

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model asks for `name(**arguments)`; answer with a ToolResult of the same id."""

    id: str
    name: str
    arguments: dict[str, Any]

    def as_message(self) -> Message:
        """The form in which chat templates take it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the call `call_id` returned: a text, or anything that JSON can hold."""

    call_id: str
    content: Any

    def as_message(self, name: str) -> Message:
        """The turn of role `tool` for it."""
        content = self.content if isinstance(self.content, str) else _to_json(self.content)
        return {"role": "tool", "tool_call_id": self.call_id, "name": name, "content": content}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the assistant said in one turn.

    `text` is what stands outside tool calls and thinking; what was begun as a call and is none stays in it, tags
    included. `token_ids` are the sampled ones, a stop token included.
    `usage.cached_tokens` says how much of the conversation was found in the cache.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    usage: Usage
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    thinking: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


def tool_messages(results: Sequence[ToolResult], calls: Sequence[ToolCall]) -> list[Message]:
    """The tool turns that answer `calls`, in their order; raises InvalidInput unless each is answered once."""
    if not isinstance(results, Sequence) or not all(isinstance(result, ToolResult) for result in results):
        raise InvalidInput(f"results must be a list of ToolResult, got {results!r}")
    if not calls:
        raise InvalidInput("the last reply made no tool call, so there is nothing to answer: use send()")
    asked, answered = [call.id for call in calls], [result.call_id for result in results]
    if sorted(asked) != sorted(answered):
        raise InvalidInput(f"the tool calls {asked} each need one result; got results for {answered}")
    by_id = {result.call_id: result for result in results}
    return [by_id[call.id].as_message(call.name) for call in calls]


def _to_json(content: Any) -> str:
    try:
        return json.dumps(content, ensure_ascii=False)
    except TypeError as error:
        raise InvalidInput(f"a tool's result must be a text or what JSON can hold: {error}") from error
