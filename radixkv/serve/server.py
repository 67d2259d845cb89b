"""Run the application with uvicorn on a socket, and shut it down so that running streams finish."""

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
from radixkv.serve.app import application
from radixkv.serve.http_parser import http_protocol
from radixkv.serve.loading import address, bind, tls_context
from radixkv.serve.served_models import Models, OneModel
from radixkv.server_settings import Settings

__all__ = ["Server", "address", "bind"]

_GRACE = 5.0  # seconds for clients to read the rest, once the engine has closed
# Seconds for which an idle connection stays open, longer than in httpx (5 s, as uvicorn's default): else the openai
# package now and then sends a request on a connection that is just being closed.
_KEEP_ALIVE = 75


class Server(uvicorn.Server):
    """Serve models until SIGINT or SIGTERM, then close their engines.

    On shutdown new requests are refused. Running requests have `drain_timeout` to finish, then they end with an error.
    A second signal, of either kind, drops all connections, and its number is stored in `cut_by`.
    """

    def __init__(
        self,
        engine: AsyncEngine | Models,
        settings: Settings | None = None,
        on_ready: Callable[[], None] | None = None,
        on_cut: Callable[[int], None] | None = None,
    ) -> None:
        """Serve an engine with these settings, or models, which have their own.

        Call `on_ready` once connections are accepted, `on_cut` with the number of a second signal.
        """
        models = self.models = OneModel(engine, settings) if isinstance(engine, AsyncEngine) else engine
        self._on_ready, self._on_cut = on_ready, on_cut
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cut_by: int | None = None
        gate, settings = models.gate, models.gate.settings
        tls_context(settings)  # refused here: uvicorn would ask for the password of an encrypted key
        config = uvicorn.Config(
            application(models),
            http=http_protocol(gate.connections, settings.head_timeout),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections, once the models are prepared."""
        self._loop = asyncio.get_running_loop()
        await self.models.prepare()
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, and close the engines."""
        self.models.gate.begin_shutdown()
        closing = asyncio.create_task(self.models.close())
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
        """Handle a signal; called on the main thread, between any two of the event loop's instructions."""
        if not self.should_exit:
            self.should_exit = self.models.gate.ending = True
            return
        self.cut_by, self.force_exit = sig, True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)
        if self._on_cut is not None:
            self._on_cut(sig)

    async def _cut_after(self, closing: asyncio.Task[None]) -> None:
        """Wait for the engines, then a while for slow readers, and drop the connections."""
        await asyncio.wait([closing])
        await asyncio.sleep(_GRACE)
        self._cut()

    async def _drop_connections(self) -> None:
        """Drop all connections, and wait for their tasks: else asyncio cancels them, and uvicorn logs an error."""
        self._cut()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_GRACE)

    def _cut(self) -> None:
        """Drop all connections; their endpoints see a disconnected client, and stop."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down on Ctrl-C, SIGTERM, and SIGHUP unless it is ignored, as under nohup.

        Unlike uvicorn's own method, do not raise the signals again afterwards.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
