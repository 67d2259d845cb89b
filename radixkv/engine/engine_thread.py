"""The engine's thread: runs steps while there is work, and what others ask of it between two steps.

Knows: one thread, its inbox, and the two ways to end. Knows nothing of what it runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from radixkv.errors import EngineClosed

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineThread:
    """Calls `step` whenever `idle_for` allows, posted calls in between, in order, and `finish` once at the end.

    `idle_for` says how long a step would find nothing to do, unless something is posted: 0.0 is not at all, None for
    ever. `busy` says whether what was begun has not ended yet, which a graceful end waits for.
    """

    def __init__(
        self,
        step: Callable[[], None],
        idle_for: Callable[[], float | None],
        busy: Callable[[], bool],
        finish: Callable[[EngineClosed], None],
    ) -> None:
        """Start the thread; it ends with `close`. `finish` is told why, for whoever still waits for something."""
        self._step, self._idle_for, self._busy, self._finish = step, idle_for, busy, finish
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Nothing is posted behind the end. Reentrant: garbage that is collected in here may post, too.
        self._gate = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._broken: BaseException | None = None  # what a step raised, which it must not
        self.on_broken: Callable[[BaseException], None] | None = None  # told of that, on the thread, first of all
        self._draining = False
        self._drained = threading.Event()
        # A daemon: whoever forgets to close an engine can still leave Python.
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None], *, begins: bool = False) -> None:
        """Have `call` run at the next step boundary; it must not raise.

        Raises EngineClosed behind the end and in a forked child; if it `begins` something new, also while the worker
        finishes what is there.
        """
        if self._is_forked:  # asked before the gate: the parent's thread may have held it
            raise EngineClosed(f"this engine belongs to process {self._pid}: load another one after the fork")
        with self._gate:
            if self._closed or (begins and self._draining):
                raise self._why("the engine was closed: load a new one")
            self._inbox.put(call)

    def wake(self) -> None:
        """Have the thread look again whether there is something to do; behind the end there is not."""
        if self._is_forked:
            return
        with self._gate:
            if not self._closed:
                self._inbox.put(_nothing)

    def call(self, call: Callable[[], Result]) -> Future[Result]:
        """As `ask`, without waiting: the future gets what `call` returns or raises; a cancelled one is skipped."""
        future: Future[Result] = Future()
        self.post(lambda: _answer(future, call))
        return future

    def ask(self, call: Callable[[], Result]) -> Result:
        """Run `call` at the next step boundary and wait for what it returns or raises."""
        return self.call(call).result()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # ---- the end

    def close(
        self, drain: bool = False, timeout: float | None = None, on_drain: Callable[[], None] | None = None
    ) -> None:
        """Stop behind the current step, answer what was posted before, and wait for that. May be called twice.

        With `drain` first let what was begun come to its end, for at most `timeout` seconds; nothing new begins, and
        `on_drain` is called on the thread.
        Whatever interrupts that wait (Ctrl-C) makes it an immediate end, and is passed on.
        """
        if self._is_forked:
            return
        try:
            if drain and threading.current_thread() is not self._thread:
                self._drain(timeout, on_drain or _nothing)
        finally:
            self.stop()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def stop(self) -> None:
        """As `close`, without waiting for the thread; ends somebody else's draining, too."""
        if self._is_forked:
            return
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)

    def _drain(self, timeout: float | None, on_drain: Callable[[], None]) -> None:
        with self._gate:
            self._draining = True
            if not self._closed:
                self._inbox.put(on_drain)  # behind all that was begun
        self._drained.wait(timeout)

    # ---- the thread

    def _loop(self) -> None:
        try:
            while self._read_inbox():
                self._step()
        except BaseException as error:  # better a closed engine than callers who wait for ever
            self._broken = error
            _log.exception("a step raised: the engine closes")
            if self.on_broken is not None:
                _guarded(partial(self.on_broken, error))
        with self._gate:
            self._closed = True
        self._drained.set()
        self._empty_inbox()
        _guarded(lambda: self._finish(self._why("the engine was closed while the request ran")))

    def _why(self, usual: str) -> EngineClosed:
        if self._broken is None:
            return EngineClosed(usual)
        error = EngineClosed(f"the engine has closed, because its thread stopped: {self._broken!r}")
        error.__cause__ = self._broken
        return error

    def _empty_inbox(self) -> None:
        """Run what was posted before the end."""
        while not self._inbox.empty():
            if (call := self._inbox.get()) is not None:
                _guarded(call)

    def _read_inbox(self) -> bool:
        """Run what was posted; waits while a step would find nothing to do. False at the end."""
        while True:
            if self._draining and self._inbox.empty() and not self._busy():
                self._drained.set()
            idle = self._idle_for()
            try:
                call = self._inbox.get(idle is None or idle > 0, idle)
            except Empty:
                return True
            if call is None:
                return False
            _guarded(call)
            del call  # while the thread waits it must not keep alive what the last call knew: the engine, say


def _nothing() -> None:
    """What is posted only to wake the thread."""


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # one bad call must not take the thread, and everybody's requests, with it
        _log.exception("a call posted to the engine's thread raised")


def _answer(future: Future[Result], call: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
