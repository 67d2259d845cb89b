"""Accept connections for a publisher, on a Unix socket and, if requested, on a TCP port.

Only this user and root are accepted on the Unix socket; TCP clients must send a token.
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
from radixkv.server_settings import is_loopback
from radixkv.telemetry.discovery import advertise, tcp_address
from radixkv.telemetry.records import EngineFacts
from radixkv.telemetry.socket_paths import claim, is_claimed, is_trusted_peer, release

_log = logging.getLogger(__name__)

_ACCEPT_BATCH = 8  # connections accepted in one turn; fewer than may wait, so none is dropped unread
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
        self._listeners: list[socket.socket] = []
        self._unix: socket.socket | None = None  # the one of them that is a Unix socket
        self._resume_at: float | None = None
        self._next_check = 0.0
        self._files_lost = False

    def open(self, facts: EngineFacts, selector: selectors.BaseSelector) -> None:
        """Listen, and write the description that `discovery` reads. Raises UnsafeFolder or OSError; call `close` then.

        A TCP port that is not available is logged as a warning, and the Unix socket works without it.
        """
        self._facts, self._selector = facts, selector
        if self._address is not None:
            self._open_tcp(self._address)
        self._bind()
        self._next_check = time.monotonic() + _CHECK_INTERVAL

    def _open_tcp(self, address: tuple[str, int]) -> None:
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

    def _bind(self) -> None:
        """Bind a Unix socket and write its description."""
        self.path, self._unix = claim()
        self._listen(self._unix)
        advertise(self._facts, self.path, self.tcp, self.token)

    def close(self) -> None:
        """Stop listening, and remove the files if they belong to this process. May be called twice."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._unix = None
        if self.path is not None:
            release(self.path)

    def stop(self) -> None:
        """Stop listening while the selector is still in use."""
        if self._resume_at is None:
            self._unregister()
        self.close()

    def maintain(self, now: float) -> None:
        """Resume after a pause, and restore deleted files; `now` is on the monotonic clock."""
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            for listener in self._listeners:
                self._register(listener)
        if now >= self._next_check:
            self._next_check = now + _CHECK_INTERVAL
            self._restore_files()

    def _restore_files(self) -> None:
        """Restore the socket or its description after a cleaner of runtime folders deleted it; log a failure once."""
        try:
            if self.path is None or not is_claimed(self.path):
                self._rebind()
            elif not self.path.with_suffix(".json").exists():
                advertise(self._facts, self.path, self.tcp, self.token)
        except (OSError, UnsafeFolder) as error:
            if not self._files_lost:
                _log.warning("this engine's socket is gone, and there is no place for another one: %s", error)
            self._files_lost = True
        else:
            self._files_lost = False

    def _rebind(self) -> None:
        if self._unix is not None:
            if self._resume_at is None:
                self._selector.unregister(self._unix)
            self._listeners.remove(self._unix)
            self._unix.close()
            self._unix = None
        if self.path is not None:
            release(self.path)
            self.path = None
        self._bind()

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        if self._resume_at is None:
            self._register(listener)

    def _register(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda mask: self._accept(listener))

    def _unregister(self) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:  # a waiting connection would wake the selector again at once
                self._pause(error)
                return
            connection.setblocking(False)
            local = listener.family == socket.AF_UNIX
            if local and not is_trusted_peer(connection):
                connection.close()
                continue
            self._on_connection(connection, None if local else self.token)

    def _pause(self, error: OSError) -> None:
        if self._resume_at is None:
            _log.warning("the monitor's publisher takes no connections for a second: %s", error)
            self._resume_at = time.monotonic() + _PAUSE_S
            self._unregister()


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
