"""Blocks that nodes share because they meet inside them: their owners, and the copies that make one redundant.

Knows nodes and the pool's books. Knows no token and no namespace. Nodes that share a block lie on one path; its entry
in the pool's books names the deepest, the tip.
"""

from __future__ import annotations

from array import array
from typing import cast

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import ChangedNodes
from radixkv.cache.node import Node


class SharedBlocks:
    """What a tree's nodes, and the sequences below them, do with the blocks of one pool that they may share."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.changed: ChangedNodes | None = None
        self.repointed = 0  # how often a block table changed without its sequence

    def share(self, block: int, node: Node, *, idle: bool) -> None:
        """A node above `node`, as locked as that is, becomes an owner of its first block, too."""
        self.pool.share(block, idle=idle, sole_idle=idle, tip=None)
        entry = self.pool.shared[block]
        if entry.tip is None or entry.tip.end <= node.end:
            entry.tip = node

    def release(self, block: int, *, idle: bool = False) -> None:
        """An owner lets go of a block; what only copies of it need is then freed too."""
        tip = self.pool.release(block, idle=idle)
        if tip is not None:
            self.repoint(tip)

    def release_run(self, blocks: array[int]) -> None:
        """A sequence lets go of a run of its own blocks, of which only the last can be part-filled."""
        if self.pool.shared.keys().isdisjoint(blocks):
            self.pool.give_back(blocks)
        else:
            for block in reversed(blocks):
                self.release(block)

    def repoint(self, node: Node) -> None:
        """Free the last block of a node that ends inside it, if only copies live on below: point it to one of those.

        A locked node takes a locked child's copy only, or a block that counts as evictable would stop being so
        in mid-eviction.
        """
        pool = self.pool
        if not node.blocks or node.end % pool.block_size == 0:
            return
        block = node.blocks[-1]
        entry = pool.shared.get(block)
        if entry is not None and entry.tip is not None:
            node = entry.tip
        if not node.children or node.blocks[-1] != block or node.end % pool.block_size == 0:
            return
        chain = self.owners_above(node, block, node.end // pool.block_size)
        if (1 if entry is None else entry.owners) != len(chain):
            return
        child = _heir(node, locked=chain[-1].locks > 0)
        if child is None:
            return
        copy = child.blocks[0]
        self.repointed += 1
        for each in chain:
            each.blocks[-1] = copy
            each.mixed |= child.mixed  # a fork may own the copy, too, and hold none of them
            if self.changed is not None:
                self.changed.mark(each)
            pool.share(copy, idle=not each.locks, sole_idle=not child.locks, tip=None if copy in pool.shared else child)
            pool.release(block, idle=not each.locks)

    def retip(self, blocks: array[int], old: Node, new: Node) -> None:
        """`new` owns these blocks in the place of `old`."""
        for block in blocks:
            entry = self.pool.shared.get(block)
            if entry is not None and entry.tip is old:
                entry.tip = new

    def lower_tip(self, block: int, node: Node) -> None:
        """`node` owns `block`, its first, no more: the deepest owner left is above it."""
        entry = self.pool.shared.get(block)
        if entry is not None and entry.tip is node:
            above = self.owners_above(cast(Node, node.parent), block, node.start // self.pool.block_size)
            entry.tip = above[0] if above else None

    def owners_above(self, node: Node, block: int, logical: int) -> list[Node]:
        """The nodes from `node` upward that own `block`, deepest first; `node` ends in or before that logical block."""
        floor = logical * self.pool.block_size
        owners = []
        up: Node | None = node
        while up is not None and up.end > floor:
            if up.blocks[-1] == block:
                owners.append(up)
            up = up.parent
        return owners


def _heir(node: Node, *, locked: bool) -> Node | None:
    """A child whose copy the node may point to: the youngest, as it is likely to stay longest."""
    if locked and node.locks == node.holders:  # no child is locked
        return None
    return next((child for child in reversed(node.children.values()) if child.locks or not locked), None)
