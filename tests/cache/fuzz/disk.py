"""The model of a disk below the host: a real folder, reads that are late or overlap, and restarts.

What arrives is checked where the host's images are: each holds the values of its text. A read of text that was dropped
meanwhile brings nothing. No text after a compressed prefix is on the disk.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.tokens import is_compressed
from radixkv.disk import SCRATCH
from radixkv.disk.slabs import Image
from radixkv.disk.store import Read, Store
from radixkv.disk.tier import DiskTier, Found
from tests.cache.naive import Texts

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

SLOTS = 64
LONGEST = 120.0  # seconds that a thread may take on a busy machine


@dataclass
class Arriving:
    found: Found
    namespace: Hashable
    blocks: list[int]
    read: Read
    ended: threading.Event
    stale: bool = False


class DiskModel:
    """The disk of one world, and the memory of its tier."""

    def __init__(self, world: World) -> None:
        assert world.host is not None
        self.world, self.host = world, world.host
        self.folder = TemporaryDirectory()
        self.arriving: list[Arriving] = []
        self.arrived = self.restarts = 0
        self.tier = DiskTier(world.cache, self.opened(), self)

    def opened(self) -> Store:
        slots = self.world.rng.choice((SLOTS, 4 * SLOTS))
        store = Store(lambda: Path(self.folder.name), self.host.blocks[0].nbytes, slots)
        assert store.settle(LONGEST) and store.ready
        return store

    # The memory

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            assert self.host.num_blocks <= target < self.host.num_blocks + SCRATCH
            self.host.blocks[target] = self.world.pool.slots[source]

    def image(self, block: int) -> Image:
        return self.host.blocks[block].view(np.uint8).copy()

    def put_image(self, block: int, image: Image) -> None:
        self.host.blocks[block] = image.view(np.uint64)

    # Verbs

    def read(self, namespace: Hashable, text: list[int]) -> None:
        """Begin to read what a text has on disk after its part in memory."""
        rng, cache = self.world.rng, self.world.cache
        if len(text) % 4:  # else the writer may be late
            assert self.tier.store.settle(LONGEST)
        found = self.tier.find(np.array(text, np.int32), namespace)
        if found is None:
            return
        assert not is_compressed(found.tokens)
        blocks = self.tier.lend(found, namespace, rng.randint(1, len(found.records)))
        ended = threading.Event()

        def put(number: int, image: Image) -> None:
            self.put_image(blocks[number], image)

        read = Read(found.records[: len(blocks)], put, lambda read: ended.set())
        self.arriving.append(Arriving(found, namespace, blocks, read, ended))
        if blocks:
            self.tier.store.read(read)
        else:
            ended.set()
        cache.check()

    def arrive(self) -> None:
        """End one of the reads, in any order."""
        each = self.arriving.pop(self.world.rng.randrange(len(self.arriving)))
        assert each.ended.wait(LONGEST)
        world, size = self.world, self.world.block_size
        arrived = 0 if each.stale else each.read.arrived
        text = np.frombuffer(each.found.tokens, np.int32)[: (each.found.first + max(arrived, 1)) * size]
        before = world.cache.stats()
        gained = world.cache.arrive(text, each.namespace, array("i", each.blocks), arrived)
        self.arrived += gained
        assert world.cache.stats().evicted_blocks == before.evicted_blocks
        if gained:
            world.texts.setdefault(each.namespace, Texts()).add(text.tolist())

    def restart(self) -> None:
        """Write what is noted, sometimes all that is cached, and open the folder again."""
        while self.arriving:
            self.arrive()
        if self.world.rng.random() < 0.7:
            for node in self.tier.unwritten():
                while self.tier.write(node, time.time()):
                    pass
        assert self.tier.store.close(LONGEST)
        self._assert_sound()
        self.tier.use(self.opened())
        texts = [self.tier.store.random_text(self.world.rng) for _ in range(5)]
        assert not any(is_compressed(b"".join(text[1:])) for text in texts if text)
        self.restarts += 1

    def _assert_sound(self) -> None:
        stats = self.tier.store.stats()
        faults = stats.failed_writes, stats.failed_reads, stats.damaged_records
        assert faults == (0, 0, 0), stats
        assert stats.records <= stats.slots

    def forget(self, namespace: Hashable, text: Sequence[int], start: int) -> None:
        """Drop a text from the disk too."""
        self._make_stale()
        self.tier.drop(np.array(text, np.int32), namespace, start)

    def forget_namespace(self, namespace: Hashable) -> None:
        self._make_stale()
        self.tier.drop_namespace(namespace)

    def clear(self) -> None:
        self._make_stale()
        self.tier.clear()
        assert self.tier.store.settle(LONGEST)
        assert not self.tier.store.stats().records

    def _make_stale(self) -> None:
        for each in self.arriving:
            each.stale = True

    def wind_down(self) -> None:
        while self.arriving:
            self.arrive()
        self.tier.store.close(LONGEST)
        self._assert_sound()
        self.folder.cleanup()
