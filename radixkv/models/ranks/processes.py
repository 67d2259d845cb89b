"""Start the other ranks, call all ranks together, and notice when one fails, hangs or ends.

Rank 0 is the caller's process. Each call is sent to the other ranks by a pipe, executed by all, and answered by each:
so a call that fails on one rank fails on all. Every rank answers before the next call.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any, NamedTuple, NoReturn, TypeVar

from radixkv.device import refuse_fatal
from radixkv.errors import DeviceLost, EngineError, RadixKVError
from radixkv.models.ranks import group
from radixkv.models.ranks.messages import Buffer

Result = TypeVar("Result")
STEP, CALL = b"s", b"c"
HEAD = Struct("<cq")  # of a message: its kind and number
PROGRAM = "radixkv.models.ranks.rank_process"  # the module of the other ranks
LOADING_SECONDS = 3600.0  # for the weights of a large model
_GRACE_SECONDS = 2.0  # for answers after a failure of this rank
_BUFFERED = 1 << 16  # bytes that a pipe takes from one process before the other one reads


class RankFailed(EngineError, RuntimeError):
    """Another rank raised an error in a call."""


class Answer(NamedTuple):
    """The answer to a message of this number: the result of a call that succeeded, or an error."""

    number: int
    succeeded: bool
    value: Any


class Other(NamedTuple):
    """Another rank: its number, process and pipe."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection


class Processes:
    """All ranks of one engine. Any thread may call; one call runs at a time."""

    def __init__(self, size: int, timeout: float) -> None:
        """Start `size` - 1 processes, which end with this one. Raises InvalidInput, OSError."""
        group.refuse_second_world()
        self.size, self._timeout = size, timeout
        self._seconds = LOADING_SECONDS  # until `loaded`
        self._round, self._number, self.lost, self._late = 0, 0, "", False
        self._lock = threading.RLock()
        self._folder = tempfile.mkdtemp(prefix="radixkv-ranks-")
        self._others: list[Other] = []
        self.messages = self.bytes_sent = 0
        try:
            self._others = [_started(rank, self._folder) for rank in range(1, size)]
            self.call("started", own=lambda: None)  # a process that ends before would be waited for
            self.call("open", size, self._folder, self._seconds, own=lambda: self._open(0))
        except BaseException:
            self.close()
            raise

    def loaded(self) -> None:
        """Limit each call, from now on, to the seconds of the timeout."""
        self._seconds = self._timeout
        self._reconnect()

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Allow calls that read or write all weights, and their collectives, more than the seconds of the timeout."""
        with self._lock:
            self.call("started", own=lambda: None)  # a rank that hangs already is lost within the timeout
            self._seconds = LOADING_SECONDS
            self._reconnect()
            try:
                yield
            finally:
                self.loaded()

    def step(self, buffer: Buffer, own: Callable[[], Result]) -> Result:
        """Let the other ranks execute an encoded step, and this one `own`; return its result."""
        return self._together(STEP, buffer.tobytes(), own)[0]

    def call(self, name: str, *args: Any, own: Callable[[], Result]) -> tuple[Result, list[Any]]:
        """Let the other ranks call `name`, and this one `own`; return its result, and the results of the others."""
        return self._together(CALL, pickle.dumps((name, args)), own)

    def _together(self, kind: bytes, body: bytes, own: Callable[[], Result]) -> tuple[Result, list[Any]]:
        with self._lock:
            self._send(kind, body)
            began = time.monotonic()
            try:
                result = own()
            except Exception as error:
                group.disconnect()  # so that the collectives of the others end, too
                refuse_fatal(error)
                answers = self._answers(max(began + self._seconds - time.monotonic(), _GRACE_SECONDS))
                self._reconnect()
                if isinstance(error, RadixKVError) or not (failed := self._failed(answers)):
                    raise
                raise RankFailed("; ".join([f"rank 0: {type(error).__name__}: {error}", *failed])) from error
            answers = self._answers(self._seconds)
            if failed := self._failed(answers):
                self._reconnect()
                raise RankFailed("; ".join(failed))
            return result, [each.value for each in answers]

    def _failed(self, answers: list[Answer]) -> list[str]:
        pairs = zip(self._others, answers, strict=True)
        return [f"rank {other.rank}: {each.value}" for other, each in pairs if not each.succeeded]

    def _send(self, kind: bytes, body: bytes) -> None:
        """Send a message to each other rank. Raises DeviceLost if one has ended, or does not read it."""
        if self.lost:
            raise DeviceLost(self.lost)
        self._number, self._kind = self._number + 1, kind
        message = HEAD.pack(kind, self._number) + body
        with self._limited(self._seconds) if len(message) > _BUFFERED else nullcontext():
            for other in self._others:
                try:
                    other.pipe.send_bytes(message)
                except OSError:
                    self._lose(other, "")
        self.messages += 1
        self.bytes_sent += len(message)

    def _answers(self, seconds: float) -> list[Answer]:
        """Return the answer of each other rank. Raises DeviceLost if one has ended, or does not answer in time."""
        until = time.monotonic() + seconds
        with self._limited(seconds) if self._kind == CALL else nullcontext():  # answers to steps are short
            return [self._answer(other, until) for other in self._others]

    def _answer(self, other: Other, until: float) -> Answer:
        try:
            while other.pipe.poll(max(0.0, until - time.monotonic())):
                answer: Answer = other.pipe.recv()
                if answer.number == self._number:  # not of a call that Ctrl-C has ended
                    return answer
            self._lose(other, self._silence)
        except (EOFError, OSError):
            self._lose(other, "")

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """End all other ranks if this is open for longer: a stopped process neither reads nor writes."""
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self._kill()

    @property
    def _silence(self) -> str:
        return f"does not answer for {self._seconds:g} seconds"

    def _open(self, rank: int) -> None:
        group.open_world(rank, self.size, self._folder, self._seconds)

    def _reconnect(self) -> None:
        """Let all ranks connect again, after a failure or for another timeout."""
        self._round += 1
        group.disconnect()
        self._send(CALL, pickle.dumps(("connect", (self._round, self._seconds))))
        try:
            group.connect(self._round, self._seconds)
        except RuntimeError as error:
            self._answers(_GRACE_SECONDS)  # raises if one is lost
            self._lose(self._others[0], f"does not connect again ({error})")
        self._answers(self._seconds)

    # ---- the end

    def ended(self) -> str:
        """Return why no call can succeed any more: a rank has ended; "" if all run."""
        for other in self._others:
            if not self.lost and other.process.poll() is not None:
                self._note(other, "")
        return self.lost

    def _lose(self, other: Other, reason: str) -> NoReturn:
        self._note(other, reason)
        raise DeviceLost(self.lost) from None

    def _note(self, other: Other, reason: str) -> None:
        """Record why a rank is lost, and end all others."""
        if self._late:
            reason = self._silence
        if not reason:
            with suppress(subprocess.TimeoutExpired):
                other.process.wait(_GRACE_SECONDS)
            code = other.process.returncode
            reason = f"was ended by signal {-code}" if (code or 0) < 0 else f"has ended with status {code}"
        self.lost = self.lost or f"rank {other.rank} of {self.size} {reason}: load the engine again"
        self._kill()

    def _kill(self) -> None:
        for other in self._others:
            other.process.kill()
            other.process.wait()

    def close(self) -> None:
        """End all other ranks, and wait for that. May be called twice."""
        with self._lock:
            group.disconnect()
            for other in self._others:
                other.pipe.close()
            until = time.monotonic() + _GRACE_SECONDS
            for other in self._others:
                with suppress(subprocess.TimeoutExpired):
                    other.process.wait(max(0.0, until - time.monotonic()))
            self._kill()
            self.lost = self.lost or "the engine was closed"
            group.close_world()
            shutil.rmtree(self._folder, ignore_errors=True)


def _started(rank: int, folder: str) -> Other:
    """Start a rank, in a session of its own: Ctrl-C reaches rank 0, which ends the others."""
    ours, theirs = Pipe()
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    environment = {**os.environ, "LOCAL_RANK": str(rank), "PYTHONPATH": path, "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno()), folder, str(os.getpid())],
        pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return Other(rank, process, ours)
