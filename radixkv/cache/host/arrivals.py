"""Text that arrives in host memory from elsewhere, such as a disk: blocks for its images, then its nodes."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple

from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes
from radixkv.cache.types import Node


class Arrivals:
    """The texts that arrive in one cache. An image is of a full block of its text."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def take_blocks(self, tokens: Tokens, namespace: Hashable, count: int) -> array[int]:
        """Take up to `count` host blocks for a text whose images will arrive, and evict other text for them.

        The caller owns the blocks until `arrive`. There are none for a text that branches off inside a run on the host,
        nor without a host tier. O(log leaves) for each evicted block.
        """
        state = self._state
        if state.host is None:
            return array("i")
        end = self._find(as_bytes(tokens), namespace)
        lent, lost = state.host.lend(end.node, 0 if end.inside else count, state.clock())
        state.counters.evicted_tokens += lost
        return lent

    def arrive(self, tokens: Tokens, namespace: Hashable, blocks: array[int], arrived: int) -> int:
        """Make the text resident whose last full blocks have their images in the first `arrived` of these host blocks.

        Returns how many of its tokens were in no tier. It is 0, and all blocks are free again, if others have published
        the text meanwhile, if the text before it was evicted, or if it branches off inside a run on the host.
        """
        state, raw = self._state, as_bytes(tokens)
        assert state.host is not None
        size, tree, end = state.pool.block_size, state.tree, self._find(raw, namespace)
        fits = not end.inside and len(raw) // WIDTH - arrived * size <= end.position < len(raw) // WIDTH
        state.host.blocks.lent.difference_update(blocks)
        state.host.blocks.give_back(blocks[arrived:] if fits else blocks)
        if not fits:
            return 0
        above = end.node
        if above is None:
            above = tree.add_root(tree.namespaces.find(namespace) or tree.add_namespace(namespace))
        if above.residence == "device":
            above = tree.ending_at(above, end.position)
        skipped = end.position // size - (len(raw) // WIDTH // size - arrived)
        state.host.blocks.give_back(blocks[:skipped])
        state.host.attach(above, raw[end.position * WIDTH :], blocks[skipped:arrived])
        return len(raw) // WIDTH - end.position

    def _find(self, raw: bytes, namespace: Hashable) -> _End:
        """Find the end of a text in both tiers."""
        tree, host = self._state.tree, self._state.host
        root = tree.find_root(tree.namespaces.find(namespace))
        if root is None or host is None:
            return _End(None, 0)
        node, at = tree.match(root, raw)
        if at == node.end * WIDTH and (path := host.follow(node, raw, at, pending=True)):
            last, count = path[-1]
            return _End(last, last.start + count, last.start + count < last.end)
        return _End(node, at // WIDTH)


class _End(NamedTuple):
    """The last node of a text in both tiers, its position there, and whether that is inside a run on the host."""

    node: Node | None
    position: int
    inside: bool = False
