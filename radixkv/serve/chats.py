"""POST /v1/chat/completions: chat completions, whole or as server-sent events.

Thinking is returned as `reasoning_content`, apart from `content`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.reply import Piece
from radixkv.serve.responses import COMMENT, DONE, encode_response, running_usage, sse_event, usage
from radixkv.serve.schemas import read_chat
from radixkv.serve.service import Service
from radixkv.serve.turn import Reply, Step, Turn, respond


async def create(service: Service, request: Request) -> Response:
    """Respond to one chat completion request; raise ApiError or RadixKVError."""
    return await respond(service, request, read_chat, ChatAnswer)


class ChatAnswer:
    """Write the response to one chat completion request."""

    keep_alive = COMMENT

    def __init__(self, turn: Turn) -> None:
        """Write the replies of `turn`."""
        self._turn, self._service = turn, turn.service
        self._options = turn.request.options
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._parts: dict[tuple[int, int | None], tuple[bytes, bytes]] = {}  # around texts: by choice, and by call
        self._sampled = 0  # tokens of all replies so far

    # ---- whole

    async def whole(self) -> bytes:
        """Return the whole response, once all replies are complete."""
        replies = await self._turn.replies()
        head, spent = self._head("chat.completion"), self._usage()
        head |= await asyncio.to_thread(self._prompt_logprobs)
        return await encode_response(head, lambda: map(self._choice, replies), spent)

    def _prompt_logprobs(self) -> JsonObject:
        """Return the field with the prompt's log probabilities, if the client requested them."""
        asked, top = self._turn.completion.prompt_logprobs, self._options.prompt_logprobs
        if asked is None or top is None:
            return {}
        return {"prompt_logprobs": self._service.token_texts.prompt_logprobs(self._turn.prompt.ids, asked, top)}

    def _choice(self, reply: Reply) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
        message["refusal"] = None
        if reply.thinking and not self._turn.request.hides_thinking:
            message["reasoning_content"] = reply.thinking
        if reply.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.text) for call in reply.calls]
        logprobs = reply.completion.logprobs
        choice = {
            "index": reply.index,
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(reply.completion.token_ids, logprobs),
            "finish_reason": reply.end.finish_reason,
        }
        score = reply.completion.score
        return choice if score is None else {**choice, "score": score}

    # ---- events

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response's events: roles, deltas, finish reasons, and usage if the client requested it."""
        for index in range(self._options.replies):
            yield self._event(index, {"role": "assistant", "content": ""})
        ended = False
        async with aclosing(self._turn.steps()) as steps:
            async for step in steps:
                event, ended = self._of_step(step), self._turn.complete
                if ended:
                    event += self._last()
                if event:
                    yield event
        if not ended:  # there were fewer replies than beams
            yield self._last()

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return sse_event(error.body())

    def _of_step(self, step: Step) -> bytes:
        """Return the events for one step: empty while its text is held back."""
        pieces, chunk = step.pieces, step.chunk
        self._sampled += len(chunk.token_ids)
        if len(pieces) == 1 and chunk.logprobs is None and step.end is None:
            call = pieces[0].call
            if text := pieces[0].content if call is None or call.opens else call.arguments:
                return self._text_event(step.index, text, None if call is None else call.number)
        hides = self._turn.request.hides_thinking
        deltas = [delta for piece in pieces if not (hides and piece.thinking) and (delta := _delta(piece))]
        logprobs = None if chunk.logprobs is None else self._logprobs(chunk.token_ids, [chunk.logprobs])
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        events = [self._event(step.index, delta, logprobs if at == 0 else None) for at, delta in enumerate(deltas)]
        if step.end is not None:
            events.append(self._event(step.index, {}, reason=step.end.finish_reason))
        return b"".join(events)

    def _last(self) -> bytes:
        """Return the events after the replies."""
        if not self._options.include_usage:
            return DONE
        head = self._head("chat.completion.chunk")
        return sse_event({**head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> JsonObject:
        return usage([self._turn.completion], predicted=bool(self._options.params.prediction))

    def _text_event(self, index: int, text: str, call: int | None) -> bytes:
        """Return a delta of content or of a call's arguments from prepared parts; equal to `_event`, but faster."""
        if self._options.running_usage:
            return self._event(index, _text_delta(text, call))
        key = index, call
        if key not in self._parts:
            front, _, back = self._event(index, _text_delta("", call)).rpartition(b'""')
            self._parts[key] = front, back
        front, back = self._parts[key]
        return front + json.dumps(text).encode() + back

    def _event(self, index: int, delta: JsonObject, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        event = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._options.running_usage:
            event["usage"] = running_usage(self._turn.prompt_tokens, self._sampled)
        elif self._options.include_usage:
            event["usage"] = None
        return sse_event(event)

    # ---- both

    def _head(self, kind: str) -> JsonObject:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._service.model_name}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Any]) -> JsonObject:
        return {"content": self._service.token_texts.chat_logprobs(ids, logprobs), "refusal": None}


def _delta(piece: Piece) -> JsonObject:
    """Return the delta for a piece; empty for the end of a call without more text."""
    call = piece.call
    if call is None:
        return {"reasoning_content": piece.thinking} if piece.thinking else _text_delta(piece.content, None)
    if call.opens:
        return {"tool_calls": [{"index": call.number, **_call(call.id, call.name, call.arguments)}]}
    return _text_delta(call.arguments, call.number) if call.arguments else {}


def _text_delta(text: str, call: int | None) -> JsonObject:
    """Return a delta of content, or of the arguments of an open call."""
    return {"content": text} if call is None else {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _call(number: str, name: str, arguments: str) -> JsonObject:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
