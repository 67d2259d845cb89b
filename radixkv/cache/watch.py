"""What somebody sees who mirrors a cache from outside: its nodes as they change, its open sequences, its pins.

Knows the insides of the cache, and reads them only; on the cache's thread, between two of its verbs. What it hands out
is the cache's own and good until the next verb: copy what is to stay. Knows nobody who looks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from radixkv.cache.block_pool import SharedBlock
from radixkv.cache.changes import ChangedNodes
from radixkv.cache.node import Node
from radixkv.cache.sequence import Sequence

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache


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
    return entry is not None and entry.tip is not None and entry.tip.locks > 0


def pinned(cache: PrefixCache) -> Counter[int]:
    """How many pins end at each node, by its id. O(pins)."""
    return Counter(node.id for node in cache._pins.nodes())


def walk(cache: PrefixCache) -> Iterator[tuple[Node, Hashable]]:
    """All nodes with their namespaces, roots included, each before its children. O(nodes)."""
    for namespace, root in cache._tree.roots.items():
        for node in cache._tree.walk(root):
            yield node, namespace
