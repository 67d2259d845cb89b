"""The eviction index: the unlocked leaves of all trees in the order in which they are evicted.

The index is a persistent sorted list: choosing a victim scans nothing and rebuilds nothing, and every operation is
O(log leaves). A policy is either a rank, which is part of the sort key, or a subclass that overrides the hooks below.
The hooks take the tree and a node; by default they read nothing. A rank is computed once, when a leaf is added, so it
must not depend on the length of the node, which trimming and splitting change.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

from sortedcontainers import SortedList

from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.types import EvictionKey, Hint, Node

Rank = Callable[[Node], int]


class EvictionIndex:
    """The unlocked leaves, coldest first, by (priority, standing, rank, recency): see `Node.standing`."""

    __slots__ = ("_coldest", "_order", "_rank", "_tick", "clock")

    remembers_faded = False  # whether old ghosts keep a hash of their tokens: see `ghosts`

    def __init__(self, rank: Rank | None = None) -> None:
        self.clock: Callable[[], float] | None = None  # dates nodes while a change tracker is attached
        self._rank = rank
        self._order: SortedList = SortedList()  # of EvictionKey
        self._tick = 0
        self._coldest: Node | None = None  # the first of the order, if no leaf was added since `victim` returned it

    def __len__(self) -> int:
        return len(self._order)

    # ---- leaves

    def at(self, number: int) -> Node:
        """Return a leaf by its number in the order. O(log leaves)."""
        node: Node = self._order[number][4]
        return node

    def touch(self, node: Node) -> None:
        """Make a node the most recently used one. It must not be in the index."""
        self._tick += 1
        node.tick = self._tick
        if self.clock is not None:
            node.used_at = self.clock()

    def date(self, node: Node) -> None:
        """Note the time of a use, if there is a clock; the order does not depend on it."""
        if self.clock is not None:
            node.used_at = self.clock()

    def add(self, node: Node) -> None:
        """Insert a node that became an unlocked leaf."""
        rank = 0 if self._rank is None else self._rank(node)
        standing = node.standing if node.announced else not node.demoted
        node.eviction_key = (node.priority, standing, rank, node.tick, node)
        self._coldest = None
        self._order.add(node.eviction_key)

    def remove(self, node: Node) -> None:
        """Remove a node that is no longer an unlocked leaf."""
        if node is self._coldest:  # the last victim: no bisection
            self._coldest = None
            self._order.pop(0)
        else:
            self._order.remove(node.eviction_key)
        node.eviction_key = None

    def inherit(self, parent: Node, child: Node) -> None:
        """Let `parent`, which becomes a leaf, have the recency and the hits of `child`, which leaves the tree."""
        if child.tick > parent.tick:
            parent.tick, parent.used_at = child.tick, child.used_at
        parent.hits += child.hits

    def victim(self) -> Node:
        """Return the leaf to evict next; the index must not be empty."""
        node: Node = next(iter(self._order))[4]
        self._coldest = node
        return node

    def next_victims(self, count: int) -> list[Node]:
        """Return the next `count` leaves in the order of eviction, fewer if there are fewer. O(count)."""
        return [key[4] for key in islice(self._order, count)]

    # ---- hooks for policies that learn

    def open(self, tree: RadixTree, node: Node, ghost_owner: int, rest: bytes, counts: bool) -> Any:
        """A sequence that is no audit was opened at the end of `node`; return its policy_data.

        `rest` is the text that was asked for after the hit, and its ghosts hang below `ghost_owner`. `counts` says
        whether the opening counts as a query.
        """

    def close(self, tree: RadixTree, node: Node, policy_data: Any, generated: int, hint: Hint | None) -> None:
        """A sequence that is no audit will be closed now at the end of `node`, `generated` tokens after its prompt."""

    def fork(self, policy_data: Any) -> Any:
        """Return the policy_data of a fork of a sequence."""

    def trim_limit(self, node: Node, blocks: int) -> int:
        """Return how many blocks, at most `blocks`, to evict from the tail of the victim `node` at once."""
        return blocks

    def trim(self, node: Node) -> None:
        """A victim's tail was evicted: all of the node if it has no eviction_key any more."""

    def forget(self, policy_data: Any, start: int) -> None:
        """The text from `start` on of a node or ghost with this policy_data is forgotten: its reuse goes unnoticed."""

    def clear(self) -> None:
        """All ghosts were forgotten, and all leaves are about to be removed."""

    def check(self, nodes: list[Node]) -> None:
        """Recount the index; `nodes` are all nodes of the tree. AssertionError names the broken invariant."""
        listed = {id(key[4]) for key in self._order}
        assert len(listed) == len(self._order), "the eviction index lists a node twice"
        for node in nodes:
            leaf = node.parent is not None and not node.children and not node.locks
            key: EvictionKey | None = node.eviction_key
            assert (id(node) in listed) == leaf == (key is not None), (
                f"node {node.id}: in the index iff an unlocked leaf"
            )
            if key is not None:
                assert key[:2] == (node.priority, node.standing), f"node {node.id}: its key in the index is stale"
                assert key[3] == node.tick, f"node {node.id}: its recency in the index is stale"
        gone = len(listed) - sum(node.eviction_key is not None for node in nodes)
        assert not gone, f"the eviction index lists {gone} nodes that are not in the tree"


class SegmentedIndex(EvictionIndex):
    """Two segments (SLRU, Karedla et al., 1994): leaves are protected from their second hit on, within a limit.

    Unprotected leaves are evicted first, each segment by recency. Above the limit, the least recent protected leaf is
    the next victim instead: otherwise the text of ended sessions would fill the pool and never leave it. Segments are
    measured in leaves, because a chain is evicted through its leaf.
    """

    __slots__ = ()

    LIMIT: ClassVar[float] = 0.8  # protected leaves, as a share of all leaves

    def __init__(self) -> None:
        super().__init__(lambda node: int(node.hits >= 2))

    def victim(self) -> Node:
        """Return the leaf to evict next; the index must not be empty."""
        first = super().victim()
        node = self.next_victims(1)[0]
        if node is not first:
            self._coldest = None
        return node

    def next_victims(self, count: int) -> list[Node]:
        """Return the next `count` leaves in the order of eviction, fewer if there are fewer. O(count + log leaves)."""
        victims: list[Node] = []
        start = 0
        while start < len(self._order) and len(victims) < count:
            group = self._order[start][:2]  # priority, standing: these come before segments
            middle = self._order.bisect_left((*group, 1))
            end = self._order.bisect_left((*group, 2))
            victims += self._of_group(start, middle, end, count - len(victims))
            start = end
        return victims

    def _of_group(self, start: int, middle: int, end: int, count: int) -> list[Node]:
        """Return the next victims among the unprotected leaves [start, middle) and the protected ones [middle, end)."""
        protected = middle
        victims = []
        for _ in range(min(count, end - start)):
            left = (end - protected) + (middle - start)
            if start < middle and end - protected <= self.LIMIT * left:
                start, place = start + 1, start
            else:
                protected, place = protected + 1, protected
            victims.append(self.at(place))
        return victims
