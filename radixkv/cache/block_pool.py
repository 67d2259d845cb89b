"""The pool's books: which blocks are free, who shares a block, how far each part-filled block is reserved.

Knows block numbers. Knows no token, no tree and no tensor; an owner is only "held" (a sequence, a plan, a locked node)
or "idle" (an unlocked node).

A block in use has one owner unless `shared` says otherwise, and it is full unless `fill` says otherwise: both
tables stay as small as the number of blocks in which some prefix ends.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np


class SharedBlock:
    """A block with two or more owners."""

    __slots__ = ("idle", "owners", "tip")

    def __init__(self, owners: int, idle: int, tip: Any) -> None:
        self.owners = owners
        self.idle = idle  # how many of the owners are unlocked nodes
        self.tip = tip  # the deepest owner that is a node (nodes that share a block lie on one path), or None


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

    def share(self, block: int, *, idle: bool, sole_idle: bool, tip: Any) -> None:
        """Add an owner; `sole_idle` tells whether the only owner so far (if there is just one) is idle."""
        entry = self.shared.get(block)
        if entry is None:
            entry = self.shared[block] = SharedBlock(1, int(sole_idle), tip)
        was = entry.idle == entry.owners
        entry.owners += 1
        entry.idle += idle
        if tip is not None:
            entry.tip = tip
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
        return entry.tip

    def shift(self, blocks: array[int], mixed: bool, idle: bool) -> None:
        """A node that owns `blocks` was locked (`idle` False) or unlocked (True).

        Only its first and last block can be shared, unless it is `mixed`.
        """
        changed = len(blocks)
        shared = self.shared
        if shared:
            for block in blocks if mixed or changed < 3 else (blocks[0], blocks[-1]):
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
