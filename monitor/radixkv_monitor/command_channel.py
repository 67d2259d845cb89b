"""Send commands to the engine of a connection, and match its replies to them.

A command names the engine that its user saw. It is sent only on a connection to that very engine: after a restart, the
same number may be another request.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import count
from threading import Lock

from radixkv.telemetry.command_queue import Outcome
from radixkv.telemetry.protocol import Command, Frame, Hello, Reply, encode

NOT_NOW = "the engine is not connected, or it takes no commands: it must be loaded with monitor='rw' by the same user"
OTHER_ENGINE = "another engine is connected now: nothing was sent"
LOST = "the connection ended before the reply; the engine's log has the command if it was executed"


class CommandChannel:
    """The commands of one feed. One thread reads frames; any thread may send."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connection: socket.socket | None = None
        self._engine = ""  # of the connection, once it allows commands
        self._numbers = count(1)
        self._pending: dict[int, Future[Outcome]] = {}

    def allows(self, engine: str) -> bool:
        """Return whether commands to this engine can be sent now."""
        return bool(engine) and self._engine == engine

    def open(self, connection: socket.socket) -> None:
        """Use a new connection; its hello says whether commands are allowed."""
        with self._lock:
            self._connection, self._engine = connection, ""

    def close(self) -> None:
        """Forget the connection, which has ended. Commands without a reply end."""
        with self._lock:
            self._connection, self._engine = None, ""
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_result(Outcome(False, LOST))

    def send(self, verb: str, number: int, engine: str) -> Future[Outcome]:
        """Send a command to an engine; the future gets the outcome and never an error."""
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            connection, connected = self._connection, self._engine
            if connection is None or not connected:
                future.set_result(Outcome(False, NOT_NOW))
                return future
            if connected != engine:
                future.set_result(Outcome(False, OTHER_ENGINE))
                return future
            name = next(self._numbers)
            self._pending[name] = future
            try:
                connection.sendall(encode(Command(name, verb, number)))
            except OSError as error:
                del self._pending[name]
                future.set_result(Outcome(False, f"the command could not be sent: {error.strerror or error}"))
        return future

    def take(self, frames: Iterable[Frame]) -> list[Frame]:
        """Note hellos, and pass replies to the commands that wait for them; return all other frames, and hellos."""
        others: list[Frame] = []
        for frame in frames:
            if isinstance(frame, Reply):
                with self._lock:
                    future = self._pending.pop(frame.id, None)
                if future is not None:
                    future.set_result(Outcome(frame.done, frame.text))
                continue
            if isinstance(frame, Hello):
                with self._lock:
                    self._engine = frame.facts.engine if frame.facts.control else ""
            others.append(frame)
        return others
