"""Write a reply in the form of Ollama's API: one JSON object, or a line of JSON for each piece."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from radixkv.chat.messages import ToolCall
from radixkv.engine import AsyncHandle, Completion
from radixkv.serve.error_forms import ollama_error
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.reply import Piece
from radixkv.serve.service import Service
from radixkv.serve.turn import End, Reply, Step, Turn

MEDIA_TYPE = "application/x-ndjson"
Shape = Callable[[str, str, Sequence[ToolCall]], JsonObject]
"""Returns the field for some content, thinking and calls of a reply."""


def as_message(content: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> JsonObject:
    """Return the field of /api/chat. A call that the reply broke off is left out: clients would run it."""
    functions = [(each.id, {"name": each.name, "arguments": each.arguments}) for each in calls if each.complete]
    more = {"thinking": thinking, "tool_calls": [{"id": id_, "function": it} for id_, it in functions]}
    return {"message": {"role": "assistant", "content": content, **{name: it for name, it in more.items() if it}}}


def as_response(content: str, thinking: str = "", _: Sequence[ToolCall] = ()) -> JsonObject:
    """Return the fields of /api/generate."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class RawReply:
    """The reply to a text that no chat template wrote, read as the replies of a `Turn`: all of it is content."""

    completion: Completion

    def __init__(self, service: Service, handle: AsyncHandle, log_fields: dict[str, Any]) -> None:
        """Read the reply from `handle`, and add its token counts to `log_fields` at the end."""
        self._service, self._handle, self._log_fields = service, handle, log_fields

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the reply as it is generated. Raises the request's error."""
        async for chunk in self._handle:
            end = None if chunk.finish_reason is None else (await self.replies())[0].end
            yield Step(0, [Piece(content=chunk.text)] if chunk.text else [], end, chunk)

    async def replies(self) -> list[Reply]:
        """Return the reply once it is complete. Raises the request's error."""
        self.completion = found = await self._handle.result()
        self._service.log_usage(self._log_fields, [found])
        return [Reply(0, found.text, "", (), End(found.finish_reason), found)]


class Lines:
    """Write the reply to one request; an `Encoder` of turn.py.

    In a silent stream, white space precedes the next line: clients fail at an empty line.
    """

    keep_alive = b" "

    def __init__(self, reply: Turn | RawReply, model: str, shape: Shape, started: float, load_seconds: float) -> None:
        """Name the model as the client did. `started` is a time of `perf_counter`, after a load of `load_seconds`."""
        self._reply, self._model, self._shape = reply, model, shape
        self._started, self._load_seconds = started, load_seconds

    async def whole(self) -> bytes:
        """Return the JSON of the response."""
        [reply] = await self._reply.replies()
        return self._line(self._shape(reply.content, reply.thinking, reply.calls), **self._last(reply.end))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the response. A call is one line, once it is complete; the last line has the counts."""
        async with aclosing(self._reply.steps()) as steps:
            async for step in steps:
                lines = [self._line(said, done=False) for said in map(self._said, step.pieces) if said]
                if step.end is not None:
                    lines.append(self._line(self._shape("", "", ()), **self._last(step.end)))
                if lines:
                    yield b"".join(lines)

    def error_event(self, error: ApiError) -> bytes:
        """Return the last line of a stream that failed."""
        return ollama_error(error) + b"\n"

    def _said(self, piece: Piece) -> JsonObject:
        """Return the fields for a piece; empty for a call that is not complete."""
        if piece.call is None:
            return self._shape(piece.content, piece.thinking, ())
        call = piece.call.call
        return {} if call is None or not call.complete else self._shape("", "", [call])

    def _line(self, said: JsonObject, **fields: object) -> bytes:
        return json.dumps({**head(self._model), **said, **fields}).encode() + b"\n"

    def _last(self, end: End) -> JsonObject:
        """Return the fields of a complete response, with durations in nanoseconds."""
        usage = self._reply.completion.usage
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(perf_counter() - self._started + self._load_seconds),
            "load_duration": _nanoseconds(self._load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "cached_prompt_count": usage.cached_tokens,
            "prompt_eval_duration": _nanoseconds(usage.ttft_s),
            "eval_count": usage.output_tokens,
            "eval_duration": _nanoseconds(usage.total_s - usage.ttft_s),
        }


def head(model: str) -> JsonObject:
    """Return the first fields of a line."""
    return {"model": model, "created_at": timestamp(datetime.now(UTC))}


def timestamp(moment: datetime) -> str:
    """Return a time in UTC as Go's JSON has it."""
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # clients divide by durations
