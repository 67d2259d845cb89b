"""The host tier: blocks in host memory, the runs of tokens that are resident in them, and their order of eviction.

A block of the host is the image of a whole logical block: where a run starts inside a block, its first image also holds
the tokens before it. Each image belongs to one node. A host block is free, reserved for a move that is not confirmed,
resident, or deferred: its node is gone, but a pending load still reads it.

Moves are gathered until `drain`. They are pairs of blocks, so splitting, cutting or removing nodes does not affect the
others. Exclusive tiers: Wong and Wilkes, "My cache or yours?" (2002).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.ghosts import Pressure
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import Node, Residence


@dataclass(slots=True, eq=False, repr=False)
class HostNode(Node):
    """A run of tokens that is resident on the host. `blocks` are host blocks, and all its children are host nodes."""

    residence: ClassVar[Residence] = "host"

    def __lt__(self, other: HostNode) -> bool:
        """Order leaves of equal recency, such as parts of a run that were offloaded at different times."""
        return self.id < other.id


class HostTier:
    """`num_blocks` blocks in host memory, and the nodes that are resident in them.

    `below` maps a device node, or a root, to the host nodes that follow its end, by first token.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = array("i", np.arange(num_blocks - 1, -1, -1, dtype=np.int32).tobytes())
        self.below: dict[Node, dict[bytes, HostNode]] = {}
        self.index = EvictionIndex()  # resident leaves: by priority, then by recency
        self.moves: dict[int, int] = {}  # host block -> the device block that is to be copied there
        self.planned: dict[HostNode, Pressure] = {}  # nodes with moves that were not drained, and the cause
        self.drained: dict[HostNode, Pressure] = {}  # nodes with moves that were drained and are not confirmed
        self.reading: dict[int, int] = {}  # host block -> pending loads that read it
        self.deferred: set[int] = (
            set()
        )  # blocks without a node, which are freed when the last load that reads them ends
        self.count = 0  # nodes
        self.offloaded_blocks = 0
        self.loaded_tokens = 0
        self.evicted_blocks = 0
        self._draining = 0  # moves of the drained batch

    # ---- reading

    def nodes(self, top: Node | None = None) -> Iterator[HostNode]:
        """Yield all nodes, or those below a node or root of the device; a node comes before its children."""
        tops = self.below.values() if top is None else [self.below.get(top, {})]
        stack = [node for children in tops for node in children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(cast("Iterable[HostNode]", node.children.values()))

    def is_resident(self, node: HostNode) -> bool:
        """Whether the moves of a node are confirmed: only then its tokens can be loaded."""
        return node not in self.planned and node not in self.drained

    def follow(self, node: Node, raw: bytes, at: int = 0, *, pending: bool = False) -> list[tuple[HostNode, int]]:
        """Return the nodes along `raw[at:]` after the end of a device node, each with the tokens of it that match.

        It ends before a node whose moves are not confirmed, unless `pending` asks for these too. O(bytes) + O(nodes).
        """
        found: list[tuple[HostNode, int]] = []
        children = self.below.get(node)
        while children:
            child = children.get(raw[at : at + WIDTH])
            if child is None or not (pending or self.is_resident(child)):
                break
            matched = common_prefix(raw, at, child.key)
            found.append((child, matched // WIDTH))
            at += matched
            if matched < len(child.key):
                break
            children = cast("dict[bytes, HostNode]", child.children)
        return found

    def victim(self, node: Node) -> HostNode | None:
        """Return the leaf to evict next, so that `node` can be offloaded; None if no leaf is colder than `node`.

        A leaf that is being read is passed over. O(log leaves).
        """
        for number in range(len(self.index)):
            leaf = self.index.at(number)
            if not self.reading or self.reading.keys().isdisjoint(leaf.blocks):
                colder = (leaf.priority, not leaf.demoted, leaf.tick) <= (node.priority, not node.demoted, node.tick)
                return cast(HostNode, leaf) if colder else None
        return None

    # ---- blocks

    def take(self, count: int) -> array[int]:
        """Take `count` free blocks, last freed first."""
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        taken.reverse()
        return taken

    def give_back(self, blocks: array[int]) -> None:
        """Free blocks that have no node any more, and cancel the moves to them. A block that is read is deferred."""
        for block in reversed(blocks):
            self.moves.pop(block, None)
            if block in self.reading:
                self.deferred.add(block)
            else:
                self.free.append(block)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a load that reads these blocks: until its `release` they are not used for other tokens."""
        for block in blocks:
            self.reading[block] = self.reading.get(block, 0) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """End a load."""
        for block in blocks:
            left = self.reading[block] - 1
            if left:
                self.reading[block] = left
                continue
            del self.reading[block]
            if block in self.deferred:
                self.deferred.remove(block)
                self.free.append(block)

    # ---- leaves

    def add_leaf(self, node: Node) -> None:
        """Make a node evictable if it is a leaf and resident."""
        if not node.children and node.eviction_key is None and self.is_resident(cast(HostNode, node)):
            self.index.add(node)

    def remove_leaf(self, node: Node) -> None:
        """Take a node out of the order of eviction, if it is there."""
        if node.eviction_key is not None:
            self.index.remove(node)

    # ---- moves

    def drain(self) -> list[tuple[int, int]]:
        """Take the pending moves, (device block, host block). The batch before must be confirmed, or its nodes gone."""
        assert not self.drained, "a batch of moves is neither confirmed nor dropped"
        moves = [(device, host) for host, device in self.moves.items()]
        self.moves.clear()
        self.drained, self.planned = self.planned, {}
        self._draining = len(moves)
        if not moves:
            self.confirm()
        return moves

    def note_cancelled(self, node: HostNode) -> None:
        """Make a node that has lost blocks resident if no move to it is left. O(its blocks)."""
        if node in self.planned and self.moves.keys().isdisjoint(node.blocks):
            del self.planned[node]
            self.add_leaf(node)

    def confirm(self) -> None:
        """Make the nodes of the drained batch matchable."""
        nodes, self.drained = self.drained, {}
        self.offloaded_blocks += self._draining
        self._draining = 0
        for node in nodes:
            self.add_leaf(node)
