"""The publisher's thread: collect changes from the engine's thread, and send them to the attached clients.

Listener, clients and collector are tasks of one event loop.

The engine is asked at most ten times a second, between two steps, and once a second without clients. The engine's
thread never waits for the publisher.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from weakref import WeakSet

from radixkv.errors import EngineClosed
from radixkv.telemetry.client_set import ClientLimits, ClientSet
from radixkv.telemetry.command_queue import Execute
from radixkv.telemetry.frame_log import FrameLog
from radixkv.telemetry.listener import Listener
from radixkv.telemetry.process_figures import ProcessFigures
from radixkv.telemetry.recording import FlightRecorder
from radixkv.telemetry.records import Changes, EngineFacts

_log = logging.getLogger(__name__)

IDLE_HZ = 1.0
"""How often a second the engine is asked while no client is attached, for the flight recorder."""
_HEARTBEAT_S = 1.0  # seconds without a frame after which an empty one is sent
_BYE_TIMEOUT = 0.5  # seconds for clients to read the last frame
_FLIGHT_TIMEOUT = 2.0
_JOIN_TIMEOUT = 5.0
_MOST_FAULTS = 100  # kinds of faults that are logged


_publishers: WeakSet[Publisher] = WeakSet()


class Publisher:
    """Serve one engine's telemetry, from `start` to `close`; for any thread.

    `collect` schedules a collection on the engine's thread and returns its future; `pending` returns whether there are
    changes. Both are called on the publisher's thread and should not keep the engine alive, since that thread runs
    until `close`. `listen` is None for the Unix socket alone, or tcp://127.0.0.1:PORT for an additional port, which
    requires a token.
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
        execute: Execute | None = None,
        figures: ProcessFigures | None = None,
        what_if: Callable[[], dict[str, object] | None] = lambda: None,
    ) -> None:
        """Open nothing yet. Raises InvalidInput for an invalid `listen`, or one that other machines could reach.

        `tcp://0.0.0.0:PORT?allow=remote` allows other machines. `execute` schedules the commands of clients that may
        send them; None refuses all commands. `what_if` is called once a second.
        """
        self.facts = facts
        limits = limits or ClientLimits()
        self._frame_log = FrameLog(facts, flight or FlightRecorder(facts))
        self._figures, self._what_if = figures or ProcessFigures(), what_if
        self._collector = Collector(collect, pending, self._publish, self._post, limits.hz)
        self._clients = ClientSet(limits, self._frame_log, self._collector.request_soon, execute)
        self._listener = Listener(listen, self._clients.add)
        self._reason = "the publisher failed: the engine's log says why"  # of the end
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    # ---- for any thread

    @property
    def path(self) -> Path | None:
        """The path of the Unix socket, after `start`."""
        return self._listener.path

    @property
    def tcp(self) -> str | None:
        """host:port, after `start`, if it listens there."""
        return self._listener.tcp

    @property
    def token(self) -> str | None:
        """The token that TCP clients must send."""
        return self._listener.token

    def start(self) -> None:
        """Listen and serve from now on. Raises UnsafeFolder or OSError, and closes everything, if it cannot listen."""
        self._loop = asyncio.new_event_loop()
        try:
            self._listener.open(self.facts)
        except BaseException:
            self._listener.close()
            self._loop.close()
            raise
        _publishers.add(self)
        self._thread = threading.Thread(target=self._run, name="radixkv-publisher", daemon=True)
        self._thread.start()

    def close(self, reason: str = "the engine was closed") -> None:
        """Send all clients the reason and end, in at most half a second. May be called twice."""
        thread = self._thread
        if thread is None:
            return
        self._post(partial(self._end, reason))
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)

    def _end(self, reason: str) -> None:
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()

    def flight(self, path: str | os.PathLike[str], last: Changes | None = None, why: str | None = None) -> int:
        """Write the last minutes as a recording; returns its bytes. Waits at most 2 s for a fresh collection.

        The engine's own thread must not wait for itself: it passes its collection as `last`, and the reason of its end
        as `why`. Raises OSError.
        """
        if self._thread is not None and self._thread.is_alive():
            self._collector.wait(_FLIGHT_TIMEOUT, fresh=last is None)
        return self._frame_log.save(path, last, why)

    @property
    def attached(self) -> int:
        """The number of attached clients."""
        return self._clients.attached

    @property
    def buffered(self) -> int:
        """Bytes that wait to be sent to all clients."""
        return self._clients.buffered

    def _post(self, call: Callable[[], object]) -> None:
        """Call a function on the publisher's thread, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # ---- the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            _publishers.discard(self)
            self._collector.close()

    async def _serve(self) -> None:
        """Serve until the end is requested, or a part fails, which is logged; then say so to all clients."""
        parts = (self._listener.run(), self._collector.run(lambda: self._clients.hz or IDLE_HZ), self._heartbeats())
        tasks = [asyncio.create_task(part) for part in (*parts, self._ended.wait())]
        (ended, *_), _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if error := ended.exception():
            _log.error("the monitor's publisher ends: this engine can no longer be watched", exc_info=error)
        self._collector.deliver()
        self._listener.close()
        await self._clients.close(self._reason, _BYE_TIMEOUT)

    async def _heartbeats(self) -> None:
        """Send an empty frame after each second without one."""
        while True:
            silent = time.monotonic() - self._frame_log.last_append
            if silent >= _HEARTBEAT_S and self.attached:
                self._publish(self._frame_log.heartbeat(current=self._collector.is_current))
                silent = 0.0
            await asyncio.sleep(_HEARTBEAT_S - silent if silent < _HEARTBEAT_S else _HEARTBEAT_S)

    def _publish(self, changes: Changes) -> None:
        figures = self._figures.due(time.monotonic())
        if figures:
            changes = replace(changes, stats={**changes.stats, **figures}, what_if=self._what_if())
        self._frame_log.append(changes, self._clients.send)

    def abandon(self) -> None:
        """Close the parent's sockets in a forked child, which has no such thread, and leave its files alone."""
        self._thread = None
        self._clients.abandon()
        self._listener.close()
        self._collector.close()


class Collector:
    """Request collections from the engine's thread, one at a time, and pass each result to `publish`.

    `Publisher` describes `collect` and `pending`. `post` calls a function on the publisher's thread, from any thread.
    `max_hz` limits the requests for a client that has just attached.
    """

    def __init__(
        self,
        collect: Callable[[], Future[Changes]],
        pending: Callable[[], bool],
        publish: Callable[[Changes], None],
        post: Callable[[Callable[[], object]], None],
        max_hz: float,
    ) -> None:
        self._collect, self._pending = collect, pending
        self._publish, self._post, self._max_hz = publish, post, max_hz
        self._future: Future[Changes] | None = None
        self._requested_at = 0.0
        self._soon = False
        self._woken = asyncio.Event()  # the time of the next request, or its result, has come
        self._waiting_next: list[threading.Event] = []  # for the next collection
        self._waiting_now: list[threading.Event] = []  # for the present collection
        self._logged_faults: set[str] = set()

    # ---- for any thread

    def wait(self, timeout: float, *, fresh: bool) -> bool:
        """Wait until a finished collection is published; returns False after `timeout` seconds.

        A `fresh` one begins after this call. It is not waited for if there is nothing to collect.
        """
        event = threading.Event()
        if fresh:
            self._waiting_next.append(event)
            self._post(self._woken.set)
        else:
            self._post(self.deliver)
            self._post(event.set)
        return event.wait(timeout)

    # ---- for the publisher's thread

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since the last collection: none is under way, and none is needed."""
        try:
            return self._future is None and not self._pending()
        except Exception as error:
            self._log_fault(error)
            return False

    def request_soon(self) -> None:
        """Request the next collection early: a client has attached, and its snapshot may be a second old."""
        self._soon = True
        self._woken.set()

    async def run(self, hz: Callable[[], float]) -> None:
        """Collect while there are changes, `hz` times a second."""
        while True:
            while (left := self.next_request(hz()) - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), None if left == inf else left)
                self._woken.clear()
                self.deliver()
            self.request()

    def next_request(self, hz: float) -> float:
        """When to request the next collection, on the monotonic clock."""
        if self._future is not None:
            return inf  # its result wakes the loop
        if self._waiting_next:
            return 0.0
        return self._requested_at + 1.0 / (self._max_hz if self._soon else hz)

    def request(self) -> None:
        """Request a collection if there are changes."""
        self._requested_at, self._soon = time.monotonic(), False
        self._waiting_now, self._waiting_next = self._waiting_next, []
        try:
            if self._pending():
                self._future = self._collect()
                self._future.add_done_callback(lambda _: self._post(self._woken.set))
        except Exception as error:
            self._log_fault(error)
        if self._future is None:
            _set_all(self._waiting_now)

    def deliver(self) -> None:
        """Publish the collection if it is finished."""
        future = self._future
        if future is None or not future.done():
            return
        try:
            self._publish(future.result())
        except Exception as error:  # a failed result must not be delivered again
            self._log_fault(error)
        self._future = None
        _set_all(self._waiting_now)

    def close(self) -> None:
        """Release all waiting callers: nothing more is requested."""
        _set_all(self._waiting_next)
        _set_all(self._waiting_now)

    def _log_fault(self, error: BaseException) -> None:
        """Log an error of the engine's side, once for each kind. A closed engine is not an error."""
        known = repr(error) in self._logged_faults or len(self._logged_faults) >= _MOST_FAULTS
        if not isinstance(error, EngineClosed) and not known:
            self._logged_faults.add(repr(error))
            _log.warning("telemetry could not be collected: %r", error, exc_info=error)


def _set_all(events: list[threading.Event]) -> None:
    for event in events:
        event.set()


def _after_fork() -> None:
    for publisher in tuple(_publishers):
        publisher.abandon()
    _publishers.clear()


def _at_exit() -> None:
    for publisher in tuple(_publishers):
        publisher.close("the process ended")


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
