"""The limits of one cache with the pool and the index that keep them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.quotas.index import QuotaIndex
from radixkv.cache.quotas.limits import NamespaceLimits
from radixkv.cache.quotas.shares import Shares
from radixkv.cache.state import CacheState
from radixkv.errors import PinBudgetExceeded


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """The blocks of a namespace with a share, at one moment."""

    namespace: Hashable  # as the limits name it; tuples that begin with it are included
    share: float  # of the pool
    guaranteed_blocks: int  # never evicted for other namespaces
    used_blocks: int  # of its cached prefixes and its open sequences
    cached_blocks: int  # part of used_blocks: evictable


class Quotas:
    """The parts of a cache that keep the limits of namespaces: the pool's accounts, and an index of all groups."""

    def __init__(
        self,
        limits: NamespaceLimits | Mapping[Hashable, float],
        num_blocks: int,
        new_index: Callable[[], EvictionIndex],
    ) -> None:
        """Make the accounts, and an index of the policy for each group. Raises InvalidInput for wrong limits."""
        self.limits = limits if isinstance(limits, NamespaceLimits) else NamespaceLimits(limits)
        self.shares = Shares(num_blocks, self.limits)
        self.index = QuotaIndex(self.shares, new_index)

    def usage(self) -> tuple[NamespaceUsage, ...]:
        """The blocks of each namespace with a share, in the order of the limits. O(shares)."""
        shares = self.shares
        rows = zip(self.limits.shares, shares.guaranteed, shares.used, shares.evictable_in, strict=True)
        named = zip(self.limits.namespaces, list(rows)[1:], strict=True)
        return tuple(NamespaceUsage(namespace, *row) for namespace, row in named)

    def pinned_blocks(self, state: CacheState) -> list[int]:
        """Count the pinned blocks of each group. O(pinned blocks)."""
        pinned = [0] * len(self.limits)
        for block in state.pins.blocks():
            pinned[self.shares.owner[block]] += 1
        return pinned

    def most_pinned(self, group: int) -> int:
        """The most blocks that pins of a group may hold: its share, or without one what all shares leave free."""
        return self.shares.guaranteed[group] if group else self.shares.most_blocks(group)

    def refuse_pin(self, state: CacheState, blocks: array[int]) -> None:
        """Raise PinBudgetExceeded if a pin of these blocks would exceed the share of their group. O(pinned blocks)."""
        owner, group = self.shares.owner, self.shares.owner[blocks[0]]
        pinned = {block for block in state.pins.blocks() if owner[block] == group}
        new, most = len(set(blocks) - pinned), self.most_pinned(group)
        if len(pinned) + new > most:
            source = "its share" if group else "the pool without the shares of others"
            raise PinBudgetExceeded(
                f"{new} blocks more would be pinned for this namespace, {len(pinned)} are, and {source} is {most}: "
                "release pins, or give the namespace a larger share"
            )

    def check(self, state: CacheState) -> None:
        """Recount the blocks of each group. AssertionError names the broken invariant. O(blocks)."""
        for group, pinned in enumerate(self.pinned_blocks(state)):
            assert pinned <= self.most_pinned(group), f"group {group} has {pinned} pinned blocks, beyond its share"
        idle = {block for node in state.tree.walk() if not node.locks for block in node.blocks}
        held = {block for node in state.tree.walk() if node.locks for block in node.blocks}
        for sequence in state.open.values():
            held.update(sequence.own_blocks())
        self.shares.check(_owned(state), idle - held)


def _owned(state: CacheState) -> Iterator[tuple[int, array[int]]]:
    for namespace, root in state.tree.roots.items():
        for node in state.tree.walk(root):
            yield namespace.group, node.blocks
    for sequence in state.open.values():
        yield state.tree.namespace_of(sequence.node).group, sequence.own_blocks()
