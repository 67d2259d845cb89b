"""The pool's books: which blocks are free, who shares a block, how far each part-filled block is reserved.

Knows block numbers. Knows no token, no tree and no tensor; an owner is only "held" (a sequence, a plan, a locked node)
or "idle" (an unlocked node).

A block in use has one owner unless `shared` says otherwise, and it is full unless `fill` says otherwise: both
tables stay as small as the number of blocks in which some prefix ends.

Blocks that nodes share because they meet inside them: their owners, and the copies that make one redundant.

Knows nodes and the pool's books. Knows no token and no namespace. Nodes that share a block lie on one path; its entry
in the pool's books names the deepest, the tip.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

import numpy as np

from radixkv.cache.change_tracker import ChangedNodes
from radixkv.cache.types import Node


class SharedBlock:
    """A block with two or more owners."""

    __slots__ = ("deepest_owner", "idle", "owners")

    def __init__(self, owners: int, idle: int, deepest_owner: Any) -> None:
        self.owners = owners
        self.idle = idle  # how many of the owners are unlocked nodes
        self.deepest_owner = (
            deepest_owner  # the deepest owner that is a node (nodes that share a block lie on one path), or None
        )


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots; every operation is O(1) or O(blocks named).

    >>> pool = BlockPool(4, 16)
    >>> pool.take(2).tolist(), pool.free_blocks
    ([0, 1], 2)
    """

    __slots__ = ("_ramp", "bases", "block_size", "evictable", "fill", "free", "num_blocks", "offsets", "shared")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = array("i", np.arange(num_blocks - 1, -1, -1, dtype=np.int32).tobytes())
        self.shared: dict[int, SharedBlock] = {}
        self.fill: dict[int, int] = {}  # block -> slots ever reserved, for blocks that are not full
        self.bases = np.arange(0, num_blocks * block_size, block_size, dtype=np.int64)  # each block's first slot
        self.offsets = np.arange(block_size, dtype=np.int64)
        self._ramp = array("i", np.arange(num_blocks, dtype=np.int32).tobytes())
        self.evictable = 0  # blocks whose owners are all idle

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return len(self.free)

    def take(self, count: int) -> array[int]:
        """Take `count` >= 1 free blocks, last freed first; what came back contiguous is contiguous again."""
        free = self.free
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        return taken

    def is_run(self, blocks: array[int]) -> bool:
        """Whether the blocks are contiguous and ascending: one comparison in C."""
        return not blocks or self._ramp[blocks[0] : blocks[0] + len(blocks)] == blocks

    def give_back(self, blocks: array[int]) -> None:
        """Free a run of blocks that had no other owner; of a run only the last block can be part-filled."""
        if blocks:
            self.fill.pop(blocks[-1], None)
            blocks.reverse()
            self.free.extend(blocks)

    def share(self, block: int, *, idle: bool, sole_idle: bool, deepest_owner: Any) -> None:
        """Add an owner; `sole_idle` tells whether the only owner so far (if there is just one) is idle."""
        entry = self.shared.get(block)
        if entry is None:
            entry = self.shared[block] = SharedBlock(1, int(sole_idle), deepest_owner)
        was = entry.idle == entry.owners
        entry.owners += 1
        entry.idle += idle
        if deepest_owner is not None:
            entry.deepest_owner = deepest_owner
        self.evictable += (entry.idle == entry.owners) - was

    def release(self, block: int, *, idle: bool) -> Any:
        """Drop one owner; the last one frees the block. Returns the deepest node that still owns it, or None."""
        entry = self.shared.get(block)
        if entry is None:
            self.evictable -= idle
            self.fill.pop(block, None)
            self.free.append(block)
            return None
        was = entry.idle == entry.owners
        entry.owners -= 1
        entry.idle -= idle
        self.evictable += (entry.idle == entry.owners) - was
        if entry.owners == 1:
            del self.shared[block]
        return entry.deepest_owner

    def shift(self, blocks: array[int], may_share_any_block: bool, idle: bool) -> None:
        """A node that owns `blocks` was locked (`idle` False) or unlocked (True).

        Only its first and last block can be shared, unless it is `may_share_any_block`.
        """
        changed = len(blocks)
        shared = self.shared
        if shared:
            for block in blocks if may_share_any_block or changed < 3 else (blocks[0], blocks[-1]):
                entry = shared.get(block)
                if entry is not None:
                    if idle:
                        entry.idle += 1
                        changed -= entry.idle != entry.owners
                    else:
                        changed -= entry.idle != entry.owners
                        entry.idle -= 1
        self.evictable += changed if idle else -changed

    def reserve(self, block: int, slots: int) -> None:
        """Raise the fill mark of a block that is in use to `slots` (of 1..block_size); a mark is never lowered."""
        if slots == self.block_size:
            self.fill.pop(block, None)
        elif slots > self.fill.get(block, self.block_size):
            self.fill[block] = slots


class SharedBlocks:
    """What a tree's nodes, and the sequences below them, do with the blocks of one pool that they may share."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.changed: ChangedNodes | None = None
        self.deduped_tail_blocks = 0  # how often a block table changed without its sequence

    def share(self, block: int, node: Node, *, idle: bool) -> None:
        """A node above `node`, as locked as that is, becomes an owner of its first block, too."""
        self.pool.share(block, idle=idle, sole_idle=idle, deepest_owner=None)
        entry = self.pool.shared[block]
        if entry.deepest_owner is None or entry.deepest_owner.end <= node.end:
            entry.deepest_owner = node

    def release(self, block: int, *, idle: bool = False) -> None:
        """An owner lets go of a block; what only copies of it need is then freed too."""
        deepest_owner = self.pool.release(block, idle=idle)
        if deepest_owner is not None:
            self.dedupe_tail_block(deepest_owner)

    def release_run(self, blocks: array[int]) -> None:
        """A sequence lets go of a run of its own blocks, of which only the last can be part-filled."""
        if self.pool.shared.keys().isdisjoint(blocks):
            self.pool.give_back(blocks)
        else:
            for block in reversed(blocks):
                self.release(block)

    def dedupe_tail_block(self, node: Node) -> None:
        """Free the last block of a node that ends inside it, if only copies live on below: point it to one of those.

        A locked node takes a locked child's copy only, or a block that counts as evictable would stop being so
        in mid-eviction.
        """
        pool = self.pool
        if not node.blocks or node.end % pool.block_size == 0:
            return
        block = node.blocks[-1]
        entry = pool.shared.get(block)
        if entry is not None and entry.deepest_owner is not None:
            node = entry.deepest_owner
        if not node.children or node.blocks[-1] != block or node.end % pool.block_size == 0:
            return
        chain = self.owners_above(node, block, node.end // pool.block_size)
        if (1 if entry is None else entry.owners) != len(chain):
            return
        child = _pick_copy(node, locked=chain[-1].locks > 0)
        if child is None:
            return
        copy = child.blocks[0]
        self.deduped_tail_blocks += 1
        for each in chain:
            each.blocks[-1] = copy
            each.may_share_any_block |= child.may_share_any_block  # a fork may own the copy, too, and hold none of them
            if self.changed is not None:
                self.changed.mark(each)
            pool.share(
                copy,
                idle=not each.locks,
                sole_idle=not child.locks,
                deepest_owner=None if copy in pool.shared else child,
            )
            pool.release(block, idle=not each.locks)

    def transfer_ownership(self, blocks: array[int], old: Node, new: Node) -> None:
        """`new` owns these blocks in the place of `old`."""
        for block in blocks:
            entry = self.pool.shared.get(block)
            if entry is not None and entry.deepest_owner is old:
                entry.deepest_owner = new

    def drop_ownership(self, block: int, node: Node) -> None:
        """`node` owns `block`, its first, no more: the deepest owner left is above it."""
        entry = self.pool.shared.get(block)
        if entry is not None and entry.deepest_owner is node:
            above = self.owners_above(cast(Node, node.parent), block, node.start // self.pool.block_size)
            entry.deepest_owner = above[0] if above else None

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


def _pick_copy(node: Node, *, locked: bool) -> Node | None:
    """A child whose copy the node may point to: the youngest, as it is likely to stay longest."""
    if locked and node.locks == node.direct_holders:  # no child is locked
        return None
    return next((child for child in reversed(node.children.values()) if child.locks or not locked), None)
