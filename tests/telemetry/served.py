"""A publisher with a fake engine, and readers of its socket."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from radixkv.telemetry import socket_paths
from radixkv.telemetry.client_set import ClientLimits
from radixkv.telemetry.discovery import connect
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Decoder, Delta, Frame, Gap, Hello, Snapshot
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.records import Changes, NodeRecord
from tests.telemetry.wire import FACTS, node

PATIENCE = 20.0  # seconds until a test gives up; it never takes as long


def wait_until(true: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.002)


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder with a short path for sockets, in place of the user's own; without other engines."""
    folder = Path(tempfile.mkdtemp(prefix="rkv"))
    with (
        mock.patch.dict(os.environ, XDG_RUNTIME_DIR=str(folder)),
        mock.patch.object(
            socket_paths, "gettempdir", return_value=str(folder)
        ),  # where engines of other processes may be
        mock.patch.dict(socket_paths._taken, clear=True),  # names that engines of other tests still have
    ):
        yield folder / "radixkv"
    shutil.rmtree(folder)


@contextmanager
def room(size: int) -> Iterator[None]:
    """Limit the size of files of this process, so that writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Engine:
    """Collects its changes at once, or never while it is `stuck`."""

    def __init__(self) -> None:
        self.mirror = Mirror()  # the expected state
        self.fresh: dict[int, NodeRecord] = {}
        self.steps = 0
        self.collected = 0
        self.stuck = False
        self.waiting: list[Future[Changes]] = []
        self.lock = threading.Lock()  # of the mirror: tests change it while the publisher reads it

    def change(self, *nodes: NodeRecord) -> None:
        with self.lock:
            self.steps += 1
            self.fresh.update({each.id: each for each in nodes})

    def pending(self) -> bool:
        return self.steps != self.mirror.stats.get("steps", 0)

    def collect(self) -> Future[Changes]:
        self.collected += 1
        future: Future[Changes] = Future()
        self.waiting.append(future)
        if not self.stuck:
            self.answer()
        return future

    def answer(self) -> None:
        self.stuck = False
        while self.waiting:
            with self.lock:
                fresh, self.fresh = self.fresh, {}
                changes = Changes(time.time(), stats={"steps": float(self.steps)}, nodes=tuple(fresh.values()))
                self.mirror.apply(changes)
            self.waiting.pop().set_result(changes)


@contextmanager
def serving(listen: str | None = None, **limits: float) -> Iterator[tuple[Publisher, Engine]]:
    """A publisher in a folder of its own, and its engine."""
    engine = Engine()
    limits = {"hz": 500.0, **limits}
    with runtime_folder():
        publisher = Publisher(FACTS, engine.collect, engine.pending, listen, limits=ClientLimits(**limits))  # type: ignore[arg-type]
        publisher.start()
        try:
            yield publisher, engine
        finally:
            publisher.close()


def unix(path: object) -> socket.socket:
    """A connection that has sent nothing yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(str(path))
    return connection


def remaining_text(connection: socket.socket) -> str:
    """The last bytes that the publisher sends before it closes the connection."""
    data = b""
    try:
        while piece := connection.recv(65_536):
            data += piece
    except ConnectionResetError:
        pass
    connection.close()
    return data.decode("latin-1")


def threads_and_files() -> tuple[set[str], int]:
    """The names of all threads and the number of open files, to compare later."""
    return {thread.name for thread in threading.enumerate()}, len(os.listdir("/dev/fd"))


class Reader:
    """A monitor: it reads frames, adds them up, and checks their order."""

    def __init__(self, target: object, token: str = "", hz: float = 500.0) -> None:
        self.socket: socket.socket = connect(target, token, hz)  # type: ignore[arg-type]
        self.socket.settimeout(PATIENCE)
        self.decoder = Decoder()
        self.frames: list[Frame] = []
        self.mirror = Mirror()
        self.gaps = 0
        self.bye: str | None = None
        self._whole = True

    def read(self, size: int = 65_536) -> list[Frame]:
        """The frames of one more piece; none at the end."""
        fresh = list(self.decoder.feed(self.socket.recv(size)))
        for frame in fresh:
            self._add(frame)
        return fresh

    def _add(self, frame: Frame) -> None:
        before = self.frames[-1].seq if self.frames else 0
        self.frames.append(frame)
        if isinstance(frame, Hello):
            assert len(self.frames) == 1
        elif isinstance(frame, Gap):
            assert frame.dropped == frame.seq - before > 0
            self.gaps += frame.dropped
        elif isinstance(frame, Snapshot):
            self._whole = frame.last
            self.mirror.apply(frame.changes)
        elif isinstance(frame, Delta):
            assert frame.seq == before + 1, "a delta is missing, and no gap says so"
            assert self._whole, "a delta came between the pages of a snapshot"
            self.mirror.apply(frame.changes)
        elif isinstance(frame, Bye):
            self.bye = frame.reason

    def until(self, true: Callable[[], object], what: str = "it") -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"read in vain until {what}"
            self.read()

    def until_current(self, engine: Engine) -> None:
        self.until(lambda: self._whole and self.mirror.stats.get("steps") == engine.steps, "the mirror knows all")
        assert self.mirror.nodes == engine.mirror.nodes

    def until_the_end(self) -> str | None:
        """The reason in the last frame, if there was one."""
        deadline = time.monotonic() + PATIENCE
        try:
            while data := self.socket.recv(65_536):
                assert time.monotonic() < deadline, "it does not end"
                for frame in self.decoder.feed(data):
                    self._add(frame)
        except ConnectionResetError:
            pass
        return self.bye

    def close(self) -> None:
        self.socket.close()


def many(count: int, blocks: int = 4, seed: int = 0) -> list[NodeRecord]:
    """This number of nodes, with several runs of blocks each."""
    return [
        node(at, max(0, at - 1), tuple(number for run in range(blocks) for number in (seed + at + 2 * run, 1)))
        for at in range(1, count + 1)
    ]
