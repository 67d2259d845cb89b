"""The state that one cache's facade and its sequences share: pool, trees, index, pins, counters, open sequences.

Sequences take free blocks from the pool, after `make_room` has evicted where there were too few. They add themselves to
`open`, and remove themselves when they are closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.events import Observer, guarded
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.ghosts import Ghosts, Pressure
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.types import OpenSequence
from radixkv.errors import OutOfBlocks


@dataclass(slots=True)
class Counters:
    """Running totals; see CacheStats for their meanings."""

    query_tokens: int = 0
    hit_tokens: int = 0
    committed_tokens: int = 0
    evicted_blocks: int = 0
    evicted_tokens: int = 0
    copied_blocks: int = 0
    regret_tokens: int = 0
    opened_sequences: int = 0
    closed_sequences: int = 0


COUNTERS = tuple(field.name for field in fields(Counters))


class CacheState:
    """The parts of one cache."""

    __slots__ = ("clock", "counters", "ghosts", "index", "open", "pins", "pool", "tree")

    tree_class: ClassVar[type[RadixTree]] = RadixTree

    def __init__(self, pool: BlockPool, index: EvictionIndex, clock: Callable[[], float], pin_budget: int) -> None:
        self.clock = clock
        self.pool = pool
        self.index = index
        forget = index.forget if index.remembers_faded else None
        self.ghosts = Ghosts(pool.num_blocks * pool.block_size, pool.num_blocks, forget)
        self.tree = self.tree_class(pool, index, self.ghosts)
        self.pins = Pins(self.tree, clock, pin_budget)
        self.counters = Counters()
        self.open: dict[int, OpenSequence] = {}

    def observe(self, observer: Observer) -> None:
        """Send events to `observer`, in place of an earlier one, until it raises."""
        self.tree.observer = guarded(observer, self._drop_observer)

    def make_room(self, count: int, group: int) -> None:
        """Evict until `count` blocks are free for a sequence of this group of namespaces.

        OutOfBlocks changes nothing; it means that free and evictable blocks together are too few.
        """
        pool = self.pool
        self.pins.expire()
        if count > len(pool.free) + pool.evictable_for(group):
            raise OutOfBlocks(pool.shortage(count, group))
        self.evict(count, group)

    def evict(self, count: int, group: int) -> bool:
        """Evict for a group until `count` blocks are free or no leaf may be evicted; returns whether they are free.

        This may free more than `evictable` blocks: when the last leaf that shares a held node's part-filled block is
        evicted, the node takes a copy that a child has.
        """
        pool, index, tree, counters = self.pool, self.index.victims_for(group), self.tree, self.counters
        free = len(pool.free)
        now, pressure = self.clock(), Pressure(count, free)
        while (missing := count - len(pool.free)) > 0 and len(index):
            victim = index.victim()
            counters.evicted_tokens += tree.trim(victim, index.trim_limit(victim, missing), now, pressure)
            index.trim(victim)
        counters.evicted_blocks += len(pool.free) - free
        return missing <= 0

    def _drop_observer(self) -> None:
        self.tree.observer = None
