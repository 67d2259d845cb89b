"""Admit the requests to a server, of whichever model: keys, limits, and the reading of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from radixkv.errors import EngineClosed, RequestTimedOut
from radixkv.serve.access import SALT, Auth, StreamLease, StreamLimiter, namespace, read_body
from radixkv.serve.connections import Connections
from radixkv.serve.fields import IgnoredFields, JsonObject, parse_object
from radixkv.serve.responses import Interruptible
from radixkv.serve.text_record import TextRecord
from radixkv.server_settings import Settings

Result = TypeVar("Result")
_LARGE = 1 << 16  # bytes of a body whose parsing takes some milliseconds


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its tenant and its cache namespace."""

    tenant: str | None
    namespace: Hashable


class Gate:
    """Admit requests to one server, and read them. For one event loop. `ending` says that a shutdown has begun."""

    def __init__(self, settings: Settings) -> None:
        """Begin without requests."""
        self.settings = settings
        self.auth = Auth(settings.api_keys)
        self.limiter = StreamLimiter(settings)
        self.connections = Connections(settings)
        self.texts = TextRecord(settings.record_text)
        self.ending = False
        # One thread, since a tokenizer is not thread-safe. It ends with the last reference to this object.
        self.executor = ThreadPoolExecutor(1, "radixkv-serve")
        self._preparing: set[Interruptible] = set()  # of requests that are not submitted yet

    def admit(self, request: Request, cleanup: ExitStack) -> StreamLease:
        """Admit a request until `cleanup` closes, before its body is read; raise ApiError 401, 403 or 429."""
        return cleanup.enter_context(self.limiter.admit(self._tenant(request)))

    async def read(self, request: Request, check: Callable[[JsonObject, IgnoredFields | None], Result]) -> Result:
        """Read a body and check it by `check(body, ignored)`; raise ApiError.

        From then on, a `cache_salt` names the namespace of the request's caller. The response has a warning header
        with the fields that `check` ignored; a strict server passes None instead. A large body is parsed on the
        background thread, to keep the event loop free. The request's timeout starts when the body has arrived.
        """
        body = await read_body(request, self.settings)
        ignored = None if self.settings.strict_fields else request.state.ignored
        timeout = self.settings.timeout
        request.state.deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

        def checked() -> Result:
            given = parse_object(body)
            request.state.cache_salt = given.get(SALT)
            return check(given, ignored)

        return await self.cancellable(request, self.in_background(checked)) if len(body) > _LARGE else checked()

    async def parsed(self, body: bytes) -> JsonObject:
        """Return `parse_object(body)`, of a large body from the background thread; raise ApiError."""
        return await self.in_background(lambda: parse_object(body)) if len(body) > _LARGE else parse_object(body)

    async def cancellable(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, which runs before a request is submitted to the engine.

        `work` is cancelled if the client disconnects (ClientDisconnected), the request times out (RequestTimedOut) or
        the server shuts down (EngineClosed). A call that is already running in the background continues, without
        effect.
        """
        block = Interruptible(request.receive, request.state.deadline)
        self._preparing.add(block)
        try:
            async with block:
                if self.ending:
                    block.interrupt(_ending())
                return await work
        except TimeoutError as error:
            raise self._timed_out() from error
        finally:
            self._preparing.discard(block)

    def time_left(self, request: Request) -> float | None:
        """Return the seconds until a request's deadline, None without one; raise RequestTimedOut."""
        deadline: float | None = request.state.deadline
        left = None if deadline is None else deadline - asyncio.get_running_loop().time()
        if left is not None and left <= 0:
            raise self._timed_out()
        return left

    def begin_shutdown(self) -> None:
        """Cancel the requests that wait for the background thread. Call on the event loop."""
        self.ending = True
        for block in self._preparing:
            block.interrupt(_ending())

    def caller(self, request: Request) -> Caller:
        """Return the sender of a request; raise ApiError 401, 403 or 429."""
        tenant = self._tenant(request)
        return Caller(tenant, namespace(tenant, request.headers, getattr(request.state, SALT, None)))

    def _tenant(self, request: Request) -> str | None:
        """Return the tenant of a request, to which its connection belongs from now on."""
        tenant = self.auth.tenant(request.headers)
        self.connections.claim(getattr(request.state, "connection", None), tenant)
        return tenant

    async def in_background(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the background thread for templates and tokenizers, and return its result.

        If the waiting task is cancelled before `call` starts, it never runs.
        """
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    def _timed_out(self) -> RequestTimedOut:
        return RequestTimedOut(f"the request did not finish in time: {self.settings.timeout:g} s have passed")


def _ending() -> EngineClosed:
    return EngineClosed("the server is ending")
