"""Server-sent events, and clients that leave.

Knows: ASGI's messages, and that a client may be slow or gone. Knows no engine: whoever makes events stops when they are
cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.serve.errors import ApiError, as_api_error

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventStream(Response):
    """Sends events, each as soon as it is there, until they end, the client leaves, or it reads nothing for too long.

    Leaving is noticed while the next event is waited for, and also while one is being sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], send_timeout: float, inside: ExitStack) -> None:
        """`inside` is left when everything is over."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._send_timeout, self._inside = events, send_timeout, inside

    def init_headers(self, headers: Any = None) -> None:
        """As Starlette's, without a length, which nobody knows yet."""
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        facts = scope["state"]["facts"]
        with self._inside:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if await first_of(self._sent(send), _left(receive)) is None:
                    facts["client"] = "left"
            except TimeoutError:
                facts["client"] = "stopped reading"
            finally:
                await self._events.aclose()

    async def _sent(self, send: Send) -> bool:
        try:
            async for event in self._events:
                await self._send_one(send, event)
        except Exception as error:
            if isinstance(error, TimeoutError):
                raise
            await self._send_one(send, data(as_api_error(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send_one(self, send: Send, event: bytes) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send({"type": "http.response.body", "body": event, "more_body": True})


async def first_of(*works: Coroutine[Any, Any, Result]) -> Result:
    """What the first of several that is done returns or raises; the others are cancelled, and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gone(receive: Receive) -> NoReturn:
    """Raise ApiError, which nobody reads, once the client leaves."""
    await _left(receive)
    raise ApiError(499, "the client left before its answer was complete", code="client_disconnected")


async def whole(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; raises ApiError, which nobody reads, if the client leaves first."""
    return await first_of(work, gone(request.receive))


def data(body: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + _encode(body).encode() + b"\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
