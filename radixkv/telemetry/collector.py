"""Asks the engine's thread what has changed: one question at a time, and none oftener than somebody wants to know.

Knows futures, time, and who waits for a fresh answer. Knows no engine, client or frame: it is given a way to ask, and
somebody to tell.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf

from radixkv.errors import EngineClosed
from radixkv.telemetry.records import Changes

_log = logging.getLogger(__name__)

_BLINK = 0.005
_COMPLAINTS = 100  # kinds of faults that are logged


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
