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

from radixkv.errors import InvalidInput, UnsafeFolder
from radixkv.telemetry.discovery import advertise, is_loopback, tcp_address
from radixkv.telemetry.records import EngineFacts
from radixkv.telemetry.socket_paths import claim, is_claimed, is_trusted_peer, release

_log = logging.getLogger(__name__)

_AT_ONCE = 8  # connections taken in one turn; fewer than may wait, so that none is dropped before it was read
_REST = 1.0  # seconds without listening when the process has no file descriptors left
_BACKLOG = 128
_ROUND = 10.0  # seconds between two looks at whether the socket can still be found


class Listener:
    """Listens from `open` to `close`, and hands over who may come in: `meet(connection, token it has to know)`."""

    def __init__(self, listen: str | None, meet: Callable[[socket.socket, str | None], None]) -> None:
        """Open nothing yet. Raises InvalidInput for a `listen` that is no address, or that others could reach."""
        self._address = None if listen is None else _checked(listen)
        self._meet = meet
        self.path: Path | None = None  # of the Unix socket; None while there is no place for it
        self.tcp: str | None = None  # host:port
        self.token: str | None = None
        self._listeners: list[socket.socket] = []
        self._local: socket.socket | None = None  # of these, the one that is a Unix socket
        self._resume_at: float | None = None
        self._look_at = 0.0
        self._is_lost = False

    def open(self, facts: EngineFacts, selector: selectors.BaseSelector) -> None:
        """Listen, and say so to those who look for engines. Raises UnsafeFolder or OSError; then `close` it.

        A port that cannot be had is one warning: the Unix socket serves all the same.
        """
        self._facts, self._selector = facts, selector
        if self._address is not None:
            self._open_port(self._address)
        self._settle()
        self._look_at = time.monotonic() + _ROUND

    def _open_port(self, address: tuple[str, int]) -> None:
        try:
            listener = _tcp_listener(address)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("no monitor can attach at tcp://%s:%d: %s; its Unix socket is there", *address, reason)
            return
        host, port = listener.getsockname()[:2]
        self.tcp = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.token = secrets.token_urlsafe(32)
        self._listen(listener)

    def _settle(self) -> None:
        """Have a Unix socket, and say where."""
        self.path, self._local = claim()
        self._listen(self._local)
        advertise(self._facts, self.path, self.tcp, self.token)

    def close(self) -> None:
        """Listen no more, and remove the files if they are this process's. May be called twice."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._local = None
        if self.path is not None:
            release(self.path)

    def shut(self) -> None:
        """As `close`, while the selector is in use."""
        if self._resume_at is None:
            self._forget()
        self.close()

    def look(self, now: float) -> None:
        """Listen again if it has rested enough, and be found again if files have gone; `now` on the monotonic clock."""
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            for listener in self._listeners:
                self._watch(listener)
        if now >= self._look_at:
            self._look_at = now + _ROUND
            self._be_found()

    def _be_found(self) -> None:
        """Whoever cleans runtime folders asks no engine: have a place there anew, or say once why not."""
        try:
            if self.path is None or not is_claimed(self.path):
                self._move()
            elif not self.path.with_suffix(".json").exists():
                advertise(self._facts, self.path, self.tcp, self.token)
        except (OSError, UnsafeFolder) as error:
            if not self._is_lost:
                _log.warning("this engine's socket is gone, and there is no place for another one: %s", error)
            self._is_lost = True
        else:
            self._is_lost = False

    def _move(self) -> None:
        if self._local is not None:
            if self._resume_at is None:
                self._selector.unregister(self._local)
            self._listeners.remove(self._local)
            self._local.close()
            self._local = None
        if self.path is not None:
            release(self.path)
            self.path = None
        self._settle()

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        if self._resume_at is None:
            self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda mask: self._accept(listener))

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
            if local and not is_trusted_peer(connection):
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
