"""Feeds of what is happening now: an engine behind a socket, and the demo.

Knows how to reach an engine again and when to give that up for a while. Knows no screen.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

from radixkv.errors import RadixKVError
from radixkv.telemetry.protocol import WRONG_TOKEN, Decoder, Delta, Frame, Hello, Snapshot
from radixkv.telemetry.records import Changes, EngineFacts
from radixkv_monitor.feed import Link, Status, ThreadFeed, Traffic
from radixkv_monitor.formatting import duration

_log = logging.getLogger(__name__)

HZ = 10.0
SILENCE_TIMEOUT = 15.0
"""Seconds without any frame, after which an engine counts as gone: publishers give a sign of life more often."""
SHORTEST_RETRY, LONGEST_RETRY = 0.25, 8.0
"""Seconds between attempts to reach an engine: doubled each time, with jitter."""
RESTARTED, RESTART_NOTICE = "the engine was restarted", 30.0
"""What is said of another engine in the place of the last one, and for how many seconds."""
_CHUNK = 256 * 1024


class SocketFeed(ThreadFeed):
    """An engine behind a socket, reached again and again until closed.

    `connect` makes one attempt: a socket on which frames arrive. It raises OSError or RadixKVError. An engine that was
    restarted is told by its name.
    """

    def __init__(
        self,
        title: str,
        connect: Callable[[], socket.socket],
        *,
        clock: Callable[[], float] = time.time,
        seed: int | None = None,
    ) -> None:
        super().__init__(title, clock=clock)
        self._connect = connect
        self._jitter = random.Random(seed)
        self._failures = 0
        self._frames = self._bytes = 0
        self._status = Status("connecting", clock())

    @property
    def traffic(self) -> Traffic:
        """What has come in so far."""
        return Traffic(self._frames, self._bytes)

    def _run(self) -> None:
        while not self._closing.is_set():
            reason = self._connect_once()
            if reason.startswith(WRONG_TOKEN):  # knocking again with the same one would change nothing
                self._status = Status("ended", self._clock(), f"{self.title}: {reason}")
                return
            if not self._closing.is_set():
                self._wait(reason)

    def _connect_once(self) -> str:
        """One connection, from its beginning to its end; returns why it ended."""
        try:
            with self._connect() as connection:
                connection.settimeout(0.5)
                self.peer = _socket_name(connection)
                return self._read(connection)
        except (OSError, RadixKVError) as error:
            _log.info("no connection: %s", error)
            return _reason(error)

    def _read(self, connection: socket.socket) -> str:
        decoder = Decoder()
        last_received = time.monotonic()
        while not self._closing.is_set():
            try:
                data = connection.recv(_CHUNK)
            except TimeoutError:
                if time.monotonic() - last_received > SILENCE_TIMEOUT:
                    return f"it has been silent for {duration(time.monotonic() - last_received)}"
                continue
            if not data:
                return self.builder.end_reason or "the engine closed the connection"
            last_received = time.monotonic()
            self._bytes += len(data)
            self._take(list(decoder.feed(data)))
        return "closed"

    def _take(self, frames: list[Frame]) -> None:
        self._frames += len(frames)
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
        """Longer after each failure, so that many monitors do not knock at once when an engine comes back."""
        pause = min(LONGEST_RETRY, SHORTEST_RETRY * 2**self._failures) * self._jitter.uniform(0.5, 1.0)
        self._failures += 1
        was = self._status
        link: Link = "stale" if self.builder.latest is not None else "connecting"
        if self.builder.end_reason not in (None, reason):  # what it said itself is worth more than that it is gone
            reason = f"{self.builder.end_reason}; {reason}"
        since = was.since if was.link == link else self._clock()
        opening = f"Looking for an engine at {self.title}: " if link == "connecting" else ""
        self._status = Status(link, since, f"{opening}{reason}; next attempt in {duration(pause)}")
        self._closing.wait(pause)


class Source(Protocol):
    """What a DemoFeed shows: `step` says what has changed up to `now`."""

    facts: EngineFacts

    def step(self, now: float) -> Changes:
        """What has changed up to `now`."""
        ...


class DemoFeed(ThreadFeed):
    """A workload that is made up, in this process; the cache that it drives is the real one."""

    def __init__(self, source: Callable[[], Source], *, clock: Callable[[], float] = time.time) -> None:
        super().__init__("demo", clock=clock)
        self._source = source

    def _run(self) -> None:
        source = self._source()
        self._status = Status("connecting", source.facts.started, "The demo lives its first minute")
        self.builder.take(Hello(source.facts, ts=self._clock()))
        when = source.facts.started
        for seq in count(1):
            when = min(when + 1.0, self._clock())  # its past in steps, so that it has a history from the beginning
            changes = replace(source.step(when), reset=seq == 1)
            self.builder.take(Snapshot(0, 1, changes, ts=when) if seq == 1 else Delta(changes, seq=seq, ts=when))
            if self._clock() - when < 1.0:
                self._status = Status("live", source.facts.started)
                if self._closing.wait(1 / HZ):
                    return


def _socket_name(connection: socket.socket) -> str:
    """Of the other end, if it is a file."""
    name = connection.getpeername()
    return Path(name).stem if isinstance(name, str) else ""


def _reason(error: Exception) -> str:
    """What went wrong, without numbers that mean nothing to a person."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
