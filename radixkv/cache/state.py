"""The parts of one cache, which its facade and its sequences share: pool, tree, index, pins, counters, sequences.

`host` and `snapshots` are the optional ones.

Sequences take free blocks from the pool, after `make_room` has evicted where there were too few. They add themselves to
`open`, and remove themselves when they are closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from radixkv.cache.announcements import Announcements
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.events import Events, Observer, ObserverFollower
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.ghosts import Ghosts
from radixkv.cache.host.tier import HostTier
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.recurrent.snapshots import Snapshots, Spacing
from radixkv.cache.types import CacheStats, Node, NodesById, OpenSequence, Pressure
from radixkv.errors import OutOfBlocks
from radixkv.figures import Counts

# Pressure from its fields: a call of the class takes 0.15 us more.
_pressure: Callable[[tuple[int, int]], Pressure] = partial(tuple.__new__, Pressure)


class CacheState:
    """The parts of one cache."""

    __slots__ = (
        "announcements", "clock", "counters", "events", "ghosts", "host", "index", "open", "pins", "pool", "snapshots",
        "tracker", "tree",
    )  # fmt: skip

    def __init__(
        self,
        pool: BlockPool,
        index: EvictionIndex,
        namespaces: Namespaces,
        clock: Callable[[], float],
        pin_budget: int,
        host_blocks: int,
        host_index: EvictionIndex,
        slots: StateSlots,
        spacing: Spacing,
    ) -> None:
        self.clock = clock
        self.pool = pool
        self.index = index
        self.events = Events()
        forget = index.forget if index.remembers_faded else None
        self.ghosts = Ghosts(pool.num_blocks * pool.block_size, pool.num_blocks, forget)
        self.tree = RadixTree(pool, index, self.ghosts, namespaces, self.events)
        self.host = HostTier(self.tree, host_blocks, host_index) if host_blocks else None
        self.announcements = Announcements(self.tree, self.host, self.events)
        self.pins = Pins(self.tree, clock, pin_budget)
        self.snapshots = Snapshots(slots, spacing, self.pins.nodes, self.events) if slots.num_rows else None
        self.counters = Counts(CacheStats)
        self.open: dict[int, OpenSequence] = {}
        self.tracker: NodesById | None = None  # the last change tracker that was attached

    def observe(self, observer: Observer) -> None:
        """Send events to `observer`, in place of an earlier one, until it raises."""
        ObserverFollower(observer, self.events)

    def make_room(self, count: int) -> None:
        """Evict until `count` blocks are free.

        OutOfBlocks changes nothing; it means that free and evictable blocks together are too few.
        """
        pool = self.pool
        self.pins.expire()
        if count > len(pool.free) + pool.evictable:
            raise OutOfBlocks(pool.shortage(count))
        self.evict(count)

    def evict(self, count: int) -> bool:
        """Evict until `count` blocks are free or no leaf is left; returns whether they are free.

        This may free more than `evictable` blocks: when the last leaf that shares a held node's part-filled block is
        evicted, the node takes a copy that a child has.
        """
        pool, index, tree, counters = self.pool, self.index, self.tree, self.counters
        free = len(pool.free)
        now, pressure = self.clock(), _pressure((count, free))
        while (missing := count - len(pool.free)) > 0 and len(index):
            victim = index.victim()
            most = victim.trim_limit(index.trim_limit(victim, missing), pool.block_size)
            if self.host is None:
                counters.evicted_tokens += tree.evict_tail(victim, most, now, pressure)
            else:
                counters.evicted_tokens += self.host.evict(victim, most, now, pressure)
            index.trim(victim)
        counters.evicted_blocks += len(pool.free) - free
        return missing <= 0

    def count_regret(self, node: Node | None, ghost_owner: int, length: int, rest: bytes) -> None:
        """Count requested tokens that left the last tier.

        `rest` follows the first `length` tokens, which end in `node`.
        """
        at = length
        if node is not None and node.below and length == node.end:
            found = self.tree.after_host(node, ghost_owner, rest)
            if found is None:
                return
            ghost_owner, at, rest = found
        for ghost, tokens in self.ghosts.regret(ghost_owner, at, rest):
            self.counters.regret_tokens += tokens
            for call in self.events.regretted:
                call(ghost, tokens, max(0.0, self.clock() - ghost.time))
