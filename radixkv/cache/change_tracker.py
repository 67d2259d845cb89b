"""The view of a cache for a mirror outside it: nodes as they change, open sequences, pins.

Read it on the cache's thread, between two calls of the cache. The objects that it returns are the cache's own and valid
until the next call: copy them to keep them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixkv.cache import reuse
from radixkv.cache.events import Follower
from radixkv.cache.state import CacheState
from radixkv.cache.types import Node, OpenSequence


class SequenceView(NamedTuple):
    """A sequence as it is now. `blocks` are its own blocks, except those that a locked node owns too."""

    id: int
    node: int
    length: int
    cached: int
    blocks: array[int]


class ChangeTracker(Follower):
    """Marks the nodes of one cache that changed since the last look; the first look returns all nodes.

    A mark is one call of a C function. Memory is bounded by the tree, even if the marks are never taken: a node that
    came and went between two looks leaves no mark.
    """

    order = 1

    def __init__(self, state: CacheState) -> None:
        """Attach to the cache, in place of an earlier tracker. O(nodes)."""
        self._state = state
        self._changed = set(state.tree.residents())
        self._gone: list[int] = []
        self._shown: dict[int, Node] = {}  # the nodes that a look returned, by id
        self._mark: Callable[[Node], None] = self._changed.add
        if state.index.clock is None:  # uses were not dated so far
            now = state.clock()
            for node in self._changed:
                node.used_at = node.born_at = now
        state.index.clock = state.clock
        state.tracker = self
        state.events.connect(self)

    def __len__(self) -> int:
        """How many nodes changed or were removed since the last look. Any thread may ask."""
        return len(self._changed) + len(self._gone)

    def find(self, number: int) -> Node | None:
        """Return the node of an id, None if it is gone. O(1); O(changed nodes) for one that no look has returned."""
        return self._shown.get(number) or next((each for each in self._changed if each.id == number), None)

    # ---- events

    def receivers(self) -> dict[str, Callable[..., None]]:
        """Return the methods to call; a mark adds to the set without a call of Python code."""
        return super().receivers() | {"marked": self._mark}

    def split(self, node: Node, upper: Node) -> None:
        """Mark both halves."""
        self._mark(node)
        self._mark(upper)

    def joined(self, node: Node, upper: Node) -> None:
        """Mark the node, and forget the other one."""
        self._mark(node)
        self.uprooted(upper)

    def appended(self, node: Node) -> None:
        """Mark the leaf and its parent."""
        self._mark(node)
        assert node.parent is not None
        self._mark(node.parent)

    def arrived(self, node: Node) -> None:
        """Mark the leaf and its parent."""
        self.appended(node)

    def grown(self, node: Node, tokens: int) -> None:
        """Mark the leaf."""
        self._mark(node)

    def cut(self, node: Node, tokens: int, blocks: int) -> None:
        """Mark the leaf."""
        self._mark(node)

    def removed(self, node: Node, blocks: int) -> None:
        """Forget the leaf."""
        self.uprooted(node)

    def moved(self, node: Node, host: Node, start: int, tokens: int, freed: int, images: int, gone: bool) -> None:
        """Mark the node, or forget it, and mark the host node and its children, which may have another parent."""
        if gone:
            self.removed(node, freed)
        else:
            self._mark(node)
        self._mark(host)
        self._changed.update(host.children.values())

    def uprooted(self, root: Node) -> None:
        """Note that a node was removed from the tree."""
        self._changed.discard(root)
        if self._shown.pop(root.id, None) is not None:
            self._gone.append(root.id)

    def opened(self, sequence: OpenSequence, path: list[Node]) -> None:
        """Count a request that found a path."""
        if sequence.purpose == "request":
            self._reused(path)

    def loaded(self, sequence: OpenSequence, start: int, tokens: int, path: list[Node]) -> None:
        """Count a request that loaded the end of a path."""
        if sequence.purpose == "request":
            self._reused(path, start)

    def _reused(self, path: list[Node], start: int = 0) -> None:
        """Count a request that found the whole path in the cache; it was counted up to `start` before. O(depth)."""
        for node in path:
            end = node.end
            if end <= start:
                continue
            if node.start < start:
                node.reuse = reuse.count(node.reuse, start, -1)
            node.reuse = reuse.count(node.reuse, end)
            self._mark(node)

    # ---- reading

    def look(self) -> tuple[list[Node], list[int]]:
        """Take the new or changed nodes, and the ids of removed nodes that an earlier look returned; both by id.

        O(n log n) in the number of changes.
        """
        nodes, gone = sorted(self._changed, key=lambda node: node.id), sorted(self._gone)
        self._changed.clear()
        self._gone.clear()
        for node in nodes:
            self._shown[node.id] = node
        return nodes, gone

    def now(self) -> float:
        """The time by the cache's clock, which also dates nodes."""
        return self._state.clock()

    def pins(self) -> Counter[int]:
        """How many pins end at each node, by its id. O(pins)."""
        return self._state.pins.by_node()

    def sequences(self) -> Iterator[SequenceView]:
        """All open sequences, oldest first, including the blocks that their plans reserved. O(their own blocks)."""
        for each in self._state.open.values():
            blocks = each.own_blocks()
            if not self._state.pool.shared.keys().isdisjoint(blocks):
                blocks = array("i", [block for block in blocks if not self._is_locked(block)])
            yield SequenceView(each.id, each.node.id, each.length, each.cached_length, blocks)

    def _is_locked(self, block: int) -> bool:
        """Whether a locked node owns the block, so that the node's own record shows it."""
        entry = self._state.pool.shared.get(block)
        return entry is not None and entry.deepest_owner is not None and entry.deepest_owner.locks > 0
