"""The feed of an engine at a socket, and the commands to the engine of a connection.

A command names the engine that its user saw. It is sent only on a connection to that very engine: after a restart, the
same number may be another request.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Lock

from radixkv.errors import RadixKVError
from radixkv.telemetry.command_queue import Outcome
from radixkv.telemetry.protocol import WRONG_TOKEN, Command, Decoder, Frame, Hello, Reply, encode
from radixkv_monitor.feed import Link, Status, ThreadFeed, Traffic
from radixkv_monitor.formatting import duration
from radixkv_monitor.state import State

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


_log = logging.getLogger(__name__)

HZ = 10.0
SILENCE, SILENCE_TIMEOUT = 3.0, 15.0
"""The seconds without a frame after which an engine counts as silent, and as gone. Publishers send at least one frame a
second.
"""
SHORTEST_RETRY, LONGEST_RETRY = 0.25, 8.0
"""The seconds between attempts to connect: doubled after each failure, with jitter."""
STOPPED = "the engine's process is stopped or very busy"
RESTARTED, RESTART_NOTICE = "the engine was restarted", 30.0
"""The notice after an engine was replaced by another, and for how many seconds it is shown."""
_CHUNK = 256 * 1024
_POLL = 0.5  # seconds


class SocketFeed(ThreadFeed):
    """Read an engine at a socket, and connect again until closed.

    `connect` makes one attempt and returns a socket that receives frames. It raises OSError or RadixKVError. A
    restarted engine has another name.
    """

    def __init__(
        self,
        title: str,
        connect: Callable[[], socket.socket],
        *,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        super().__init__(title, clock=clock)
        self._connect = connect
        self._ticks = ticks
        self._jitter = random.Random(seed)
        self._failures = 0
        self._frames = self._bytes = 0
        self._channel = CommandChannel()
        self._status = Status("connecting", clock())

    @property
    def traffic(self) -> Traffic:
        """The frames and bytes received so far."""
        return Traffic(self._frames, self._bytes)

    @property
    def current(self) -> State | None:
        """The newest state, and whether the engine executes commands now."""
        state = super().current
        return state if state is None else replace(state, control=self._channel.allows(state.facts.engine))

    def command(self, verb: str, number: int, engine: str) -> Future[Outcome]:
        """Send a command, if the engine of this name is connected and takes commands."""
        return self._channel.send(verb, number, engine)

    def _run(self) -> None:
        while not self._closing.is_set():
            reason = self._connect_once()
            if reason.startswith(WRONG_TOKEN):  # another attempt with the same token would fail too
                self._status = Status("ended", self._clock(), f"{self.title}: {reason}")
                return
            if not self._closing.is_set():
                self._wait(reason)

    def _connect_once(self) -> str:
        """Read one connection to its end; return why it ended."""
        try:
            with self._connect() as connection:
                connection.settimeout(_POLL)
                self.peer = _socket_name(connection)
                self._channel.open(connection)
                try:
                    return self._read(connection)
                finally:
                    self._channel.close()
        except (OSError, RadixKVError) as error:
            _log.info("no connection: %s", error)
            return _reason(error)

    def _read(self, connection: socket.socket) -> str:
        decoder = Decoder()
        last_received = self._ticks()
        while not self._closing.is_set():
            try:
                data = connection.recv(_CHUNK)
            except TimeoutError:
                if select.select([connection], [], [], 0)[0]:  # this process itself was stopped while it waited
                    continue
                silence = self._ticks() - last_received
                self._note_silence(silence)
                if silence > SILENCE_TIMEOUT:
                    return f"no data for {duration(silence)}"
                continue
            if not data:
                return self.builder.end_reason or "the engine closed the connection"
            last_received = self._ticks()
            self._bytes += len(data)
            self._take(self._channel.take(decoder.feed(data)))
        return "closed"

    def _note_silence(self, silence: float) -> None:
        """Report a silence of some seconds; the engine may be stopped, or its machine be too busy to run it."""
        was = self._status
        if silence < SILENCE:
            return
        if was.link in ("live", "silent"):
            self._status = Status("silent", self._clock() - silence, f"No news for {silence:.0f} s: {STOPPED}", silence)
        else:
            sentence = f"connected, but nothing was received for {silence:.0f} s: {STOPPED}"
            self._status = Status(was.link, was.since, sentence, silence)

    def _take(self, frames: list[Frame]) -> None:
        self._frames += len(frames)
        if frames and self._status.link == "silent":
            self._status = Status("live", self._clock())
        before = self.builder.latest
        state = self.builder.take(*frames)
        if state is None:
            return
        restarted = before is not None and before.facts.engine != state.facts.engine
        if self._status.link != "live" or restarted:
            self._failures = 0
            self._status = Status("live", self._clock(), RESTARTED if restarted else "")
        elif self._status.sentence and self._clock() - self._status.since > RESTART_NOTICE:
            self._status = Status("live", self._status.since)

    def _wait(self, reason: str) -> None:
        """Wait longer after each failure, so that many monitors do not connect at once when an engine returns."""
        pause = min(LONGEST_RETRY, SHORTEST_RETRY * 2**self._failures) * self._jitter.uniform(0.5, 1.0)
        self._failures += 1
        was = self._status
        link: Link = "stale" if self.builder.latest is not None else "connecting"
        if self.builder.end_reason not in (None, reason):  # the engine's own reason says more than the lost connection
            reason = f"{self.builder.end_reason}; {reason}"
        since = was.since if was.link in (link, "silent") else self._clock()
        opening = f"Looking for an engine at {self.title}: " if link == "connecting" else ""
        self._status = Status(link, since, f"{opening}{reason}; next attempt in {duration(pause)}")
        self._closing.wait(pause)


def _socket_name(connection: socket.socket) -> str:
    """Return the name of the other end's socket file; empty for other sockets."""
    name = connection.getpeername()
    return Path(name).stem if isinstance(name, str) else ""


def _reason(error: Exception) -> str:
    """Describe the error without numbers that mean nothing to a reader."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
