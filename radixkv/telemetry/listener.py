"""Accept connections for a publisher, on a Unix socket and, if requested, on a TCP port.

Only this user and root are accepted on the Unix socket; TCP clients must send a token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from radixkv.errors import InvalidInput, UnsafeFolder
from radixkv.server_settings import is_loopback
from radixkv.telemetry.discovery import advertise, tcp_address
from radixkv.telemetry.records import EngineFacts
from radixkv.telemetry.socket_paths import claim, is_claimed, is_trusted_peer, release

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0  # seconds without accepting when the process has no file descriptors left
_BACKLOG = 128
_CHECK_INTERVAL = 10.0  # seconds between two checks that the socket's files still exist


class Listener:
    """Listen from `open` to `close`, and call `on_connection(connection, required token)` for trusted connections."""

    def __init__(self, listen: str | None, on_connection: Callable[[socket.socket, str | None], None]) -> None:
        """Open nothing yet. Raises InvalidInput for an invalid `listen`, or one that other machines could reach."""
        self._address = None if listen is None else _checked(listen)
        self._on_connection = on_connection
        self.path: Path | None = None  # of the Unix socket; None while it has none
        self.tcp: str | None = None  # host:port
        self.token: str | None = None
        self._unix: socket.socket | None = None
        self._tcp: socket.socket | None = None
        self._accepts_unix: asyncio.Task[None] | None = None
        self._files_lost = False

    def open(self, facts: EngineFacts) -> None:
        """Listen, and write the description that `discovery` reads. Raises UnsafeFolder or OSError; call `close` then.

        A TCP port that is not available is logged as a warning, and the Unix socket works without it.
        """
        self._facts = facts
        if self._address is not None:
            self._open_tcp(self._address)
        self._bind()

    def _open_tcp(self, address: tuple[str, int]) -> None:
        try:
            self._tcp = _tcp_listener(address)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("no monitor can attach at tcp://%s:%d: %s; its Unix socket is there", *address, reason)
            return
        host, port = self._tcp.getsockname()[:2]
        self.tcp = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.token = secrets.token_urlsafe(32)

    def _bind(self) -> None:
        """Bind a Unix socket and write its description."""
        self.path, self._unix = claim()
        advertise(self._facts, self.path, self.tcp, self.token)

    def close(self) -> None:
        """Stop listening, and remove the files if they belong to this process. May be called twice."""
        if self._tcp is not None:
            self._tcp.close()
        self._close_unix()

    def _close_unix(self) -> None:
        if self._unix is not None:
            self._unix.close()
            self._unix = None
        if self.path is not None:
            release(self.path)

    async def run(self) -> None:
        """Accept connections, and restore deleted files."""
        async with asyncio.TaskGroup() as tasks:
            if self._tcp is not None:
                tasks.create_task(self._accept(self._tcp, self.token))
            while True:
                if self._unix is not None and (self._accepts_unix is None or self._accepts_unix.done()):
                    self._accepts_unix = tasks.create_task(self._accept(self._unix, None))
                await asyncio.sleep(_CHECK_INTERVAL)
                self._restore_files()

    async def _accept(self, listener: socket.socket, token: str | None) -> None:
        """Accept connections until a listener is closed; those on a Unix socket need no token, but a trusted peer."""
        loop = asyncio.get_running_loop()
        while listener.fileno() >= 0:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _log.warning("the monitor's publisher takes no connections for a second: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if listener.family == socket.AF_UNIX and not is_trusted_peer(connection):
                connection.close()
            else:
                self._on_connection(connection, token)
            await asyncio.sleep(0)  # the client's task begins before the next one is accepted

    def _restore_files(self) -> None:
        """Restore the socket or its description after a cleaner of runtime folders deleted it; log a failure once."""
        try:
            if self.path is None or not is_claimed(self.path):
                if self._accepts_unix is not None:
                    self._accepts_unix.cancel()
                    self._accepts_unix = None
                self._close_unix()
                self.path = None
                self._bind()
            elif not self.path.with_suffix(".json").exists():
                advertise(self._facts, self.path, self.tcp, self.token)
        except (OSError, UnsafeFolder) as error:
            if not self._files_lost:
                _log.warning("this engine's socket is gone, and there is no place for another one: %s", error)
            self._files_lost = True
        else:
            self._files_lost = False


def _checked(listen: str) -> tuple[str, int]:
    """Parse tcp://host:port. Addresses that other machines reach require `?allow=remote`."""
    address, _, query = listen.partition("?")
    host, port = tcp_address(address)
    if query not in ("", "allow=remote"):
        raise InvalidInput(f"{query!r} is not an option of an address: there is only ?allow=remote")
    if not is_loopback(host) and not query:
        raise InvalidInput(
            f"{host} can be reached from other machines, and the token would travel in the clear: use 127.0.0.1 and a "
            "tunnel, or append ?allow=remote"
        )
    return host, port


def _tcp_listener(address: tuple[str, int]) -> socket.socket:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
