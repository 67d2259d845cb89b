"""The accounts of a pool with limits: they count the blocks of each group of namespaces.

Every block in use belongs to the group that took it; content never crosses namespaces, so it stays there until the
block is free. `used` counts the blocks of a group, `evictable_in` its evictable ones. `spare` blocks are those that
other groups may evict: evictable, and beyond the guaranteed ones. The pool calls `taken` and `count`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf

from radixkv.cache.quotas.limits import NamespaceLimits
from radixkv.cache.types import Node


class Shares:
    """The blocks of each group in a pool of `num_blocks`. Each count is O(1), `taken` O(blocks).

    >>> shares = Shares(10, NamespaceLimits({"ann": 0.5}))
    >>> shares.taken(array("i", [0, 1, 2]), group=1)
    >>> shares.used, shares.guaranteed
    ([0, 3], [0, 5])
    """

    __slots__ = ("evictable_in", "guaranteed", "limits", "num_blocks", "owner", "spare", "total_spare", "used")

    def __init__(self, num_blocks: int, limits: NamespaceLimits) -> None:
        self.num_blocks = num_blocks
        self.limits = limits
        self.owner = array("i", bytes(4 * num_blocks))  # block -> group, of blocks in use
        self.guaranteed = limits.blocks(num_blocks)  # of each group, as the following lists
        self.used = [0] * len(limits)
        self.evictable_in = [0] * len(limits)
        self.spare = [0] * len(limits)
        self.total_spare = 0

    # ---- reading

    def group_of(self, node: Node) -> int:
        """The group of a node in the tier of these blocks."""
        return self.owner[node.blocks[0]] if node.namespace is None else node.namespace.group

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

    def shortage(self, count: int, group: int, free: int) -> str:
        """Explain why `count` blocks cannot be taken by a group when `free` are free."""
        evictable = self.evictable_for(group)
        others = sum(self.evictable_in) - evictable
        return (
            f"{count} blocks wanted, {free} are free and {evictable} evictable for this namespace of "
            f"{self.num_blocks}; {others} more are cached for other namespaces within their "
            "limits: close or shorten sequences, release pins, lower these limits, or make the pool larger"
        )

    # ---- counting

    def taken(self, blocks: array[int], group: int) -> None:
        """Count free blocks that a group takes."""
        for block in blocks:
            self.owner[block] = group
        self._count(group, len(blocks), 0)

    def count(self, block: int, used: int, evictable: int) -> None:
        """Count changes of blocks of one group; `block` is one of them."""
        if used or evictable:
            self._count(self.owner[block], used, evictable)

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
