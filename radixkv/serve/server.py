"""The process that serves: a socket, uvicorn, and an end at which streams finish.

Knows: uvicorn, signals and sockets. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from radixkv.chat import AsyncEngine
from radixkv.serve.app import create_app
from radixkv.serve.service import Service
from radixkv.serve.settings import Settings

_GRACE = 5.0  # seconds for what is left to be read once the engine has closed
# Seconds that an idle connection is kept. httpx, and so the openai package, keeps its for 5, as uvicorn would: now and
# then a request would be written into a connection that is just being closed.
_KEEP_ALIVE = 75


class Server(uvicorn.Server):
    """Serves an engine until SIGINT or SIGTERM, and closes it.

    At the end nothing new is taken; what runs has `drain_timeout` to finish, then it ends with an error that says so. A
    second signal, of either kind, cuts all connections, and is kept in `cut_by`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: Settings,
        on_ready: Callable[[], None] | None = None,
        on_cut: Callable[[int], None] | None = None,
    ) -> None:
        """`on_ready` is called once connections are taken, `on_cut` with the number of a second signal."""
        self._engine, self._settings, self._on_ready, self._on_cut = engine, settings, on_ready, on_cut
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cut_by: int | None = None
        app = create_app(engine, settings)
        self.service: Service = app.state.service
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs finish, and close the engine."""
        drain = self._settings.drain_timeout
        self.service.begin_shutdown()
        closing = asyncio.create_task(self._engine.close(drain > 0, drain or None))
        cutting = asyncio.create_task(self._cut_after(closing))
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            if self.force_exit:
                closing.cancel()
                await self._drop_connections()
                await self.lifespan.shutdown()
            with contextlib.suppress(asyncio.CancelledError):
                await closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does; called on the main thread, between any two of the event loop's instructions."""
        if not self.should_exit:
            self.should_exit = True
            return
        self.cut_by, self.force_exit = sig, True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)
        if self._on_cut is not None:
            self._on_cut(sig)

    async def _cut_after(self, closing: asyncio.Task[None]) -> None:
        """Wait for the engine, and some time longer for who reads slowly."""
        await asyncio.wait([closing])
        await asyncio.sleep(_GRACE)
        self._cut()

    async def _drop_connections(self) -> None:
        """Drop all connections, and wait until that was noticed: else asyncio cancels it, and uvicorn logs a fault."""
        self._cut()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_GRACE)

    def _cut(self) -> None:
        """Drop all connections; whoever answers on them sees a client that has left, and stops."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM as the wish to end, and, unlike uvicorn's own, do not pass them on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and takes no connection yet; raises OSError, at once rather than once loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def address(sock: socket.socket) -> str:
    """Where a bound socket is reached, as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
