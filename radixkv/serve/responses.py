"""Responses: usage in OpenAI's shape, whole bodies, and server-sent events.

A response ends early when its client leaves or stops reading.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.engine import Completion
from radixkv.serve.errors import ApiError, as_api_error
from radixkv.serve.fields import JsonObject

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_event = json.JSONEncoder(separators=(",", ":")).encode


def all_replies(completions: Iterable[Completion]) -> list[Completion]:
    """Return all replies of some requests, grouped by prompt."""
    return [each for completion in completions for each in (completion, *completion.alternatives)]


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """The tokens of some requests. A prompt and its cached tokens count once, for all its replies.

    `cached_tokens` of the `prompt_tokens` were found in the cache; the others were computed, and are cached now.
    `output_tokens` counts all replies, thinking and stop tokens included. `host_tokens` of the cached ones came from
    host memory, and `disk_tokens` of them from a disk. `predicted_tokens` were drafted from a prediction, and
    `accepted_tokens` of them are tokens of replies.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    predicted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def details(self) -> JsonObject:
        """The cached tokens, and apart from them those from host memory and from a disk if there are some."""
        lower = {name: count for name in ("host_tokens", "disk_tokens") if (count := getattr(self, name))}
        return {"cached_tokens": self.cached_tokens, **lower}

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> TurnUsage:
        """Return the tokens of complete requests."""
        return cls(
            sum(completion.usage.prompt_tokens for completion in completions),
            sum(completion.usage.cached_tokens for completion in completions),
            sum(completion.usage.output_tokens for completion in all_replies(completions)),
            sum(min(each.usage.host_tokens, each.usage.cached_tokens) for each in completions),
            sum(min(each.usage.disk_tokens, each.usage.cached_tokens) for each in completions),
            sum(each.usage.predicted_tokens for each in all_replies(completions)),
            sum(each.usage.accepted_predicted_tokens for each in all_replies(completions)),
        )


def usage(completions: Sequence[Completion], *, predicted: bool = False) -> JsonObject:
    """Return the token counts of some requests in OpenAI's shape; `predicted` ones have those of their prediction."""
    spent = TurnUsage.of(completions)
    counts = running_usage(spent.prompt_tokens, spent.output_tokens)
    if predicted:
        accepted, drafted = spent.accepted_tokens, spent.predicted_tokens
        about = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        counts["completion_tokens_details"] = about
    return {**counts, "prompt_tokens_details": spent.details}


def running_usage(prompt: int, output: int) -> JsonObject:
    """Return the token counts of some requests that are still running; hits are counted at the end."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def encode_response(head: JsonObject, choices: Callable[[], Iterable[JsonObject]], spent: JsonObject) -> bytes:
    """Return the JSON of a whole response.

    Log probabilities take a while to encode, so this runs on another thread than the event loop.
    """

    def encoded() -> bytes:
        parts = [_in_slices(choice, _encode) for choice in choices()]
        front = _in_slices({**head, "usage": spent}, _encode).removesuffix("}")
        return f'{front},"choices":[{",".join(parts)}]}}'.encode()

    return await asyncio.to_thread(encoded)


_SLICE = 64  # items of an array that are encoded at once


def _in_slices(value: Any, encode: Callable[[Any], str]) -> str:
    """Return a value as JSON. Each call of `encode` blocks all other threads, so long arrays are encoded in slices."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(name)}:{_in_slices(each, encode)}" for name, each in value.items()) + "}"
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[at : at + _SLICE] for at in range(0, len(value), _SLICE))
        return "[" + ",".join(encode(part)[1:-1] for part in slices) + "]"
    return encode(value)


Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = 15.0  # seconds of silence before a stream sends its `keep_alive`, since clients give up on a silent one
COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """Send events as they arrive, until they end, the client disconnects, or it stops reading for too long.

    A disconnect is noticed both while waiting for the next event and while sending one. After each `KEEP_ALIVE` seconds
    without an event, the stream sends `keep_alive`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_timeout: float,
        cleanup: ExitStack,
        error_event: Callable[[ApiError], bytes] | None = None,
        keep_alive: bytes = COMMENT,
        media_type: str = media_type,
    ) -> None:
        """Close `cleanup` at the end of the response. `error_event` encodes an error; the default is OpenAI's form."""
        self.status_code, self.media_type = 200, media_type
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._send_timeout, self._cleanup = events, send_timeout, cleanup
        self._keep_alive = keep_alive
        self._sending, self._sent_at = False, monotonic()  # whether and when the latest part began to be sent
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._error_event = error_event or (lambda error: sse_event(error.body()))

    def init_headers(self, headers: Any = None) -> None:
        """Set the headers as Starlette does, but without a content length."""
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        log_fields = scope["state"]["log_fields"]
        with self._cleanup:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with Interruptible(receive) as block:
                    self._check(send, block)
                    await self._sent(send)
            except ClientDisconnected:
                log_fields["client"] = "left"
            except TimeoutError:
                log_fields["client"] = "stopped reading"
            finally:
                for waiting in (self._timer, self._pinging):
                    if waiting is not None:
                        waiting.cancel()
                await self._events.aclose()

    async def _sent(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send_one(send, event)
        except Exception as error:
            await self._send_one(send, self._error_event(as_api_error(error)))
        if self._pinging is not None:
            await self._pinging  # nothing follows the end
        await self._send_one(send, b"", more=False)

    async def _send_one(self, send: Send, part: bytes, *, more: bool = True) -> None:
        self._sending, self._sent_at = True, monotonic()
        await send({"type": "http.response.body", "body": part, "more_body": more})
        self._sending = False

    async def _ping(self, send: Send) -> None:
        if not self._sending and monotonic() - self._sent_at >= KEEP_ALIVE:  # still, since the task began later
            await self._send_one(send, self._keep_alive)

    def _check(self, send: Send, block: Interruptible) -> None:
        """Interrupt the response if one part is sent for too long, and keep a silent one alive.

        One timer looks at the latest part, because a timer of each part would cost more.
        """
        limit, passed = self._send_timeout if self._sending else KEEP_ALIVE, monotonic() - self._sent_at
        if passed >= limit:
            if self._sending:
                block.interrupt(TimeoutError())
                return
            self._pinging = asyncio.create_task(self._ping(send))
            passed = 0
        wait = min(limit - passed, self._send_timeout)
        self._timer = asyncio.get_running_loop().call_later(wait, self._check, send, block)


class ClientDisconnected(ApiError):
    """The client disconnected before its response was complete."""

    def __init__(self) -> None:
        """Set the status, which is for the log only."""
        super().__init__(499, "the client left before its answer was complete", code="client_disconnected")


class Interruptible:
    """An `async with` block that ends early: on a disconnect, at a deadline, or when `interrupt` is called.

    The block is cancelled where it waits. Then the statement raises ClientDisconnected, TimeoutError or the error that
    `interrupt` received. Costs one task; the block itself runs in the caller's.
    """

    def __init__(self, receive: Receive, deadline: float | None = None) -> None:
        """`receive` returns the client's messages; `deadline` is a time of the event loop."""
        self._receive = receive
        self._limit = asyncio.timeout_at(deadline)
        self._error: Exception | None = None
        self._ended = False

    def interrupt(self, error: Exception) -> None:
        """End the block with `error`, unless it has ended. Call on the event loop."""
        if self._error is None and not self._ended and not self._limit.expired():
            self._error = error
            self._limit.reschedule(0)

    async def __aenter__(self) -> Self:
        """Begin the block."""
        await self._limit.__aenter__()
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block, and raise the error that interrupted it."""
        self._ended = True
        self._watch.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            if self._error is None:
                raise
            raise self._error from expired

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientDisconnected())


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; raise ClientDisconnected if the client disconnects first."""
    async with Interruptible(request.receive):
        return await work


def sse_event(body: object) -> bytes:
    """Encode a JSON value as one event."""
    return b"data: " + _encode_event(body).encode() + b"\n\n"


def large_sse_event(body: object) -> bytes:
    """Encode a JSON value as `sse_event` does, for long values on another thread than the event loop."""
    return b"data: " + _in_slices(body, _encode_event).encode() + b"\n\n"
