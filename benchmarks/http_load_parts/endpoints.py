"""The formats of the three endpoints that continue a conversation: bodies of requests, and events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, str]  # role and content


@dataclass(frozen=True)
class Tokens:
    """The token counts of one reply. `cached` tokens of the prompt were hits."""

    prompt: int
    cached: int
    output: int


class Endpoint(Protocol):
    """One endpoint. The methods that take an event are called for every event of a stream."""

    path: str
    last: tuple[str, ...]  # the data of the last event begins with one of these

    def body(self, system: str, messages: Sequence[Message], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return the body of a request for a stream. `fields` are options with the same name on each endpoint."""

    def tools(self, name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
        """Return the fields that offer one tool, whose call is required or forbidden."""

    def text(self, event: Any) -> str:
        """Return the text of the reply that an event adds."""

    def arguments(self, event: Any) -> str:
        """Return what an event adds to the arguments of a call."""

    def tokens(self, event: Any) -> Tokens | None:
        """Return the token counts if the event has them."""


class Chat:
    """POST /v1/chat/completions."""

    path, last = "/v1/chat/completions", ("[DONE]",)

    def body(self, system: str, messages: Sequence[Message], max_tokens: int, **fields: Any) -> dict[str, Any]:
        first = {"role": "system", "content": system}
        options = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": "tiny", "messages": [first, *messages], **options, **fields}

    def tools(self, name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        return {"tools": [tool], "tool_choice": "required" if required else "none"}

    def text(self, event: Any) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])

    def arguments(self, event: Any) -> str:
        calls = [call for choice in event["choices"] for call in choice["delta"].get("tool_calls") or ()]
        return "".join(call["function"]["arguments"] for call in calls)

    def tokens(self, event: Any) -> Tokens | None:
        usage = event.get("usage")
        if not usage:
            return None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Tokens(usage["prompt_tokens"], cached, usage["completion_tokens"])


class Responses:
    """POST /v1/responses, as Codex uses it: each request has the whole conversation, and nothing is stored."""

    path, last = "/v1/responses", ('{"type":"response.completed"', '{"type":"response.incomplete"')

    def body(self, system: str, messages: Sequence[Message], max_tokens: int, **fields: Any) -> dict[str, Any]:
        items = [{"type": "message", **message} for message in messages]
        options = {"max_output_tokens": max_tokens, "stream": True, "store": False}
        return {"model": "tiny", "instructions": system, "input": items, **options, **fields}

    def tools(self, name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
        tool = {"type": "function", "name": name, "parameters": schema, "strict": False}
        return {"tools": [tool], "tool_choice": "required" if required else "none"}

    def text(self, event: Any) -> str:
        return event["delta"] if event["type"] == "response.output_text.delta" else ""

    def arguments(self, event: Any) -> str:
        return event["delta"] if event["type"] == "response.function_call_arguments.delta" else ""

    def tokens(self, event: Any) -> Tokens | None:
        usage = event["response"]["usage"] if "response" in event else None
        if not usage:
            return None
        return Tokens(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])


class Messages:
    """POST /v1/messages."""

    path, last = "/v1/messages", ('{"type":"message_stop"',)

    def body(self, system: str, messages: Sequence[Message], max_tokens: int, **fields: Any) -> dict[str, Any]:
        options = {"max_tokens": max_tokens, "stream": True}
        return {"model": "tiny", "system": system, "messages": list(messages), **options, **fields}

    def tools(self, name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
        tool = {"name": name, "input_schema": schema}
        return {"tools": [tool], "tool_choice": {"type": "any" if required else "none"}}

    def text(self, event: Any) -> str:
        return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""

    def arguments(self, event: Any) -> str:
        return event["delta"].get("partial_json", "") if event["type"] == "content_block_delta" else ""

    def tokens(self, event: Any) -> Tokens | None:
        if event["type"] != "message_delta":
            return None
        usage = event["usage"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        return Tokens(prompt, cached, usage["output_tokens"])


ENDPOINTS: dict[str, Endpoint] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}
