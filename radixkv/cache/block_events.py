"""The full blocks that a cache has: which ones were stored and removed since the last look, for a router of requests.

Blocks lie on the absolute grid of `block_size` tokens. A block is announced by the node that holds its last token, so a
split or a merge announces nothing. It is stored while the device or the host has it, so a move between the two
announces nothing either; a block that only a disk has is removed. Routers of several engines read such events: vLLM and
SGLang send them too, Dynamo and llm-d index them. Compressed prefixes and what follows them are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import NamedTuple

from radixkv.cache.events import Follower
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tokens import WIDTH, is_compressed
from radixkv.cache.types import Node

_ID_BYTES = 8


class StoredBlocks(NamedTuple):
    """Consecutive full blocks of one text: their ids, their tokens, and the id of the block before the first.

    Ids are signed 64-bit numbers; `parent` is None at the start of a text. `salt` separates equal tokens of different
    namespaces, None for the default namespace.
    """

    ids: array[int]
    tokens: array[int]
    parent: int | None
    salt: str | None


class BlockChanges(NamedTuple):
    """The changes between two looks: ids of removed blocks, and stored blocks; a block comes after its parent."""

    removed: list[int]
    stored: list[StoredBlocks]


class BlockEvents(Follower):
    """Follows one cache, and tells which full blocks were stored and removed. Memory: 8 bytes a block, 160 a node.

    An id is a chain hash of the salt and all tokens up to the end of the block, equal in all processes.
    """

    order = 5

    def __init__(self, cache: PrefixCache, salt: Callable[[Hashable], str | None]) -> None:
        """Follow a cache; the first look returns all its blocks. O(nodes).

        `salt` returns the text that separates the blocks of a namespace, None for none.
        """
        self._size, self._tree, self._events, self._salt = cache.block_size, cache.state.tree, cache.state.events, salt
        self._ids: dict[Node, array[int]] = {}  # of a node's first blocks; of all, unless the node is marked
        self._marked = {node for node in self._tree.residents() if node.parent is not None}
        self._left: dict[int, None] = {}  # ids that left a node since the last look, in order
        self._events.connect(self)

    def __len__(self) -> int:
        """How many nodes and blocks a look would examine. Any thread may ask."""
        return len(self._marked) + len(self._left)

    def disconnect(self) -> None:
        """Follow the cache no more."""
        self._events.disconnect(self)

    # ---- events

    def appended(self, node: Node) -> None:
        """Mark a new node."""
        self._marked.add(node)

    def arrived(self, node: Node) -> None:
        """Mark a new node."""
        self._marked.add(node)

    def grown(self, node: Node, tokens: int) -> None:
        """Mark a node that may have more blocks."""
        self._marked.add(node)

    def split(self, node: Node, upper: Node) -> None:
        """Give the first blocks to the upper half."""
        if node in self._marked:
            self._marked.add(upper)
        if ids := self._ids.get(node):
            count = self._count(upper.start, upper.end)
            self._ids[upper] = ids[:count]
            del ids[:count]

    def joined(self, node: Node, upper: Node) -> None:
        """Give the blocks of both to the node, which is marked if `upper` is: a marked node has marked children."""
        self._marked.discard(upper)
        self._ids[node] = self._ids.pop(upper, array("q")) + self._ids.get(node, array("q"))

    def cut(self, node: Node, tokens: int, blocks: int) -> None:
        """Note the blocks that left."""
        self._leave(node, self._count(node.start, node.end))

    def removed(self, node: Node, blocks: int) -> None:
        """Note the blocks that left."""
        self._marked.discard(node)
        self._left.update(dict.fromkeys(self._ids.pop(node, ())))

    def covered(self, host: Node, node: Node, end: int) -> None:
        """Note the first blocks of a host node; the device's node, which is marked, has them."""
        if ids := self._ids.get(host):
            count = self._count(host.start, end)
            self._left.update(dict.fromkeys(ids[:count]))
            del ids[:count]

    def moved(self, node: Node, host: Node, start: int, tokens: int, freed: int, images: int, gone: bool) -> None:
        """Give blocks to the host node, in front of its own."""
        ids = self._ids.pop(node, array("q"))
        kept = 0 if gone else self._count(node.start, start)
        if kept:
            self._ids[node] = ids[:kept]
        self._ids[host] = ids[kept:] + self._ids.get(host, array("q"))
        if node in self._marked:  # blocks without an id may come first: the next look numbers all again
            self._leave(host, 0)
            self._marked.add(host)
        if gone:
            self._marked.discard(node)

    def _leave(self, node: Node, kept: int) -> None:
        if ids := self._ids.get(node):
            self._left.update(dict.fromkeys(ids[kept:]))
            del ids[kept:]

    def _count(self, start: int, end: int) -> int:
        """The number of blocks whose last tokens are in [start, end)."""
        return end // self._size - start // self._size

    def check(self) -> None:
        """Check that unmarked nodes have the ids of all blocks that are announced, and other objects none. O(nodes)."""
        nodes = {node for node in self._tree.residents() if node.parent is not None}
        assert self._marked <= nodes and self._ids.keys() <= nodes
        announced = [node for node in nodes - self._marked if not self._is_compressed(node)]
        counts = {node: self._count(node.start, node.end) for node in announced}
        assert all(len(self._ids.get(node, ())) == count for node, count in counts.items())

    def _is_compressed(self, node: Node) -> bool:
        """Return whether a node follows a compressed prefix, which no other engine has."""
        return is_compressed(self._tree.path(node)[0].key)

    # ---- reading

    def take(self) -> BlockChanges:
        """Return the changes since the last look. O(changed blocks + depth of their nodes), on the cache's thread."""
        parents_first = sorted(self._marked, key=lambda each: each.start)
        stored = [run for node in parents_first if (run := self._number(node)).ids]
        self._marked.clear()
        removed = list(self._left)
        self._left.clear()
        return BlockChanges(removed, stored)

    def _number(self, node: Node) -> StoredBlocks:
        """Number the new blocks of a node; return those that were not there at the last look."""
        ids = self._ids.setdefault(node, array("q"))
        first, last = node.start // self._size + len(ids), node.end // self._size
        if first >= last or self._is_compressed(node):
            return StoredBlocks(array("q"), array("i"), None, None)
        tokens, parent, salt = self._context(node, first * self._size, ids)
        width, before, numbers = self._size * WIDTH, parent, array("q")
        for at in range(0, (last - first) * width, width):
            before = _chained(before, salt, tokens[at : at + width])
            numbers.append(before)
        ids += numbers
        known = sum(number in self._left for number in numbers)  # the first ones left another node, and were never away
        for number in numbers[:known]:
            del self._left[number]
        new = array("i", tokens[known * width : (last - first) * width])
        return StoredBlocks(numbers[known:], new, numbers[known - 1] if known else parent, salt)

    def _context(self, node: Node, start: int, ids: array[int]) -> tuple[bytes, int | None, str | None]:
        """Return the tokens from `start` to the end of a node, the id of the block before, and the salt. O(depth)."""
        parent = ids[-1] if ids else None
        pieces = [bytes(node.key[max(0, start - node.start) * WIDTH :])]
        up = node
        while (above := up.parent) is not None:
            up = above
            if up.end > start and up.parent is not None:
                pieces.append(bytes(up.key[max(0, start - up.start) * WIDTH :]))
            if parent is None and (known := self._ids.get(up)):
                parent = known[-1]
        assert up.namespace is not None
        return b"".join(reversed(pieces)), parent, self._salt(up.namespace.value)


def _chained(parent: int | None, salt: str | None, block: bytes) -> int:
    """Return the id of a block after another, or of the first block of a text."""
    if parent is not None:
        before = parent.to_bytes(_ID_BYTES, "little", signed=True)
    else:
        before = b"" if salt is None else _digest(salt.encode())
    return int.from_bytes(_digest(before + block), "little", signed=True)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_ID_BYTES).digest()
