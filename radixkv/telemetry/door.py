"""Where a publisher takes connections: a Unix socket, a TCP port if that was asked for, and who may come in.

Knows listening sockets, addresses and the token. Knows no frame, and does not keep who came in.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

from radixkv.errors import InvalidInput
from radixkv.telemetry.discovery import advertise, is_loopback, tcp_address
from radixkv.telemetry.places import claim, may_talk, release
from radixkv.telemetry.records import EngineFacts

_log = logging.getLogger(__name__)

_AT_ONCE = 8  # connections taken in one turn; fewer than may wait, so that none is dropped before it was read
_REST = 1.0  # seconds without listening when the process has no file descriptors left
_BACKLOG = 128


class Door:
    """Listens from `open` to `close`, and hands over who may come in: `meet(connection, token it has to know)`."""

    def __init__(self, listen: str | None, meet: Callable[[socket.socket, str | None], None]) -> None:
        """Open nothing yet. Raises InvalidInput for a `listen` that is no address, or that others could reach."""
        self._address = None if listen is None else _checked(listen)
        self._meet = meet
        self.path: Path | None = None  # of the Unix socket
        self.tcp: str | None = None  # host:port
        self.token: str | None = None
        self._listeners: list[socket.socket] = []
        self._resume_at: float | None = None

    def open(self, facts: EngineFacts, selector: selectors.BaseSelector) -> None:
        """Listen, and say so to those who look for engines. Raises UnsafeFolder or OSError; then `close` it."""
        self._selector = selector
        self.path, listener = claim()
        self._listeners.append(listener)
        if self._address is not None:
            self._listeners.append(_tcp_listener(self._address))
            host, port = self._listeners[-1].getsockname()[:2]
            self.tcp = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self.token = secrets.token_urlsafe(32)
        self._resume()
        advertise(facts, self.path, self.tcp, self.token)

    def close(self) -> None:
        """Listen no more, and remove the files if they are this process's. May be called twice."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self.path is not None:
            release(self.path)

    def shut(self) -> None:
        """As `close`, while the selector is in use."""
        if self._resume_at is None:
            self._forget()
        self.close()

    def look(self, now: float) -> None:
        """Listen again if it has rested enough; `now` on the monotonic clock."""
        if self._resume_at is not None and now >= self._resume_at:
            self._resume()

    def _resume(self) -> None:
        self._resume_at = None
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, lambda mask, at=listener: self._accept(at))

    def _forget(self) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:  # who waits in the queue would have us try again at once, for ever
                self._rest(error)
                return
            connection.setblocking(False)
            local = listener.family == socket.AF_UNIX
            if local and not may_talk(connection):
                connection.close()
                continue
            self._meet(connection, None if local else self.token)

    def _rest(self, error: OSError) -> None:
        if self._resume_at is None:
            _log.warning("the monitor's publisher takes no connections for a second: %s", error)
            self._resume_at = time.monotonic() + _REST
            self._forget()


def _checked(listen: str) -> tuple[str, int]:
    """Host and port of tcp://host:port, which only this machine reaches, or anybody if that was asked for."""
    address, _, query = listen.partition("?")
    host, port = tcp_address(address)
    if query not in ("", "allow=remote"):
        raise InvalidInput(f"{query!r} behind an address means nothing: there is only ?allow=remote")
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
