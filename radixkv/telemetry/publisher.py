"""The publisher's thread: collects changes from the engine's thread, and sends them to the attached clients.

An engine is asked at most ten times a second, between two steps, whether clients are attached or not. The engine's
thread never waits for the publisher.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from pathlib import Path
from weakref import WeakSet

from radixkv.errors import EngineClosed
from radixkv.telemetry.client_set import ClientLimits, ClientSet
from radixkv.telemetry.frame_log import FrameLog
from radixkv.telemetry.listener import Listener
from radixkv.telemetry.recording import FlightRecorder
from radixkv.telemetry.records import Changes, EngineFacts

_log = logging.getLogger(__name__)

ALONE_HZ = 1.0
"""How often the engine is asked while nobody is attached: the flight recorder listens."""
_PULSE = 1.0  # seconds without a frame after which there is an empty one
_FAREWELL = 0.5  # seconds that clients get for the last frame
_SETTLE = 2.0
_JOIN = 5.0
_FAILURES = 20  # turns in a row that raised, behind which there is no point in going on
_BLINK = 0.005
_COMPLAINTS = 100  # kinds of faults that are logged


_publishers: WeakSet[Publisher] = WeakSet()


class Publisher:
    """Serves one engine's telemetry, from `start` to `close`; for any thread.

    `collect` has the engine's thread collect what changed and gives the future of that; `pending` says whether there is
    anything. Both are called on the publisher's thread, which outlives whoever forgets to close it: they should not
    keep the engine alive. `listen` is None for the Unix socket alone, or tcp://127.0.0.1:PORT for a port beside it,
    which asks for a token.
    """

    def __init__(
        self,
        facts: EngineFacts,
        collect: Callable[[], Future[Changes]],
        pending: Callable[[], bool],
        listen: str | None = None,
        *,
        limits: ClientLimits | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """Open nothing yet. Raises InvalidInput for a `listen` that is no address, or that others could reach.

        Whoever wants that in earnest says so: tcp://0.0.0.0:PORT?allow=remote.
        """
        self.facts = facts
        limits = limits or ClientLimits()
        self._frame_log = FrameLog(facts, flight or FlightRecorder(facts))
        self._collector = Collector(collect, pending, self._tell, self._wake, limits.hz)
        self._clients = ClientSet(limits, self._frame_log.snapshot, self._frame_log.bye, self._collector.hurry)
        self._listener = Listener(listen, self._clients.meet)
        self._reason: str | None = None  # why it ends
        self._thread: threading.Thread | None = None

    # ---- for any thread

    @property
    def path(self) -> Path | None:
        """Of the Unix socket, from the start on."""
        return self._listener.path

    @property
    def tcp(self) -> str | None:
        """host:port, from the start on, if it listens there."""
        return self._listener.tcp

    @property
    def token(self) -> str | None:
        """What TCP clients have to know."""
        return self._listener.token

    def start(self) -> None:
        """Listen and serve from now on. Raises UnsafeFolder or OSError if there is no place to listen; nothing is left
        then.
        """
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        self._clients.open(self._selector)
        try:
            self._selector.register(self._wakes, selectors.EVENT_READ, self._woken)
            self._listener.open(self.facts, self._selector)
        except BaseException:
            self._hang_up()
            raise
        _publishers.add(self)
        self._thread = threading.Thread(target=self._run, name="radixkv-publisher", daemon=True)
        self._thread.start()

    def close(self, reason: str = "the engine was closed") -> None:
        """Say goodbye to everybody and end; takes half a second at most. May be called twice."""
        thread = self._thread
        if thread is None:
            return
        self._reason = self._reason or reason
        self._wake()
        if thread is not threading.current_thread():
            thread.join(_JOIN)

    def flight(self, path: str | os.PathLike[str], last: Changes | None = None, why: str | None = None) -> int:
        """Write the last minutes as a recording; returns its bytes. Waits 2 s at most, for a fresh collection.

        The engine's own thread, which must not wait for itself, gives what it collected as `last`, and `why` nothing
        comes behind that. Raises OSError.
        """
        if last is not None:
            self._collector.catch_up(_SETTLE, self._is_alive)
        elif self._is_alive():
            self._collector.settle(_SETTLE)
        return self._frame_log.save(path, last, why)

    @property
    def attached(self) -> int:
        """How many clients are attached."""
        return self._clients.attached

    @property
    def buffered(self) -> int:
        """Bytes that clients have not taken yet, of all of them."""
        return self._clients.buffered

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        """Have the thread look around; a full pipe says that it will anyway, a closed one that it is gone."""
        try:
            self._waker.send(b"!")
        except OSError:
            return

    # ---- the thread

    def _run(self) -> None:
        failures = 0
        while self._reason is None:
            try:
                self._turn()
                failures = 0
            except Exception:
                _log.exception("the monitor's publisher stumbled, and goes on")
                failures += 1
                if failures >= _FAILURES:
                    _log.error("the monitor's publisher gives up: this engine can no longer be watched")
                    self._reason = "the publisher failed: the engine's log says why"
                time.sleep(0.05 * failures)
        try:
            self._farewell(self._reason)
        finally:
            self._hang_up()

    def _turn(self) -> None:
        """Wait for something to do, at most a second, and do it."""
        for key, mask in self._selector.select(self._patience()):
            key.data(mask)
        now = time.monotonic()
        self._collector.turn(now, self._hz)
        if now - self._frame_log.told_at >= _PULSE and self.attached:
            self._tell(self._frame_log.nothing_new)
        self._clients.expire(now)
        self._clients.tidy()
        self._listener.look(now)

    def _patience(self) -> float:
        """Seconds until something is due even if nobody stirs; a future that comes stirs."""
        now = time.monotonic()
        due = [now + _PULSE, self._collector.due(self._hz)]
        if self.attached:
            due.append(self._frame_log.told_at + _PULSE)
        return max(0.0, min(due) - now)

    @property
    def _hz(self) -> float:
        """How often to ask the engine: the fastest client decides."""
        return self._clients.hz or ALONE_HZ

    def _woken(self, mask: int) -> None:
        self._wakes.recv(4096)

    def _tell(self, changes: Changes) -> None:
        self._frame_log.tell(changes, self._clients.give)

    # ---- the end

    def _farewell(self, reason: str) -> None:
        """Tell everybody why, and give them a moment to take it."""
        self._collector.take()
        self._listener.shut()
        self._clients.dismiss(reason)
        deadline = time.monotonic() + _FAREWELL
        while (left := deadline - time.monotonic()) > 0:
            self._clients.tidy()
            if not self._clients:
                return
            for key, mask in self._selector.select(left):
                key.data(mask)

    def _hang_up(self) -> None:
        """Close all that is open, and remove the socket's files if they are this process's."""
        self._clients.close()
        self._listener.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()
        _publishers.discard(self)
        self._collector.close()

    def _abandon(self) -> None:
        """In a child process, which has no such thread: let go of the parent's sockets, and touch none of its files."""
        self._thread = None
        self._hang_up()


class Collector:
    """What the engine's side answers goes to `tell`; `wake` is called, on any thread, when there is something to do.

    `collect` and `pending` are as in `Publisher`; `fastest` is how often a second it may be asked in a hurry.
    """

    def __init__(
        self,
        collect: Callable[[], Future[Changes]],
        pending: Callable[[], bool],
        tell: Callable[[Changes], None],
        wake: Callable[[], None],
        fastest: float,
    ) -> None:
        self._collect, self._pending = collect, pending
        self._tell, self._wake, self._fastest = tell, wake, fastest
        self._future: Future[Changes] | None = None
        self._asked_at = 0.0
        self._hurry = False
        self._settling: list[threading.Event] = []  # who waits for a fresh collection
        self._answering: list[threading.Event] = []  # by the one that is under way
        self._complaints: set[str] = set()

    # ---- for any thread

    def settle(self, timeout: float) -> bool:
        """Wait until a collection is told that began after this call, or there was nothing; whether it came in time."""
        event = threading.Event()
        self._settling.append(event)
        self._wake()
        return event.wait(timeout)

    def catch_up(self, timeout: float, alive: Callable[[], bool]) -> None:
        """Wait until what was collected before is told; what has not been collected is not waited for."""
        deadline = time.monotonic() + timeout
        while alive() and (future := self._future) is not None and future.done() and time.monotonic() < deadline:
            time.sleep(_BLINK)

    # ---- for the publisher's thread

    def hurry(self) -> None:
        """Somebody has come, and what it was told may be a second old."""
        self._hurry = True

    def due(self, hz: float) -> float:
        """When to ask again, on the monotonic clock, for somebody who wants to be told `hz` times a second."""
        if self._future is not None:
            return inf  # whose answer wakes
        if self._settling:
            return 0.0
        return self._asked_at + 1.0 / (self._fastest if self._hurry else hz)

    def turn(self, now: float, hz: float) -> None:
        """Take what the engine's thread answered; ask it anew if that is due and there is something."""
        self.take()
        if now < self.due(hz):
            return
        self._asked_at, self._hurry = now, False
        self._answering, self._settling = self._settling, []
        try:
            if self._pending():
                self._future = self._collect()
                self._future.add_done_callback(lambda future: self._wake())
        except Exception as error:
            self._complain(error)
        if self._future is None:
            _let_go(self._answering)

    def take(self) -> None:
        """Tell what the engine's thread answered, if it did."""
        future = self._future
        if future is None or not future.done():
            return
        try:
            self._tell(future.result())
        except Exception as error:  # it must not be taken again and again
            self._complain(error)
        self._future = None
        _let_go(self._answering)

    def close(self) -> None:
        """Let go of everybody who waits: nothing more is asked."""
        _let_go(self._settling)
        _let_go(self._answering)

    def _complain(self, error: BaseException) -> None:
        """Log what the engine's side raised, once for each kind; an engine that is closed is no news."""
        known = repr(error) in self._complaints or len(self._complaints) >= _COMPLAINTS
        if not isinstance(error, EngineClosed) and not known:
            self._complaints.add(repr(error))
            _log.warning("telemetry could not be collected: %r", error, exc_info=error)


def _let_go(events: list[threading.Event]) -> None:
    for event in events:
        event.set()


def _after_fork() -> None:
    for publisher in tuple(_publishers):
        publisher._abandon()
    _publishers.clear()


def _at_exit() -> None:
    for publisher in tuple(_publishers):
        publisher.close("the process ended")


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
