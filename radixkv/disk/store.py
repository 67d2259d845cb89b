"""One folder of records: one thread that writes, two that read, and the answers to faults.

The engine's thread finds records by a connection of its own, and waits for no other thread. A fault costs records, is
counted, and is logged once per kind. After a fault of writing, runs are dropped for a minute, and reading goes on.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import NamedTuple
from zlib import crc32

import numpy as np

from radixkv.disk import BATCH, DiskStats
from radixkv.disk.records import NO_SLOT, ROOT, Damaged, Index, Record
from radixkv.disk.slabs import Image, Slabs

_log = logging.getLogger("radixkv.disk")
LEAST_FREE, LEAST_SHARE = 1 << 30, 0.05
"""Nothing is written to a file system with fewer free bytes, or with a smaller share of it free."""

PAUSE = 60.0
"""Seconds without writing after a fault of it."""

_QUEUED = 256 << 20  # bytes of images that wait to be written, at least BATCH images
_INDEX, _ASIDE = "index.sqlite3", "index.damaged"
_GAUGES = ("slots", "records", "read_bytes_per_s")
_READERS, _LONGEST_READ = 2, 1.0  # seconds: a reader that hangs keeps no file open for longer
_PASSING = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
_FIRST_RATE = 200e6  # bytes a second, before a read was measured


class Run(NamedTuple):
    """A text to write: its namespace, the tokens of its full blocks, and the images of the last of them.

    `used` is the time of its last use: it takes no room from text that was used later.
    """

    namespace: bytes
    blocks: list[bytes]
    images: list[Image]
    used: float


@dataclass(eq=False)
class Read:
    """A read of records that follow one another. `put` stores the image of a number; `done` is called at the end.

    Both are called by a reader's thread. `arrived` images were right; the first wrong one ends the read.
    """

    records: list[Record]
    put: Callable[[int, Image], None]
    done: Callable[[Read], None]
    arrived: int = 0


class Store:
    """The records of one folder. All methods are for the engine's thread; only `settle` and `close` wait."""

    def __init__(self, place: Callable[[], Path], image_bytes: int, num_slots: int) -> None:
        """Start the threads; the writer's thread first calls `place`, which returns a private folder that exists."""
        self._place, self.image_bytes, self._num_slots = place, image_bytes, num_slots
        self._counted = Counter({each.name: 0 for each in fields(DiskStats) if each.name not in _GAUGES})
        self._logged: set[str] = set()
        self._commands: SimpleQueue[tuple[Callable[[], object], Future[None]] | None] = SimpleQueue()
        self._offered = self._taken = 0  # blocks: each is changed by one thread
        self.closed = False
        self.losses = 0  # changes whenever records or runs were lost, but not for runs without room
        self._deletions = self._deleted = 0  # asked for, and done
        self._paused_until = 0.0
        self._rate = _FIRST_RATE
        self._touched: deque[tuple[float, int]] = deque(maxlen=1 << 16)  # an engine that only reads commits none
        self._records = 0
        self._free: list[int] = []
        self._unused = 0  # the first slot that had no image yet
        self._fresh = 0  # records that are not committed
        self._finder: Index | None = None  # of the engine's thread
        self._old: list[Index] = []
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._work, name="radixkv-disk", daemon=True)
        self._readers = [threading.Thread(target=self._serve, daemon=True) for _ in range(_READERS)]
        for thread in (self._writer, *self._readers):
            thread.start()

    # ---- the engine's thread

    @property
    def ready(self) -> bool:
        """Whether records can be found: the folder is open, and none of them is to be deleted."""
        return self._finder is not None and self._deletions == self._deleted

    @property
    def works(self) -> bool:
        """Whether there was no fault of writing lately."""
        return time.monotonic() >= self._paused_until

    @property
    def room(self) -> int:
        """How many blocks are taken now: none after a fault, nor while too many bytes wait."""
        most = max(_QUEUED // self.image_bytes, BATCH)
        return max(most - (self._offered - self._taken), 0) if self.ready and self.works else 0

    def settle(self, timeout: float) -> bool:
        """Wait until the folder is open and all earlier commands have run; returns whether that was long enough."""
        try:
            self.do(lambda: None).exception(timeout)
        except TimeoutError:
            return False
        return True

    def find(self, namespace: bytes, blocks: Iterable[bytes]) -> list[Record]:
        """Return the records of the first blocks of a text. O(found blocks * log records)."""
        found: list[Record] = []
        with self._guarded():
            finder = self._finder
            if finder is None or not self.ready:
                return found
            record = finder.find(ROOT, namespace)
            for tokens in blocks:
                record = record and finder.find(record.id, tokens)
                if record is None:
                    break
                found.append(record)
        return found

    def random_text(self, rng: Random) -> list[bytes]:
        """Return the namespace and the blocks of a random text; empty if there is none. O(blocks * log records)."""
        with self._guarded():
            return self._finder.random_text(rng) if self._finder is not None and self.ready else []
        return []

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let the writer's thread answer to a fault of the index."""
        try:
            yield
        except Damaged as error:
            self.do(partial(self._drop_damaged, error.record))
        except sqlite3.Error as error:
            self.do(partial(self._index_failed, error))

    def offer(self, run: Run) -> bool:
        """Queue a run to be written; returns False, and counts its blocks, if it is dropped."""
        if not self.room:
            self._counted["dropped_blocks"] += len(run.images)
            return False
        self._offered += len(run.images)
        self.do(partial(self._write, run))
        return True

    def do(self, command: Callable[[], object]) -> Future[None]:
        """Run a command on the writer's thread, after earlier ones; the future ends when its changes are durable.

        The future gets the exception of a command that fails. Changes of runs may become durable later.
        """
        ended: Future[None] = Future()
        self._commands.put((command, ended))
        return ended

    def touch(self, records: Iterable[Record], used: float) -> None:
        """Note a use of records, which the next write makes durable."""
        self._touched.extend([(used, record.id) for record in records])

    def read(self, read: Read) -> None:
        """Read images on a reader's thread; records that are evicted meanwhile end the read."""
        self.touch(read.records, time.time())
        self._reads.put(read)

    def seconds(self, blocks: int) -> float:
        """Estimate the time of a read."""
        return blocks * self.image_bytes / self._rate

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of DiskStats."""
        self._counted[name] += number
        if name == "abandoned_reads":
            self._log_once(name, "the disk cache answers too late: requests compute their prompts")

    def stats(self) -> DiskStats:
        """Return gauges and counters. Any thread may call it."""
        measured = int(self._rate) if self._counted["read_blocks"] else 0
        gauges = DiskStats(self._num_slots, self._records, read_bytes_per_s=measured)
        return replace(gauges, **self._counted)

    def clear(self) -> Future[None]:
        """Delete all records and all images. No record is found before that is done, nor at all if it fails."""
        return self._delete(self._clear)

    def drop(self, namespace: bytes, blocks: Sequence[bytes] = ()) -> Future[None]:
        """Delete the record of the last of these blocks, and all records below it; without blocks, the whole namespace.

        No record is found before that is done, nor at all if it fails.
        """
        return self._delete(partial(self._drop_text, namespace, blocks))

    def _delete(self, command: Callable[[], object]) -> Future[None]:
        def delete() -> None:
            try:
                command()
                self._commit()  # also of runs before it: the log of an open transaction cannot be emptied
                self._index.empty_log()
            except (OSError, sqlite3.Error) as error:  # a later start would find the text: delete the whole index
                self._start_again(error)
            (self._path / _ASIDE).unlink(missing_ok=True)
            self._deleted += 1

        self._deletions += 1
        return self.do(delete)

    def close(self, timeout: float | None) -> bool:
        """Run all commands and close the files, for at most `timeout` seconds; returns whether that was enough.

        May be called again, from any thread.
        """
        self.closed = True
        self._commands.put(None)
        for _ in self._readers:
            self._reads.put(None)
        self._writer.join(timeout)
        return not self._writer.is_alive()

    # ---- the writer's thread

    def _work(self) -> None:
        refused: Exception | None = None
        try:
            self._path = self._place()
            if self.closed:
                raise OSError(errno.ESHUTDOWN, "it was closed first")
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._slabs = Slabs(os.open(self._path, flags), self.image_bytes, self._num_slots)
            self._index = self._opened()
        except Exception as error:
            refused = error
            if not self.closed:
                self._fault("the disk cache cannot be opened, and is off", "failed_writes", error)
            self._paused_until = float("inf")
        while (each := self._commands.get()) is not None:
            command, ended = each
            if refused is not None:
                ended.set_exception(refused)
                continue
            try:
                command()
                if self._commands.empty() or self._fresh >= BATCH:
                    self._commit()
                ended.set_result(None)
            except Exception as error:
                self._failed(error)
                ended.set_exception(error)
        if refused is None:
            self._finish()

    def _opened(self) -> Index:
        """Open the index, or move one aside that cannot be read. Raises OSError and sqlite3.Error."""
        path = self._path / _INDEX
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path} is a link")
        if not path.exists():
            _create(path)
        try:
            return self._counted_slots(Index(path, writes=True))
        except sqlite3.Error as error:
            if _may_pass(error):
                raise
            self._move_aside(error)
            return self._counted_slots(Index(path, writes=True))

    def _counted_slots(self, index: Index) -> Index:
        """Count the slots that an index uses, and let the engine's thread find its records."""
        try:
            index.drop_beyond(self._num_slots)
            index.commit()
            self._count_slots(index)
            self._finder = Index(self._path / _INDEX, writes=False)
        except sqlite3.Error:
            index.close()
            raise
        return index

    def _count_slots(self, index: Index) -> None:
        used = np.unique(index.slots())
        self._unused = int(used[-1]) + 1 if len(used) else 0
        self._free = np.setdiff1d(np.arange(self._unused), used, assume_unique=True).tolist()
        self._records, self._fresh = len(used), 0

    def _move_aside(self, error: Exception) -> None:
        path = self._path / _INDEX
        aside = self._path / _ASIDE
        _log.warning(
            "the index %s cannot be used: it is now %s, and the cache begins empty: %s", path, aside.name, error
        )
        os.replace(path, aside)
        for suffix in ("-wal", "-shm"):
            (self._path / (_INDEX + suffix)).unlink(missing_ok=True)
        _create(path)

    def _write(self, run: Run) -> None:
        """Write the blocks of a run that have no record yet, each parent first."""
        left, used = len(run.images), run.used
        self._taken += left
        try:
            self._check_room()
            parent = self._find(ROOT, run.namespace) or self._index.add(ROOT, run.namespace, NO_SLOT, 0, used)
            for number, tokens in enumerate(run.blocks, len(run.images) - len(run.blocks)):
                record = self._find(parent.id, tokens)
                if record is None:
                    slot = self._slot(parent, used) if number >= 0 else None
                    if slot is None:  # no room, or a record before it is missing
                        break
                    self._slabs.write(slot, run.images[number])
                    record = self._index.add(parent.id, tokens, slot, crc32(run.images[number].data), used)
                    self._fresh += 1
                parent, left = record, min(left, len(run.images) - number - 1)
        finally:
            self._counted["dropped_blocks"] += left

    def _commit(self) -> None:
        """Make images durable, and then their records."""
        if self._fresh:
            self._slabs.sync()
        self._index.touch([self._touched.popleft() for _ in range(len(self._touched))])
        self._index.commit()
        self._records += self._fresh
        self._counted["written_blocks"] += self._fresh
        self._fresh = 0

    def _find(self, parent: int, tokens: bytes) -> Record | None:
        try:
            return self._index.find(parent, tokens)
        except Damaged as error:
            self._drop_damaged(error.record)
            return None

    def _slot(self, parent: Record, used: float) -> int | None:
        """Take a free slot, if need be by eviction of older text, which is durable before the slot is written again."""
        if not self._free and self._unused < self._num_slots:
            self._unused += 1
            return self._unused - 1
        if not self._free:
            self._commit()
            freed = self._index.evict(BATCH, parent.id, used)
            self._counted["evicted_records"] += len(freed)
            self._freed(freed)
        return self._free.pop() if self._free else None

    def _freed(self, slots: list[int]) -> None:
        self._index.commit()
        self.losses += len(slots)
        self._free += [slot for slot in slots if slot < self._num_slots]  # a damaged record may have any
        self._records -= len(slots)

    def _check_room(self) -> None:
        free, size = self._slabs.free_bytes()
        if free < max(LEAST_FREE, LEAST_SHARE * size):
            raise OSError(errno.ENOSPC, f"{free >> 20:,} MiB are free, and 1 GiB or 5% of the disk stay free")

    def _drop(self, record: int) -> int:
        """Delete a record and all after it, durably; returns how many blocks had an image."""
        self._commit()
        slots = self._index.drop(record)
        self._freed(slots)
        return len(slots)

    def _drop_damaged(self, record: int) -> None:
        dropped = self._drop(record)
        self._count_slots(self._index)  # it may have had the slot of another record
        self._counted["damaged_records"] += dropped
        self._log_once("damage", "%d records of a disk cache are damaged, and were dropped", dropped)

    def _check_read(self, record: Record) -> None:
        """Drop a record whose image was not there; a record that was evicted meanwhile is no damage."""
        if self._index.holds(record):
            self._drop_damaged(record.id)

    def _drop_text(self, namespace: bytes, blocks: Sequence[bytes]) -> None:
        record = self._find(ROOT, namespace)
        for tokens in blocks:
            record = record and self._find(record.id, tokens)
        if record is not None:
            self._drop(record.id)

    def _clear(self) -> None:
        self._index.clear()
        self._index.commit()
        self.losses += 1
        self._slabs.clear()
        self._free, self._unused, self._records, self._fresh = [], 0, 0, 0

    def _finish(self) -> None:
        try:
            self._commit()
        except Exception as error:
            self._failed(error)
        finder, self._finder = self._finder, None
        for each in (*self._old, finder, self._index):
            if each is not None:
                each.close()
        for reader in self._readers:
            reader.join(_LONGEST_READ)
        self._slabs.close()

    # ---- faults

    def _failed(self, error: Exception) -> None:
        """Undo what is not durable, and stop writing for a while; start with an empty index if this one is damaged."""
        self._slabs.forget_writes()
        self._counted["dropped_blocks"] += self._fresh
        self.losses += 1
        self._paused_until = time.monotonic() + PAUSE
        try:
            self._index.rollback()
            self._count_slots(self._index)
        except sqlite3.Error as again:
            error = again
        if isinstance(error, sqlite3.Error) and not _may_pass(error):
            self._index_failed(error)
        else:
            self._fault("text cannot be written to the disk cache", "failed_writes", error)

    def _index_failed(self, error: Exception) -> None:
        """Start with an empty index if a damaged one raised `error`."""
        if _may_pass(error):
            self._fault("the index of the disk cache cannot be read", "failed_reads", error)
            return
        self._counted["damaged_records"] += self._records
        try:
            self._start_again(error)
            self._paused_until = 0.0
        except (OSError, sqlite3.Error) as again:
            self._paused_until = float("inf")
            self._fault("the disk cache cannot be started again, and is off", "failed_writes", again)

    def _start_again(self, error: Exception) -> None:
        finder, self._finder = self._finder, None
        self._old += [each for each in (finder, self._index) if each is not None]
        self._move_aside(error)
        self._index = self._opened()
        self.losses += 1

    def _fault(self, what: str, counter: str, error: Exception) -> None:
        self._counted[counter] += 1
        number = error.errno if isinstance(error, OSError) else type(error).__name__
        self._log_once(f"{counter} {number}", "%s: %s", what, error)

    def _log_once(self, kind: str, message: str, *args: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(message, *args)

    # ---- the readers' threads

    def _serve(self) -> None:
        image = np.empty(self.image_bytes, np.uint8)
        while (read := self._reads.get()) is not None:
            begun = time.perf_counter()
            try:
                if not self.closed:
                    self._fill(read, image)
            except Exception as error:
                if not self.closed:
                    self._fault("text cannot be read from the disk cache", "failed_reads", error)
            if read.arrived:
                rate = read.arrived * self.image_bytes / max(time.perf_counter() - begun, 1e-9)
                self._rate += 0.3 * (rate - self._rate)
                self._counted["read_blocks"] += read.arrived
            read.done(read)

    def _fill(self, read: Read, image: Image) -> None:
        for number, record in enumerate(read.records):
            if not self._slabs.read(record.slot, image) or crc32(image.data) != record.image:
                self.do(partial(self._check_read, record))
                break
            read.put(number, image)
            read.arrived = number + 1


def _may_pass(error: Exception) -> bool:
    """Whether an error of the database says nothing about its content."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in _PASSING and code != sqlite3.SQLITE_IOERR_SHORT_READ


def _create(path: Path) -> None:
    """Create an empty private file; the database gives its mode to its other files."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
