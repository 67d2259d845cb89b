"""Which nodes are not what they were when somebody last looked, each named once however often it changed.

Knows nodes and whether they were shown before. Knows no rule of the tree, and not what changed: whoever takes a node
reads it as it is then.

What somebody sees who mirrors a cache from outside: its nodes as they change, its open sequences, its pins.

Knows the insides of the cache, and reads them only; on the cache's thread, between two of its verbs. What it hands out
is the cache's own and good until the next verb: copy what is to stay. Knows nobody who looks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from radixkv.cache.types import Node

if TYPE_CHECKING:
    from radixkv.cache.block_pool import SharedBlock
    from radixkv.cache.prefix_cache import PrefixCache
    from radixkv.cache.sequence import Sequence


class ChangedNodes:
    """Marks of one tree's nodes; a mark is one call of a C function.

    It stays as small as the tree was and is, even if nobody ever takes it: of a node that came and went between two
    looks nothing is kept.
    """

    __slots__ = ("_changed", "_gone", "mark")

    def __init__(self, nodes: Iterable[Node]) -> None:
        """Begin with `nodes`, all there are, none of them shown."""
        self._changed = set(nodes)
        self._gone: list[int] = []
        self.mark: Callable[[Node], None] = self._changed.add
        for node in self._changed:
            node.shown = False

    def __len__(self) -> int:
        """How many nodes there are to look at, or to forget."""
        return len(self._changed) + len(self._gone)

    def gone(self, node: Node) -> None:
        """The node is not in the tree any more."""
        self._changed.discard(node)
        if node.shown:
            self._gone.append(node.id)

    def take(self) -> tuple[list[Node], list[int]]:
        """The nodes that are new or changed, and the ids of those shown before that are gone; and start anew.

        Both by id. O(n log n) in what changed.
        """
        nodes, gone = sorted(self._changed, key=_id), sorted(self._gone)
        self._changed.clear()
        self._gone.clear()
        for node in nodes:
            node.shown = True
        return nodes, gone


def _id(node: Node) -> int:
    return node.id


class OpenSequence(NamedTuple):
    """A sequence as it is now. `blocks` are those of its own that no locked node is known to hold, too."""

    id: int
    node: int
    length: int
    cached: int
    blocks: array[int]


class Watch:
    """One cache, from now on: the first look shows everything."""

    def __init__(self, cache: PrefixCache) -> None:
        """Have the cache mark what changes. O(nodes); whoever watched it before sees nothing more."""
        self._cache = cache
        tree = cache._tree
        now = cache.clock()
        for node in tree.walk():  # when they were used was not noted so far
            if tree.changed is None:
                node.used_at = node.born_at = now
        self._changed = tree.changed = tree.shared.changed = ChangedNodes(tree.walk())
        cache._index.clock = cache.clock

    def __len__(self) -> int:
        """How many nodes changed or went since the last look. Any thread may ask."""
        return len(self._changed)

    def look(self) -> tuple[list[Node], list[int]]:
        """Nodes that are new or changed since the last look, and the ids of those that are gone: O(what changed)."""
        return self._changed.take()

    def now(self) -> float:
        """The time by the cache's clock, which also dates nodes."""
        return self._cache.clock()

    def pins(self) -> Counter[int]:
        """How many pins end at each node, by its id. O(pins)."""
        return pinned(self._cache)

    def sequences(self) -> Iterator[OpenSequence]:
        """All open sequences, oldest first; what their plans reserved and copy from included. O(their own blocks)."""
        shared = self._cache._pool.shared
        for each in self._cache._open.values():
            blocks = _own_blocks(each)
            if not shared.keys().isdisjoint(blocks):
                blocks = array("i", [block for block in blocks if not _is_locked(shared.get(block))])
            yield OpenSequence(each.id, each._node.id, each.length, each.cached_length, blocks)


def _own_blocks(sequence: Sequence) -> array[int]:
    blocks = sequence._table[sequence._own :]
    if sequence._planned is not None and sequence._source >= 0:
        blocks.append(sequence._source)
    return blocks


def _is_locked(entry: SharedBlock | None) -> bool:
    """Whether a locked node has the block, so that it is told with that."""
    return entry is not None and entry.deepest_owner is not None and entry.deepest_owner.locks > 0


def pinned(cache: PrefixCache) -> Counter[int]:
    """How many pins end at each node, by its id. O(pins)."""
    return Counter(node.id for node in cache._pins.nodes())


def walk(cache: PrefixCache) -> Iterator[tuple[Node, Hashable]]:
    """All nodes with their namespaces, roots included, each before its children. O(nodes)."""
    for namespace, root in cache._tree.roots.items():
        for node in cache._tree.walk(root):
            yield node, namespace
