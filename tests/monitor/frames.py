"""Frames of a small engine, sockets that send them, a clock that a test moves, and waiting for another thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

from radixkv.errors import EngineNotFound
from radixkv.telemetry.protocol import Delta, Frame, Snapshot, encode
from radixkv.telemetry.records import Changes, NodeRecord
from tests.monitor.fake_feed import FACTS

OTHER = replace(FACTS, engine="engine-2", pid=5000)


def node(number: int, used: float) -> NodeRecord:
    return NodeRecord(number, 0, 0, 16, (number, 1), 0, 0, 0, 0, 0, False, 0.0, used)


def snapshot(time: float, *numbers: int, seq: int = 0) -> Snapshot:
    changes = Changes(time=time, reset=True, stats={"steps": time}, nodes=tuple(node(n, time) for n in numbers))
    return Snapshot(0, 1, changes, seq=seq, ts=time)


def delta(time: float, *numbers: int, gone: tuple[int, ...] = (), seq: int = 0) -> Delta:
    nodes = tuple(node(n, time) for n in numbers)
    return Delta(Changes(time=time, stats={"steps": time}, nodes=nodes, gone_nodes=gone), seq=seq, ts=time)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for another thread; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.005)


class Engines:
    """The other end of a feed's connections: each attempt gets the next socket, or a refusal."""

    def __init__(self) -> None:
        self.waiting: list[socket.socket | Exception] = []
        self.attempts = 0

    def serve(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.waiting.append(theirs)
        return ours

    def connect(self) -> socket.socket:
        self.attempts += 1
        if not self.waiting:
            raise EngineNotFound("no engine answers at x: Connection refused")
        found = self.waiting.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def send(connection: socket.socket, *frames: Frame) -> None:
    connection.sendall(b"".join(encode(frame) for frame in frames))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time
