"""The block pool of a cache with limits: it counts the blocks of each group of namespaces.

Every block in use belongs to the group that took it; content never crosses namespaces, so it stays there until the
block is free. `used` counts the blocks of a group, `evictable_in` its evictable ones. `spare` blocks are those that
other groups may evict: evictable, and beyond the guaranteed ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.quotas.limits import NamespaceLimits
from radixkv.cache.types import Node


class QuotaPool(BlockPool):
    """A pool whose blocks belong to groups. Each operation costs O(1) more than that of BlockPool, `take` O(blocks).

    >>> pool = QuotaPool(10, 16, NamespaceLimits({"ann": 0.5}))
    >>> taken = pool.take(3, group=1)
    >>> pool.used, pool.guaranteed
    ([0, 3], [0, 5])
    """

    __slots__ = ("evictable_in", "guaranteed", "limits", "owner", "spare", "total_spare", "used")

    def __init__(self, num_blocks: int, block_size: int, limits: NamespaceLimits) -> None:
        super().__init__(num_blocks, block_size)
        self.limits = limits
        self.owner = array("i", bytes(4 * num_blocks))  # block -> group, of blocks in use
        self.guaranteed = limits.blocks(num_blocks)  # of each group, as the following lists
        self.used = [0] * len(limits)
        self.evictable_in = [0] * len(limits)
        self.spare = [0] * len(limits)
        self.total_spare = 0

    # ---- reading

    def group_of(self, node: Node) -> int:
        """The group of a node that covers tokens."""
        return self.owner[node.blocks[0]]

    def evictable_for(self, group: int) -> int:
        """How many blocks can be evicted for a sequence of a group: its own, and the spare ones of others. O(1)."""
        return self.evictable_in[group] + self.total_spare - self.spare[group]

    def most_blocks(self, group: int) -> int:
        """The most blocks that a group can have: the pool without the blocks guaranteed to others."""
        return self.num_blocks - sum(self.guaranteed) + self.guaranteed[group]

    def exceeds(self, group: int) -> bool:
        """Whether a group has more blocks than are guaranteed to it."""
        return self.used[group] > self.guaranteed[group]

    def excess(self, group: int) -> float:
        """The blocks of a group in units of its share; infinite for blocks without a share."""
        share = self.limits.shares[group] * self.num_blocks
        used = self.used[group]
        return used / share if share else inf if used else 0.0

    def shortage(self, count: int, group: int) -> str:
        """Explain why `count` blocks cannot be taken by a group."""
        evictable = self.evictable_for(group)
        return (
            f"{count} blocks wanted, {len(self.free)} are free and {evictable} evictable for this namespace of "
            f"{self.num_blocks}; {self.evictable - evictable} more are cached for other namespaces within their "
            "limits: close or shorten sequences, release pins, lower these limits, or make the pool larger"
        )

    # ---- counting

    def take(self, count: int, group: int = 0) -> array[int]:
        """Take free blocks for a group."""
        taken = super().take(count)
        owner = self.owner
        for block in taken:
            owner[block] = group
        self._count(group, count, 0)
        return taken

    def give_back(self, blocks: array[int]) -> None:
        """Free a run of blocks of one namespace."""
        if blocks:
            self._count(self.owner[blocks[0]], -len(blocks), 0)
            super().give_back(blocks)

    def give_back_idle(self, blocks: array[int]) -> None:
        """Free a run of evictable blocks of one namespace."""
        self._count(self.owner[blocks[0]], -len(blocks), -len(blocks))
        super().give_back_idle(blocks)

    def share(self, block: int, *, idle: bool, sole_idle: bool, sole_node: Node | None = None) -> None:
        """Add an owner."""
        before = self.evictable
        super().share(block, idle=idle, sole_idle=sole_idle, sole_node=sole_node)
        self._count(self.owner[block], 0, self.evictable - before)

    def release(self, block: int, *, idle: bool) -> Node | None:
        """Drop one owner; the last one frees the block."""
        before, free = self.evictable, len(self.free)
        deepest_owner = super().release(block, idle=idle)
        self._count(self.owner[block], free - len(self.free), self.evictable - before)
        return deepest_owner

    def shift(self, node: Node, idle: bool) -> None:
        """Count the blocks of a node that was locked or unlocked."""
        if node.blocks:  # not a root
            before = self.evictable
            super().shift(node, idle)
            self._count(self.owner[node.blocks[0]], 0, self.evictable - before)

    def _count(self, group: int, used: int, evictable: int) -> None:
        self.used[group] += used
        self.evictable_in[group] += evictable
        spare = max(0, min(self.evictable_in[group], self.used[group] - self.guaranteed[group]))
        self.total_spare += spare - self.spare[group]
        self.spare[group] = spare

    # ---- tests

    def check(self, owned: Iterable[tuple[int, array[int]]], idle: set[int]) -> None:
        """Recount all groups from the (group, blocks) of each owner. AssertionError names the broken invariant."""
        blocks: dict[int, int] = {}
        for group, run in owned:
            for block in run:
                assert blocks.setdefault(block, group) == group, f"block {block} belongs to two groups"
                assert self.owner[block] == group, f"block {block}: group {self.owner[block]} on record, not {group}"
        used, evictable = [0] * len(self.limits), [0] * len(self.limits)
        for block, group in blocks.items():
            used[group] += 1
            evictable[group] += block in idle
        assert self.used == used, f"used blocks by group: {self.used}, recounted {used}"
        assert self.evictable_in == evictable, f"evictable blocks by group: {self.evictable_in}, recounted {evictable}"
        spare = [max(0, min(e, u - g)) for e, u, g in zip(evictable, used, self.guaranteed, strict=True)]
        assert (self.spare, self.total_spare) == (spare, sum(spare)), f"spare blocks {self.spare}, recounted {spare}"
