"""Write a turn in the form of Anthropic's Messages API: a whole message, or server-sent events.

A message is a list of blocks. A stream opens one block at a time, in the order in which the model wrote them, and
closes it before the next one opens.
"""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from hashlib import blake2b
from secrets import token_bytes

from radixkv.chat.calls.block import CallDelta
from radixkv.chat.messages import ToolCall
from radixkv.serve.anthropic.errors import error_body
from radixkv.serve.anthropic.schemas import MessageRequest
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.reply import Piece
from radixkv.serve.responses import TurnUsage
from radixkv.serve.turn import End, Turn

_KEY = token_bytes(32)  # of this process: the signatures of another server are as good as no signatures
_encode = json.JSONEncoder(separators=(",", ":")).encode
_BLOCKS = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def event(body: JsonObject) -> bytes:
    """Encode one event, whose name is the `type` of its JSON."""
    return f"event: {body['type']}\ndata: {_encode(body)}\n\n".encode()


_STOP = event({"type": "message_stop"})


class MessageEncoder:
    """Write the response to one request; an `Encoder` of turn.py."""

    keep_alive = event({"type": "ping"})

    def __init__(self, turn: Turn, request_id: str) -> None:
        """Write the responses of `turn`; errors contain `request_id`."""
        assert isinstance(turn.request, MessageRequest)
        self._turn, self._request, self._request_id = turn, turn.request, request_id
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> bytes:
        """Return the JSON of the message."""
        [reply] = await self._turn.replies()
        blocks: list[JsonObject] = []
        if reply.thinking:
            thinking = "" if self._request.omits_thinking else reply.thinking
            blocks.append({"type": "thinking", "thinking": thinking, "signature": signature(reply.thinking)})
        if reply.content:
            blocks.append({"type": "text", "text": reply.content})
        blocks += [{**_tool_use(call), "input": call.arguments} for call in reply.calls]
        reason, stop = stop_reason(reply.end)
        message = {**self._head(self._usage(self._turn.usage)), "content": blocks}
        return _encode({**message, "stop_reason": reason, "stop_sequence": stop}).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the message. The counts of the cache are in `message_delta`, when they are certain."""
        begun = TurnUsage(self._turn.prompt_tokens, 0, 0)
        yield event({"type": "message_start", "message": self._head(self._usage(begun))})
        blocks = BlockEvents(omits_thinking=self._request.omits_thinking)
        async with aclosing(self._turn.steps()) as steps:
            async for step in steps:
                written = blocks.pieces(step.pieces)
                if step.end is not None:
                    written += blocks.close() + self._last(step.end)
                if written:
                    yield written

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return event(error_body(error, self._request_id))

    def _last(self, end: End) -> bytes:
        """Return the events after the last block."""
        reason, stop = stop_reason(end)
        ending = {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": self._usage(self._turn.usage)}
        return event({"type": "message_delta", **ending}) + _STOP

    def _head(self, usage: JsonObject) -> JsonObject:
        """Return an empty message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.options.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, usage: TurnUsage) -> JsonObject:
        """Return the token counts of a request, whose first three sum up to the prompt.

        The computed tokens count as written to the cache if the request has `cache_control`, else as plain input. They
        are cached in both cases. Claude Code replaces a count of `message_start` only by one above 0. So the count of
        computed tokens, which is never 0, has the same name at both ends of a stream, and the other one is 0.
        """
        computed = usage.prompt_tokens - usage.cached_tokens
        written = self._request.marks_cache
        return {
            "input_tokens": 0 if written else computed,
            "cache_creation_input_tokens": computed if written else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }


class BlockEvents:
    """Write the blocks of one message as events, piece by piece."""

    def __init__(self, *, omits_thinking: bool) -> None:
        """Begin without blocks. With `omits_thinking`, the text of thinking blocks is empty."""
        self._omits_thinking = omits_thinking
        self._index = -1
        self._open = ""  # the type of the open block
        self._front = self._back = b""  # a delta of the open block, around its text
        self._thinking: list[str] = []

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events for some pieces; empty if there are none."""
        return b"".join(map(self._piece, pieces))

    def close(self) -> bytes:
        """Return the events that end the open block; empty without one."""
        return b"".join(self._closed())

    def _piece(self, piece: Piece) -> bytes:
        if piece.call is not None:
            return self._call(piece.call)
        kind, text = ("thinking", piece.thinking) if piece.thinking else ("text", piece.content)
        opened = b"" if kind == self._open else self._begin(kind, _BLOCKS[kind])
        if kind == "thinking":
            self._thinking.append(text)
            if self._omits_thinking:
                return opened
        return opened + self._text(text)

    def _call(self, call: CallDelta) -> bytes:
        opened = self._begin("tool_use", _tool_use(call)) if call.opens else b""
        more = self._text(call.arguments) if call.arguments else b""
        return opened + more if call.call is None else opened + more + self.close()

    def _text(self, text: str) -> bytes:
        return b"".join((self._front, json.dumps(text).encode(), self._back))

    def _closed(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thinking))})
            self._thinking.clear()
        if self._open:
            yield event({"type": "content_block_stop", "index": self._index})
        self._open = ""

    def _begin(self, kind: str, block: JsonObject) -> bytes:
        """Open a block, and prepare its deltas."""
        closed = self.close()
        self._index, self._open = self._index + 1, kind
        delta, field = _DELTAS[kind]
        self._front, _, self._back = self._delta({"type": delta, field: ""}).rpartition(b'""')
        return closed + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: JsonObject) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})


def stop_reason(end: End) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a message.

    >>> stop_reason(End("stop", "END"))
    ('stop_sequence', 'END')
    """
    if end.stop_text is not None:
        return "stop_sequence", end.stop_text
    if end.finish_reason == "length":
        return "model_context_window_exceeded" if end.context_full else "max_tokens", None
    return "tool_use" if end.finish_reason == "tool_calls" else "end_turn", None


def signature(thinking: str) -> str:
    """Return the signature of a thinking block, a keyed digest of its text.

    Clients require one and send it back. It is not checked: a client may send any thinking of its own.
    """
    return b64encode(blake2b(thinking.encode(errors="replace"), key=_KEY, digest_size=48).digest()).decode()


def _tool_use(call: ToolCall | CallDelta) -> JsonObject:
    """Return a block of a tool call without its input, which arrives in deltas."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
