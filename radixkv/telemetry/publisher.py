"""The publisher's thread: asks the engine's thread what has changed, and tells everybody who is attached.

Knows sockets, time, and the order of frames. Knows no engine: it is given a way to ask. Whoever listens, or does not,
costs the engine nothing: it is asked at most ten times a second, between two steps, and never waited for with a lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path
from weakref import WeakSet

from radixkv.errors import EngineClosed, ProtocolError
from radixkv.telemetry.audience import Client, Limits
from radixkv.telemetry.door import Door
from radixkv.telemetry.frames import Bye, Delta, Frame, Gap, Hello, Snapshot
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.pages import pages
from radixkv.telemetry.protocol import encode, snapshot_frames
from radixkv.telemetry.recording import FlightRecorder
from radixkv.telemetry.records import Changes, EngineFacts

_log = logging.getLogger(__name__)

ALONE_HZ = 1.0
"""How often the engine is asked while nobody is attached: the flight recorder listens."""
_PULSE = 1.0  # seconds without a frame after which there is an empty one
_FAREWELL = 0.5  # seconds that clients get for the last frame
_SETTLE = 2.0
_BLINK = 0.005
_REST = 0.002  # seconds between two pages: who packs a large tree in one go keeps the engine from its interpreter
_JOIN = 5.0
_FAILURES = 20  # turns in a row that raised, behind which there is no point in going on
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
        limits: Limits | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """Open nothing yet. Raises InvalidInput for a `listen` that is no address, or that others could reach.

        Whoever wants that in earnest says so: tcp://0.0.0.0:PORT?allow=remote.
        """
        self.facts = facts
        self._collect, self._pending = collect, pending
        self._door = Door(listen, self._meet)
        self._limits = limits or Limits()
        self._flight = flight or FlightRecorder(facts)
        self._mirror = Mirror()
        self._seq = 0
        self._clients: set[Client] = set()
        self._future: Future[Changes] | None = None
        self._asked_at = self._told_at = 0.0
        self._hurry = False  # somebody has come, and what it was told may be a second old
        self._settling: list[threading.Event] = []  # who waits for a fresh collection
        self._answering: list[threading.Event] = []  # by the one that is under way
        self._reason: str | None = None  # why it ends
        self._complaints: set[str] = set()
        self._thread: threading.Thread | None = None

    # ---- for any thread

    @property
    def path(self) -> Path | None:
        """Of the Unix socket, from the start on."""
        return self._door.path

    @property
    def tcp(self) -> str | None:
        """host:port, from the start on, if it listens there."""
        return self._door.tcp

    @property
    def token(self) -> str | None:
        """What TCP clients have to know."""
        return self._door.token

    def start(self) -> None:
        """Listen and serve from now on. Raises UnsafeFolder or OSError if there is no place to listen; nothing is left
        then.
        """
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        try:
            self._selector.register(self._wakes, selectors.EVENT_READ, self._woken)
            self._door.open(self.facts, self._selector)
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
        if last is None:
            self._settle(_SETTLE)
        else:
            self._catch_up(_SETTLE)
        now = time.time()
        cut = pages(last) if last is not None else []
        more: list[Frame] = [Delta(page, seq=seq, ts=now) for seq, page in enumerate(cut, self._seq + 1)]
        if why is not None:
            more.append(Bye(why, seq=self._seq + len(cut), ts=now))
        return self._flight.save(path, now, more)

    @property
    def attached(self) -> int:
        """How many clients are attached."""
        return sum(client.attached for client in tuple(self._clients))

    @property
    def buffered(self) -> int:
        """Bytes that clients have not taken yet, of all of them."""
        return sum(client.buffered for client in tuple(self._clients))

    def _settle(self, timeout: float) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        event = threading.Event()
        self._settling.append(event)
        self._wake()
        event.wait(timeout)

    def _catch_up(self, timeout: float) -> None:
        """Wait until what was collected before is told; what has not been collected is not waited for."""
        deadline = time.monotonic() + timeout
        alive = self._thread is not None and self._thread.is_alive()
        while alive and (future := self._future) is not None and future.done() and time.monotonic() < deadline:
            time.sleep(_BLINK)

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
        self._ask(now)
        if now - self._told_at >= _PULSE and self.attached:
            self._tell(Changes(self._mirror.time))
        self._expire(now)
        self._tidy()
        self._door.look(now)

    def _patience(self) -> float:
        """Seconds until something is due even if nobody stirs; a future that comes stirs."""
        due = [time.monotonic() + _PULSE]
        if self._future is None:
            due.append(self._due)
        if self.attached:
            due.append(self._told_at + _PULSE)
        return max(0.0, min(due) - time.monotonic())

    @property
    def _due(self) -> float:
        """When to ask the engine again: the fastest client decides."""
        if self._settling:
            return 0.0
        hz = max((client.hz for client in self._clients if client.attached), default=ALONE_HZ)
        return self._asked_at + 1.0 / (self._limits.hz if self._hurry else hz)

    def _woken(self, mask: int) -> None:
        self._wakes.recv(4096)

    # ---- the engine

    def _ask(self, now: float) -> None:
        """Take what the engine's thread answered; ask it anew if that is due and there is something."""
        if self._future is not None and self._future.done():
            self._take(self._future)
            self._future = None
            self._settled(self._answering)
        if self._future is not None or now < self._due:
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
            self._settled(self._answering)

    def _settled(self, events: list[threading.Event]) -> None:
        for event in events:
            event.set()
        events.clear()

    def _take(self, future: Future[Changes]) -> None:
        try:
            self._tell(future.result())
        except Exception as error:  # it must not be taken again and again
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Log what the engine's side raised, once for each kind; an engine that is closed is no news."""
        if not isinstance(error, EngineClosed) and repr(error) not in self._complaints and len(self._complaints) < 100:
            self._complaints.add(repr(error))
            _log.warning("telemetry could not be collected: %r", error, exc_info=error)

    # ---- telling

    def _tell(self, changes: Changes) -> None:
        """Number the changes, send them to everybody, and keep them for a while; none of it if they cannot be told."""
        deltas = [
            encode(Delta(page, seq=seq, ts=time.time()))
            for seq, page in enumerate(pages(_news(changes, self._mirror), _rest), self._seq + 1)
        ]
        self._mirror.apply(changes)
        self._seq += len(deltas)
        self._told_at = time.monotonic()
        for delta in deltas:
            for client in self._clients:
                client.give(delta)
        if self._flight.is_due(self._told_at):
            self._flight.begin(self._everything(), self._told_at)  # which has these changes in it
        else:
            for delta in deltas:
                self._flight.add(delta)

    def _everything(self) -> Iterator[bytes]:
        """All frames of a snapshot, cut at once and encoded one by one."""
        frames = snapshot_frames(self._mirror, self._seq, time.time(), _rest)
        return map(_encoded, frames)

    def _snapshot(self, dropped: int | None) -> Iterator[bytes]:
        """The frames of everything for one client, cut now and encoded when it takes them."""
        now = time.time()
        first = Hello(self.facts, seq=self._seq, ts=now) if dropped is None else Gap(dropped, seq=self._seq, ts=now)
        return chain([encode(first)], self._everything())

    # ---- clients

    def _meet(self, connection: socket.socket, token: str | None) -> None:
        """A connection that may come in: it has some seconds to say what it wants."""
        waiting = [client for client in self._clients if client.deadline is not None]
        if len(waiting) >= self._limits.waiting:
            min(waiting, key=lambda client: client.deadline or 0.0).quit()
            self._tidy()
        client = Client(connection, time.monotonic() + self._limits.attach_s, self._limits, self._snapshot, token)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._serve(client, mask))

    def _serve(self, client: Client, mask: int) -> None:
        """Read and write what can be; whatever is wrong with this client ends this client."""
        try:
            if mask & selectors.EVENT_WRITE:
                client.send()
            if mask & selectors.EVENT_READ and not client.gone and client.read():
                self._welcome(client)
        except ProtocolError as error:
            self._dismiss(client, str(error))
        except Exception:
            _log.exception("a client of the monitor's publisher was dropped")
            client.quit()

    def _welcome(self, client: Client) -> None:
        if self.attached >= self._limits.clients:
            self._dismiss(client, f"busy: {self._limits.clients} monitors are attached already")
            return
        client.welcome()
        self._hurry = True

    def _dismiss(self, client: Client, reason: str) -> None:
        bye = encode(Bye(reason, seq=self._seq, ts=time.time()))
        client.leave(bye, time.monotonic() + self._limits.leave_s)

    def _expire(self, now: float) -> None:
        """Hang up on who neither attached nor left in time."""
        for client in self._clients:
            if client.deadline is not None and now >= client.deadline:
                client.quit()

    def _tidy(self) -> None:
        """Forget who is gone, and watch for room where something waits for it."""
        for client in tuple(self._clients):
            if client.gone:
                self._clients.discard(client)
                self._selector.unregister(client.connection)
                client.connection.close()
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.wants_to_send else 0)
            watched = self._selector.get_key(client.connection)
            if watched.events != wanted:
                self._selector.modify(client.connection, wanted, watched.data)

    # ---- the end

    def _farewell(self, reason: str) -> None:
        """Tell everybody why, and give them a moment to take it."""
        if self._future is not None and self._future.done():
            self._take(self._future)
        self._door.shut()
        for client in self._clients:
            self._dismiss(client, reason)
        deadline = time.monotonic() + _FAREWELL
        while (left := deadline - time.monotonic()) > 0:
            self._tidy()
            if not self._clients:
                return
            for key, mask in self._selector.select(left):
                key.data(mask)

    def _hang_up(self) -> None:
        """Close all that is open, and remove the socket's files if they are this process's."""
        for client in self._clients:
            client.quit()
            client.connection.close()
        self._clients.clear()
        self._door.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()
        _publishers.discard(self)
        self._settled(self._settling)
        self._settled(self._answering)

    def _abandon(self) -> None:
        """In a child process, which has no such thread: let go of the parent's sockets, and touch none of its files."""
        self._thread = None
        self._hang_up()


def _rest() -> None:
    """Let the engine's thread have the interpreter."""
    time.sleep(_REST)


def _encoded(frame: Snapshot) -> bytes:
    data = encode(frame)
    if not frame.last:
        _rest()
    return data


def _news(changes: Changes, known: Mirror) -> Changes:
    """The changes without those stats that are what they were, or that are no numbers."""
    before = {} if changes.reset else known.stats
    fresh = {name: value for name, value in changes.stats.items() if before.get(name) != value and isfinite(value)}
    return replace(changes, stats=fresh)


def _after_fork() -> None:
    for publisher in tuple(_publishers):
        publisher._abandon()
    _publishers.clear()


def _at_exit() -> None:
    for publisher in tuple(_publishers):
        publisher.close("the process ended")


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
