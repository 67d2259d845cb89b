"""The limits of one cache with the accounts and the indexes that keep them, for each tier."""

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
    host_blocks: int = 0  # used in host memory, where the namespace has the same share


class Quotas:
    """The parts of a cache that keep the limits of namespaces: the accounts of each tier, and its index."""

    def __init__(
        self,
        limits: NamespaceLimits | Mapping[Hashable, float],
        num_blocks: int,
        host_blocks: int,
        new_index: Callable[[], EvictionIndex],
    ) -> None:
        """Make the accounts, and an index of the policy for each group. Raises InvalidInput for wrong limits."""
        self.limits = limits if isinstance(limits, NamespaceLimits) else NamespaceLimits(limits)
        self.shares = Shares(num_blocks, self.limits)
        self.index = QuotaIndex(self.shares, new_index)
        self.most_pinned = [self.shares.most_blocks(0), *self.shares.guaranteed[1:]]  # of each group
        self.host = Shares(host_blocks, self.limits)
        self.host_index = QuotaIndex(self.host, EvictionIndex)

    def usage(self) -> tuple[NamespaceUsage, ...]:
        """The blocks of each namespace with a share, in the order of the limits. O(shares)."""
        pool, host = self.shares, self.host
        rows = zip(self.limits.shares, pool.guaranteed, pool.used, pool.evictable_in, host.used, strict=True)
        named = zip(self.limits.namespaces, list(rows)[1:], strict=True)
        return tuple(NamespaceUsage(namespace, *row) for namespace, row in named)

    def pinned_blocks(self, state: CacheState) -> list[int]:
        """Count the pinned blocks of each group. O(pinned blocks)."""
        pinned = [0] * len(self.limits)
        for block in state.pins.blocks():
            pinned[self.shares.owner[block]] += 1
        return pinned

    def refuse_pin(self, state: CacheState, blocks: array[int]) -> None:
        """Raise PinBudgetExceeded if a pin of these blocks would exceed the share of their group. O(pinned blocks)."""
        owner, group = self.shares.owner, self.shares.owner[blocks[0]]
        pinned = {block for block in state.pins.blocks() if owner[block] == group}
        if (total := len(pinned.union(blocks))) > self.most_pinned[group]:
            raise PinBudgetExceeded(
                f"{total} blocks of this namespace would be pinned, {len(pinned)} are, and the shares of namespaces "
                f"allow {self.most_pinned[group]}: release pins, or give the namespace a larger share"
            )

    def check(self, state: CacheState) -> None:
        """Recount the blocks of each group. AssertionError names the broken invariant. O(blocks)."""
        pinned = zip(self.pinned_blocks(state), self.most_pinned, strict=True)
        assert all(blocks <= most for blocks, most in pinned), "a group has more pinned blocks than its share"
        idle = {block for node in state.tree.walk() if not node.locks for block in node.blocks}
        held = {block for node in state.tree.walk() if node.locks for block in node.blocks}
        for sequence in state.open.values():
            held.update(sequence.own_blocks())
        self.shares.check(_owned(state), idle - held)
        self.host.check(_owned_on_host(state, self.host.owner), set())


def _owned_on_host(state: CacheState, owner: array[int]) -> Iterator[tuple[int, array[int]]]:
    host = state.host
    for node in () if host is None else host.nodes():
        yield state.tree.namespace_of(node).group, node.blocks
    for block in () if host is None else (*host.blocks.lent, *host.blocks.deferred):
        yield owner[block], array("i", [block])


def _owned(state: CacheState) -> Iterator[tuple[int, array[int]]]:
    for namespace, root in state.tree.roots.items():
        for node in state.tree.walk(root):
            yield namespace.group, node.blocks
    for sequence in state.open.values():
        yield state.tree.namespace_of(sequence.node).group, sequence.own_blocks()
