"""Define the values that pass between a caller and a chat session: messages, tool calls, tool results, replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from radixkv.engine import Usage
from radixkv.engine.output import FinishReason, brief
from radixkv.errors import InvalidInput
from radixkv.sampling.params import TokenLogprobs

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A request of the model to call `name(**arguments)`; answer it with a ToolResult of the same id.

    `written` is the JSON text of the arguments, if it was read from a reply. A call is not `complete` if the reply
    broke off inside its arguments: they are empty then, and `written` has their beginning.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    written: str = field(default="", compare=False, repr=False)
    complete: bool = field(default=True, repr=False)

    @property
    def text(self) -> str:
        """The JSON text of the arguments: equal to the text that is streamed."""
        return self.written or json.dumps(self.arguments, ensure_ascii=False)

    def as_message(self) -> Message:
        """Return the call in the form that chat templates take."""
        arguments = self.arguments if self.complete else self.written
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of the call `call_id`: its `content` is a text, or any value that JSON can hold."""

    call_id: str
    content: Any

    def as_message(self, name: str) -> Message:
        """Return the message of role `tool` for the result."""
        content = self.content if isinstance(self.content, str) else _to_json(self.content)
        return {"role": "tool", "tool_call_id": self.call_id, "name": name, "content": content}


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of the assistant in one turn.

    `text` is the text outside `tool_calls` and `thinking`. A call with wrong arguments stays in it, tags included.
    `finish_reason` is "stop" or "length", as of a `Completion`. `token_ids` are the sampled ids, a stop token included,
    and `logprobs` has an entry for each, if they were asked for. `usage.cached_tokens` is the number of prompt tokens
    that were found in the cache. `parsed` is the answer as an object, if the call has a `schema`.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    usage: Usage
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    thinking: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    parsed: Any = None

    def __repr__(self) -> str:
        said = " ".join([self.text, *(f"{call.name}()" for call in self.tool_calls)])
        return brief(self, said, self.finish_reason, self.usage)


def tool_messages(results: Sequence[ToolResult], calls: Sequence[ToolCall]) -> list[Message]:
    """Return the messages that answer `calls`, in their order. Raises InvalidInput unless each is answered once."""
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


def calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the tool calls of an assistant's message."""
    calls = message.get("tool_calls") or ()
    return [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
