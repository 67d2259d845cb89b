"""The blocks of the host tier: which are free, which a pending move writes, which a pending load reads.

A block of the host is the image of a whole logical block: where a run starts inside a block, its first image also holds
the tokens before it. Each image belongs to one node. A host block is free, reserved for a move that is not confirmed,
resident, lent for an image that will arrive, or deferred: its node is gone, but a pending load still reads it.

Moves are gathered until `drain`. They are pairs of blocks, so splitting, cutting or removing nodes does not affect the
others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np


class HostBlocks:
    """`num_blocks` blocks in host memory.

    >>> blocks = HostBlocks(4)
    >>> blocks.reserve([7, 5]).tolist(), blocks.drain(), len(blocks.free)
    ([0, 1], [(7, 0), (5, 1)], 2)
    """

    __slots__ = ("deferred", "free", "lent", "moves", "num_blocks", "reading")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = array("i", np.arange(num_blocks - 1, -1, -1, dtype=np.int32).tobytes())
        self.moves: dict[int, int] = {}  # host block -> the device block that is to be copied there
        self.reading: dict[int, int] = {}  # host block -> pending loads that read it
        self.lent: set[int] = set()  # for images that will arrive from elsewhere
        self.deferred: set[int] = set()  # without a node: freed when the last load that reads them ends

    def reserve(self, blocks: Iterable[int]) -> array[int]:
        """Take a free block, last freed first, for the image of each of these device blocks, and plan the moves."""
        blocks = [*blocks]
        taken = self._take(len(blocks))
        self.moves.update(zip(taken, blocks, strict=True))
        return taken

    def lend(self, count: int) -> array[int]:
        """Take free blocks for images that will arrive."""
        taken = self._take(count)
        self.lent.update(taken)
        return taken

    def _take(self, count: int) -> array[int]:
        kept = len(self.free) - count
        taken = self.free[kept:]
        del self.free[kept:]
        taken.reverse()
        return taken

    def give_back(self, blocks: array[int]) -> None:
        """Free blocks without a node, and cancel the moves to them. A block that is read is deferred."""
        for block in reversed(blocks):
            self.moves.pop(block, None)
            if block in self.reading:
                self.deferred.add(block)
            else:
                self.free.append(block)

    def drain(self) -> list[tuple[int, int]]:
        """Take the pending moves, (device block, host block)."""
        moves = [(device, host) for host, device in self.moves.items()]
        self.moves.clear()
        return moves

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
                self.give_back(array("i", [block]))

    def are_read(self, blocks: array[int]) -> bool:
        """Whether a pending load reads one of these blocks."""
        return bool(self.reading) and not self.reading.keys().isdisjoint(blocks)
