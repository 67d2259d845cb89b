"""The disk of a simulated cache: the real tier and the real index, without images, files and threads.

Reads and writes end at once, so that all text that left the host is on disk before the next request.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.disk.records import NO_SLOT, ROOT, Index, Record
from radixkv.disk.slabs import Image
from radixkv.disk.store import Run
from radixkv.disk.tier import DiskTier

_NO_IMAGE: Image = np.empty(0, np.uint8)


class SimulatedDisk:
    """A disk of `num_slots` blocks below a cache with a host tier; it is the store and the memory of its DiskTier."""

    ready, room, losses = True, 1 << 31, 0

    def __init__(self, cache: PrefixCache, num_slots: int) -> None:
        self.read_blocks = self.written_blocks = 0
        self._index = Index(Path(":memory:"), writes=True)
        finalize(self, self._index.close)
        self._free = num_slots
        self._times = count(1.0)
        store: Any = self  # with the methods of Store and Memory that a tier calls
        self._cache, self._tier = cache, DiskTier(cache, store, store)

    def read(self, chain: array[int], namespace: Hashable) -> int:
        """Read the blocks of a text that are not in memory, as far as the host has room; returns those that are."""
        found = self._tier.find(chain, namespace)
        if found is None:
            return len(chain)
        self.touch(found.records, 0.0)  # first, since room on the host is made by writing
        blocks = array("i", self._tier.lend(found, namespace))
        self._cache.arrive(chain[: found.first + len(blocks)], namespace, blocks, len(blocks))
        self.read_blocks += len(blocks)
        return found.first

    # ---- the store

    def find(self, namespace: bytes, blocks: Iterable[bytes]) -> list[Record]:
        """Return the records of the first blocks of a text."""
        found: list[Record] = []
        parent = self._index.find(ROOT, namespace)
        for tokens in blocks:
            if parent is None or (parent := self._index.find(parent.id, tokens)) is None:
                break
            found.append(parent)
        return found

    def touch(self, records: Iterable[Record], used: float) -> None:
        """Note a use of records; `used` is the time of the clock, and not that of the trace."""
        now = next(self._times)
        self._index.touch((now, record.id) for record in records)

    def offer(self, run: Run) -> None:
        """Write the blocks of a run that have no record yet, each parent first, as far as there is room."""
        now = next(self._times)
        parent = self._index.find(ROOT, run.namespace) or self._index.add(ROOT, run.namespace, NO_SLOT, 0, now)
        for number, tokens in enumerate(run.blocks, len(run.images) - len(run.blocks)):
            record = self._index.find(parent.id, tokens)
            if record is None:
                if number >= 0 and not self._free:
                    self._free = len(self._index.evict(1, parent.id))
                    self.losses += 1
                if number < 0 or not self._free:  # a record before it is missing, or there is no room
                    break
                record = self._index.add(parent.id, tokens, 0, 0, now)
                self._free, self.written_blocks = self._free - 1, self.written_blocks + 1
            parent = record

    # ---- the memory

    def image(self, block: int) -> Image:
        """Return an image without bytes."""
        return _NO_IMAGE

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy nothing."""
