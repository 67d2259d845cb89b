"""The engine's thread: runs steps while there is work, and what others ask of it between two steps.

Knows: one thread and its inbox. Knows nothing of what it runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from radixkv.errors import EngineClosed

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Worker:
    """Calls `step` again and again while `busy`, `finish` once at the end, and posted calls in between, in order."""

    def __init__(self, step: Callable[[], None], busy: Callable[[], bool], finish: Callable[[], None]) -> None:
        """Start the thread; it ends with `close`."""
        self._step, self._busy, self._finish = step, busy, finish
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._gate = threading.Lock()  # nothing is posted behind the end
        self._closed = False
        # A daemon: whoever forgets to close an engine can still leave Python.
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run at the next step boundary; it must not raise. Raises EngineClosed behind the end."""
        with self._gate:
            if self._closed:
                raise EngineClosed("the engine was closed: load a new one")
            self._inbox.put(call)

    def ask(self, call: Callable[[], Result]) -> Result:
        """Run `call` at the next step boundary and wait for what it returns or raises."""
        future: Future[Result] = Future()
        self.post(lambda: _answer(future, call))
        return future.result()

    def close(self) -> None:
        """Let the current step end, answer what was posted before, then stop. May be called twice."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        try:
            while self._read_inbox():
                self._step()
        except BaseException:  # it must not: but better a closed engine than callers who wait for ever
            _log.exception("a step raised: the engine closes")
        with self._gate:
            self._closed = True
        self._empty_inbox()
        _guarded(self._finish)

    def _empty_inbox(self) -> None:
        """Run what was posted before the end."""
        while not self._inbox.empty():
            if (call := self._inbox.get()) is not None:
                _guarded(call)

    def _read_inbox(self) -> bool:
        """Run what was posted; waits for something to be posted while there is no work. False at the end."""
        while True:
            try:
                call = self._inbox.get(block=not self._busy())
            except Empty:
                return True
            if call is None:
                return False
            _guarded(call)


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # one bad call must not take the thread, and everybody's requests, with it
        _log.exception("a call posted to the engine's thread raised")


def _answer(future: Future[Result], call: Callable[[], Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
