"""The disk in an engine: requests wait for reads of their prefixes, and text that memory loses is written.

A request whose text continues on disk is held in the queue if reading and loading it are estimated to be faster than
computing it. Others overtake it, and requests for the same text share a read. A request waits no longer than four times
the estimate. Blocks that arrived before an error are used. There is no second way to the device: a read fills host
blocks, which are loaded as always.

An idle engine also writes the text that is in memory. So does one that closes, as much as ten seconds allow.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import numpy as np

from radixkv.cache.host import HostRun
from radixkv.disk import DiskStats
from radixkv.disk.slabs import Image
from radixkv.disk.store import PAUSE, Read, Store
from radixkv.disk.tier import DiskTier, Found
from radixkv.engine.core import Core
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, TokenIds
from radixkv.engine.transfers import Records
from radixkv.errors import EngineClosed, EngineError

_log = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Seconds that closing may take to write."""

IDLE_RATE = 50e6
"""Bytes a second that an idle engine writes."""

_PIECE = 16  # blocks that are copied at once while the engine is idle
_PATIENCE, _LEAST_WAIT = 4, 0.1  # times the estimate, and seconds: how long a request waits for a read
_ROUNDS = 4  # reads that one request may wait for


@dataclass(eq=False)
class _Wait:
    """A read, and the requests that wait for it, until a time. A stale one brings text that was deleted meanwhile."""

    found: Found
    namespace: Hashable
    blocks: list[int]
    until: float
    requests: list[Request] = field(default_factory=list)
    stale: bool = False
    is_audit: bool = False


class DiskStage(EngineObserver, Records):
    """The disk of one engine: an observer of requests, and a task in the background."""

    def __init__(
        self,
        core: Core,
        tier: DiskTier,
        put: Callable[[int, Image], None],
        post: Callable[[Callable[[], None]], None],
        *,
        reopen: Callable[[Store], Store],
        number: Callable[[Hashable], Hashable] = lambda value: value,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to a core with a host tier. `put` stores an image; `post` runs a call on the engine's thread.

        `reopen` returns the store of new weights, which opens once the old one has closed. `number` returns the cache's
        namespace for the value of a caller, and `released` is called at the end.
        """
        assert core.host is not None and core.host_costs is not None
        self._core, self._tier, self._put, self._post = core, tier, put, post
        self._reopen, self._number, self._released = reopen, number, released
        load, prefill = core.host_costs
        self._saving = (prefill - load) * core.cache.block_size  # seconds of a block, without its read
        self._reads: dict[int, _Wait] = {}  # by the first record
        self._waits: dict[Request, _Wait] = {}
        self._read_for_audit: HostRun | None = None
        self._next_write = 0.0
        self._clean = False  # nothing is left to write while the engine is idle
        core.observers.append(self)
        core.background.append(self)
        core.records = self

    def stats(self) -> DiskStats:
        """Return gauges and counters of the store."""
        return self._tier.store.stats()

    def reach(self, tokens: TokenIds, namespace: Hashable) -> int:
        """See Records."""
        found = self._tier.find(tokens, namespace)
        cache = self._core.cache
        return 0 if found is None else (found.first + min(len(found.records), cache.host_blocks)) * cache.block_size

    # ---- requests

    def added(self, request: Request) -> None:
        """Hold a request whose text is to be read."""
        self._clean = False
        self._consider(request)

    def ended(self, request: Request, error: Exception | None) -> None:
        """Forget a request; its read goes on."""
        wait = self._waits.pop(request, None)
        if wait is not None:
            wait.requests.remove(request)

    def _consider(self, request: Request) -> None:
        """Hold a request if the end of its text is on disk, and reading it is estimated to be faster than computing."""
        limit = min(len(request.prompt) - 1, request.scores.hit_limit)
        found = self._tier.find(request.prompt[:limit], request.namespace)
        if found is None:
            return
        count, wait = len(found.records), self._reads.get(found.records[0].id)
        if wait is None and count >= 2 and self._seconds(count) < count * self._saving:
            wait = self._begin(found, request.namespace)
        if wait is not None:
            wait.requests.append(request)
            self._waits[request] = wait
            self._core.scheduler.waiting.hold(request)

    def _begin(self, found: Found, namespace: Hashable) -> _Wait | None:
        """Begin a read, as far as the host has room for two blocks at least, and unless the disk hangs."""
        now = time.perf_counter()
        if any(wait.until <= now for wait in self._reads.values()):
            return None
        store, blocks = self._tier.store, self._tier.lend(found, namespace)
        if len(blocks) < 2:
            self._core.cache.arrive(np.frombuffer(found.tokens, np.int32), namespace, array("i", blocks), 0)
            return None
        wait = _Wait(found, namespace, blocks, now + max(_LEAST_WAIT, _PATIENCE * self._seconds(len(blocks))))
        self._reads[found.records[0].id] = wait

        def done(read: Read) -> None:
            with suppress(EngineClosed):
                self._post(lambda: self._arrived(wait, read))

        store.read(Read(found.records[: len(blocks)], lambda at, image: self._put(blocks[at], image), done))
        return wait

    def _seconds(self, blocks: int) -> float:
        """Estimate the time of a read after those under way."""
        return self._tier.store.seconds(blocks + sum(len(wait.blocks) for wait in self._reads.values()))

    def _arrived(self, wait: _Wait, read: Read) -> None:
        """Make the blocks that were read resident on the host, and offer the requests again."""
        if not wait.stale:
            del self._reads[wait.found.records[0].id]
        found, arrived, size = wait.found, 0 if wait.stale else read.arrived, self._core.cache.block_size
        text = np.frombuffer(found.tokens, np.int32)[: (found.first + max(arrived, 1)) * size]
        gained = self._core.cache.arrive(text, wait.namespace, array("i", wait.blocks), arrived)
        if wait.is_audit and gained:
            self._read_for_audit = HostRun(text, len(text) - gained, wait.namespace)
        self._core.counters.disk_tokens += gained
        for request in wait.requests:
            request.reported.disk_tokens += gained
            request.reported.disk_reads += 1
            self._release(request)
            if arrived == len(wait.blocks) and request.reported.disk_reads < _ROUNDS:
                self._consider(request)

    def _release_all(self, wait: _Wait) -> None:
        for request in wait.requests:
            request.reported.disk_reads += 1
            self._release(request)
        wait.requests.clear()

    def _release(self, request: Request) -> None:
        del self._waits[request]
        self._core.scheduler.waiting.release(request)

    # ---- records

    def clear(self) -> Future[None]:
        """Delete all records."""
        self._make_stale()
        cleared: Future[None] = Future()

        def deleted(records: Future[None]) -> None:
            error = records.exception()
            if not cleared.set_running_or_notify_cancel():
                return
            if error is None:
                cleared.set_result(None)
            else:
                cleared.set_exception(EngineError(f"the disk cache could not delete its records: {error}"))

        self._tier.clear().add_done_callback(deleted)
        return cleared

    def random_run(self, rng: Random) -> HostRun | None:
        """Return the end of a text that was read, or begin to read a random one, in place of colder text on the host.

        No text is read that the pool could not hold.
        """
        run, self._read_for_audit = self._read_for_audit, None
        if run is None and not self.is_read:
            cache = self._core.cache
            found = self._tier.random_text(rng, min(cache.num_blocks, cache.host_blocks), self._number)
            is_new = found is not None and found[0].records[0].id not in self._reads
            wait = self._begin(*found) if found is not None and is_new else None
            if wait is not None:
                wait.is_audit = True
        return run

    @property
    def is_read(self) -> bool:
        """Whether a text is being read for an audit."""
        return any(wait.is_audit for wait in self._reads.values())

    def clear_namespace(self, namespace: Hashable) -> None:
        """Delete the records of a namespace."""
        self._make_stale()
        self._tier.drop_namespace(namespace)

    def discard(self, tokens: TokenIds, namespace: Hashable, start: int) -> None:
        """Delete the records of a text from `start` on, and all after them."""
        self._make_stale()
        self._tier.drop(tokens, namespace, start)

    def weights_changed(self) -> None:
        """Use the records of the present weights."""
        self._make_stale()
        self._tier.store.close(0.0)
        self._tier.use(self._reopen(self._tier.store))

    def _make_stale(self) -> None:
        """Use nothing of the reads under way."""
        for wait in self._reads.values():
            wait.stale = True
            self._release_all(wait)
        self._reads.clear()

    # ---- a task in the background

    def due_in(self, *, busy: bool) -> float | None:
        """Return the seconds until a request has waited too long, or until an idle engine writes; None for never."""
        now = time.perf_counter()
        waits = [wait.until - now for wait in self._reads.values() if wait.requests]
        if not busy and not self._clean:
            waits.append(self._next_write - now)
        return max(min(waits), 0.0) if waits else None

    def step(self, *, busy: bool) -> None:
        """Compute the requests that have waited too long; if the engine is idle, write a piece."""
        now = time.perf_counter()
        for wait in self._reads.values():
            if wait.requests and wait.until <= now:
                self._tier.store.count("abandoned_reads", len(wait.requests))
                self._release_all(wait)
        if not busy and not self._clean and self._next_write <= now:
            self._write_piece(now)

    def _write_piece(self, now: float) -> None:
        """Write some blocks, last used first; once all are written, rest until the next request."""
        store, count = self._tier.store, 0
        self._next_write = now + (1.0 if store.works else PAUSE)
        if not store.room:
            return
        self._clean = not (count := next(self._written(), 0))
        self._next_write = now + count * store.image_bytes / IDLE_RATE

    def _written(self) -> Iterator[int]:
        """Write cached text in pieces, last used first, and yield the blocks of each."""
        used = time.time()
        for number, node in enumerate(self._tier.unwritten()):
            while count := self._tier.write(node, used - number / 1e3, _PIECE):
                yield count

    def close(self) -> None:
        """Write the text in memory, last used first, for a while; then close the files and release the folder."""
        until = time.perf_counter() + CLOSE_S
        store = self._tier.store
        if self._tier.unwritten():
            store.settle(CLOSE_S)  # the folder may be opened only now
        for _ in self._written():
            while not store.room and store.works and time.perf_counter() < until:
                time.sleep(0.002)
            if time.perf_counter() >= until:
                break
        self._tier.disconnect()
        if store.close(max(until - time.perf_counter(), 0.5)):
            self._released()
        else:  # its thread still writes
            _log.warning("the disk cache is too slow: some text was not written, and its folder stays locked")
