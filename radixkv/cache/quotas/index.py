"""The eviction index of a cache with limits: an index of the policy for each group of namespaces.

Uses are counted once for all groups. The group of each victim is chosen in O(groups).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.quotas.shares import Shares
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.types import Hint, Node


class QuotaIndex(EvictionIndex):
    """The unlocked leaves of each group in the order of the policy; groups that exceed their share most come first."""

    __slots__ = ("_indexes", "_shares", "accounts", "remembers_faded")

    def __init__(self, shares: Shares, new_index: Callable[[], EvictionIndex]) -> None:
        super().__init__()
        self._shares, self.accounts = shares, (shares,)
        self._indexes = [new_index() for _ in range(len(shares.limits))]
        self.remembers_faded = self._indexes[0].remembers_faded

    # ---- leaves

    def __len__(self) -> int:
        return sum(map(len, self._indexes))

    def of(self, group: int) -> EvictionIndex:
        """The index of a group."""
        return self._indexes[group]

    def group_of(self, node: Node) -> int:
        """Return the group of a node. O(1)."""
        return self._shares.group_of(node)

    def at(self, number: int) -> Node:
        """Return a leaf by its number, one group after the other. O(groups + log leaves)."""
        for index in self._indexes:
            if number < len(index):
                return index.at(number)
            number -= len(index)
        raise IndexError(number)

    def add(self, node: Node) -> None:
        """Insert a node that became an unlocked leaf."""
        self._of(node).add(node)

    def remove(self, node: Node) -> None:
        """Remove a node that is no longer an unlocked leaf."""
        self._of(node).remove(node)

    def victim(self) -> Node:
        """Return the leaf to evict next if limits protected no group; the index must not be empty."""
        return self._indexes[self.by_excess(range(len(self._indexes)))[0]].victim()

    def next_victims(self, count: int) -> list[Node]:
        """Return the next `count` leaves by the present excess of the groups. O(groups + count)."""
        victims: list[Node] = []
        for group in self.by_excess(range(len(self._indexes))):
            victims += self._indexes[group].next_victims(count - len(victims))
        return victims

    def victims_for(self, group: int) -> GroupVictims:
        """Return the leaves that may be evicted for a sequence of a group."""
        return GroupVictims(self, self._shares, group)

    def by_excess(self, groups: Iterable[int]) -> list[int]:
        """The groups among `groups` that have leaves: those with evictable blocks first, then by their excess.

        Blocks of a leaf are not evictable while a fork owns them too.
        """
        shares = self._shares
        found = [group for group in groups if len(self._indexes[group])]
        return sorted(found, key=lambda each: (shares.evictable_in[each] > 0, shares.excess(each)), reverse=True)

    def _of(self, node: Node) -> EvictionIndex:
        return self._indexes[self._shares.group_of(node)]

    # ---- hooks for policies that learn

    def open(self, tree: RadixTree, node: Node, ghost_owner: int, rest: bytes, counts: bool) -> Any:
        """A sequence that is no audit was opened at the end of `node`; return its policy_data."""
        return self._of(node).open(tree, node, ghost_owner, rest, counts)

    def close(self, tree: RadixTree, node: Node, policy_data: Any, generated: int, hint: Hint | None) -> None:
        """A sequence that is no audit will be closed now at the end of `node`."""
        self._of(node).close(tree, node, policy_data, generated, hint)

    def fork(self, policy_data: Any) -> Any:
        """Return the policy_data of a fork of a sequence."""
        return self._indexes[0].fork(policy_data)

    def forget(self, policy_data: Any, start: int) -> None:
        """Pass on that the text of a node or ghost is forgotten. O(groups)."""
        holder = next((each for each in self._indexes if each.holds(policy_data)), self._indexes[0])
        holder.forget(policy_data, start)

    def clear(self) -> None:
        """All ghosts were forgotten, and all leaves are about to be removed."""
        for index in self._indexes:
            index.clear()

    def check(self, nodes: list[Node]) -> None:
        """Recount the index of each group. AssertionError names the broken invariant."""
        by_group: list[list[Node]] = [[] for _ in self._indexes]
        for node in nodes:
            if node.parent is not None:
                by_group[self._shares.group_of(node)].append(node)
        for index, its_nodes in zip(self._indexes, by_group, strict=True):
            index.check(its_nodes)


class GroupVictims:
    """The leaves that may be evicted for one group: its own, and those of groups beyond their guaranteed blocks."""

    __slots__ = ("_chosen", "_group", "_index", "_shares")

    def __init__(self, index: QuotaIndex, shares: Shares, group: int) -> None:
        self._index, self._shares, self._group = index, shares, group
        self._chosen = group  # of the last victim

    def __len__(self) -> int:
        return sum(len(self._index.of(group)) for group in self._allowed())

    def victim(self) -> Node:
        """Return the leaf to evict next, of the group that exceeds its share most; there must be one."""
        self._chosen = self._index.by_excess(self._allowed())[0]
        return self._index.of(self._chosen).victim()

    def at(self, number: int) -> Node:
        """Return a leaf by its number, groups that exceed their shares most first; the leaf becomes the victim."""
        for group in self._index.by_excess(self._allowed()):
            self._chosen, index = group, self._index.of(group)
            if number < len(index):
                return index.at(number)
            number -= len(index)
        raise IndexError(number)

    def owes(self) -> bool:
        """Return whether the group of the victim exceeds its share more than the group that asks."""
        return self._shares.excess(self._chosen) > self._shares.excess(self._group)

    def trim_limit(self, node: Node, blocks: int) -> int:
        """Return how many blocks to evict at once; a group keeps its guaranteed blocks."""
        limit = self._index.of(self._chosen).trim_limit(node, blocks)
        shares, chosen = self._shares, self._chosen
        return limit if chosen == self._group else min(limit, shares.used[chosen] - shares.guaranteed[chosen])

    def trim(self, node: Node) -> None:
        """Note that the victim's tail was evicted."""
        self._index.of(self._chosen).trim(node)

    def _allowed(self) -> list[int]:
        shares = self._shares
        return [group for group in range(len(shares.used)) if group == self._group or shares.exceeds(group)]
