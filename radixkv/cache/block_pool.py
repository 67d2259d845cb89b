"""The block pool: which blocks are free, which have several owners, how far each part-filled block is reserved.

Owners are sequences, plans and tree nodes. An owner is idle if it is an unlocked node. A block in use has one owner
unless `shared` has an entry for it, and it is full unless `fill` has one: both tables stay as small as the number of
blocks in which a prefix ends. A block is evictable if all its owners are idle.

Nodes share a block where they meet inside it. They lie on one path, and the entry names the deepest of them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from radixkv.cache.events import Events
from radixkv.cache.types import Node


@dataclass(slots=True)
class SharedBlock:
    """A block with two or more owners."""

    owners: int
    idle: int  # how many of the owners are unlocked nodes
    deepest_owner: Node | None  # among nodes; None if no node owns the block


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots; every operation is O(1) or O(blocks named).

    >>> pool = BlockPool(4, 16)
    >>> pool.take(2).tolist(), len(pool.free)
    ([0, 1], 2)
    """

    __slots__ = (
        "_ramp", "bases", "block_size", "evictable", "fill", "free", "num_blocks", "offsets", "shared",
    )  # fmt: skip

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

    def take(self, count: int) -> array[int]:
        """Take `count` >= 1 free blocks, last freed first; a contiguous run that was freed is contiguous again."""
        free = self.free
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        return taken

    def is_run(self, blocks: array[int]) -> bool:
        """Whether the blocks are contiguous and ascending: one comparison in C."""
        return not blocks or self._ramp[blocks[0] : blocks[0] + len(blocks)] == blocks

    def give_back(self, blocks: array[int]) -> None:
        """Free a run of blocks that had no other owner; only its last block can be part-filled."""
        if blocks:
            self.fill.pop(blocks[-1], None)
            blocks.reverse()
            self.free.extend(blocks)

    def give_back_idle(self, blocks: array[int]) -> None:
        """Free a run of one or more evictable blocks that had one owner."""
        self.evictable -= len(blocks)
        self.fill.pop(blocks[-1], None)
        blocks.reverse()
        self.free.extend(blocks)

    def share(self, block: int, *, idle: bool, sole_idle: bool, sole_node: Node | None = None) -> None:
        """Add an owner. For a block with one owner so far: whether that is idle, and the node if it is one."""
        entry = self.shared.get(block)
        if entry is None:
            entry = self.shared[block] = SharedBlock(1, int(sole_idle), sole_node)
        was = entry.idle == entry.owners
        entry.owners += 1
        entry.idle += idle
        self.evictable += (entry.idle == entry.owners) - was

    def release(self, block: int, *, idle: bool) -> Node | None:
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

    def shift(self, node: Node, idle: bool) -> None:
        """Count the blocks of a node that was locked (`idle` False) or unlocked (True)."""
        blocks = node.blocks
        changed = len(blocks)
        shared = self.shared
        if shared:
            for block in blocks if node.may_share_any_block or changed < 3 else (blocks[0], blocks[-1]):
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
        """Raise the fill mark of a block that is in use to `slots` (of 1..block_size)."""
        if slots == self.block_size:
            self.fill.pop(block, None)
        elif slots > self.fill.get(block, self.block_size):
            self.fill[block] = slots

    def unreserve(self, block: int, end: int, slots: int) -> None:
        """Lower the fill mark to `slots` if it is at `end`: the slots between have no reader any more."""
        if self.fill.get(block, self.block_size) == end:
            self.fill[block] = slots

    def shortage(self, count: int) -> str:
        """Explain why `count` blocks cannot be taken."""
        return (
            f"{count} blocks wanted, {len(self.free)} are free and {self.evictable} evictable of {self.num_blocks}: "
            "close or shorten sequences, release pins, or make the pool larger"
        )

    def is_evictable(self, block: int) -> bool:
        """Whether all owners of a block that a node with no lock owns are idle."""
        entry = self.shared.get(block)
        return entry is None or entry.idle == entry.owners


class SharedBlocks:
    """The blocks of one pool in which nodes of a tree, and sequences below them, meet."""

    def __init__(self, pool: BlockPool, events: Events) -> None:
        self.pool = pool
        self._events = events
        self.deduped_tail_blocks = 0  # how often the block table of a held node has changed

    def share(self, block: int, node: Node, *, idle: bool) -> None:
        """Record that `node` and the node above it share `block`; both are idle or both are locked."""
        self.pool.share(block, idle=idle, sole_idle=idle)
        entry = self.pool.shared[block]
        if entry.deepest_owner is None or entry.deepest_owner.end <= node.end:
            entry.deepest_owner = node

    def release(self, block: int, *, idle: bool = False) -> None:
        """Drop one owner. If only nodes are left and a child has a copy, use the copy and free the block."""
        deepest_owner = self.pool.release(block, idle=idle)
        if deepest_owner is not None:
            self.dedupe_tail_block(deepest_owner)

    def release_run(self, blocks: array[int]) -> None:
        """Drop a sequence's references to a run of its own blocks; only the last can be part-filled."""
        if self.pool.shared.keys().isdisjoint(blocks):
            self.pool.give_back(blocks)
        else:
            for block in reversed(blocks):
                self.release(block)

    def dedupe_tail_block(self, node: Node) -> None:
        """Point a node that ends inside a block to a child's copy of it, and free the block, if only copies remain.

        A locked node takes a locked child's copy only: otherwise an evictable block would become held in the middle of
        an eviction.
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
            each.may_share_any_block |= child.may_share_any_block  # a fork that owns the copy may hold neither node
            for call in self._events.marked:
                call(each)
            pool.share(copy, idle=not each.locks, sole_idle=not child.locks, sole_node=child)
            pool.release(block, idle=not each.locks)

    def transfer_ownership(self, node: Node, old: Node, new: Node) -> None:
        """Record `new` as the deepest owner of the blocks of `node` that have `old` on record."""
        if not self.pool.shared:
            return
        for block in boundary(node):
            entry = self.pool.shared.get(block)
            if entry is not None and entry.deepest_owner is old:
                entry.deepest_owner = new

    def drop_ownership(self, block: int, node: Node) -> None:
        """Record that `node` no longer owns `block`, its first: the deepest owner that is left is above it."""
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


def boundary(node: Node) -> array[int]:
    """Return the blocks that a node may share with others."""
    blocks = node.blocks
    return blocks if node.may_share_any_block or len(blocks) < 3 else blocks[:: len(blocks) - 1]


class BlockTable:
    """The blocks of one sequence in order. The sequence itself references the ones from `own` on.

    The lock on its deepest node alone protects the earlier ones. That node ends in block `own`, or before it.
    """

    __slots__ = ("_pool", "_shared", "blocks", "own")

    def __init__(self, shared: SharedBlocks, blocks: array[int], node: Node) -> None:
        """Take `blocks`, the table of the path of a held node, at whose end the sequence is."""
        self._shared, self._pool, self.blocks = shared, shared.pool, blocks
        self.own, part = divmod(node.end, shared.pool.block_size)
        if part:
            shared.pool.share(blocks[-1], idle=False, sole_idle=False, sole_node=node)

    def fork(self) -> BlockTable:
        """Return the table of another sequence with the same blocks. O(blocks)."""
        for block in self.blocks[self.own :]:
            self._pool.share(block, idle=False, sole_idle=False)
        twin = object.__new__(BlockTable)  # `copy` takes 4 us
        twin._shared, twin._pool, twin.blocks, twin.own = self._shared, self._pool, self.blocks[:], self.own
        return twin

    def reserve(self, node: Node, start: int, end: int) -> tuple[int, int]:
        """Reserve the slots of the tokens [start, end), unless they take more blocks.

        Returns how many more they take, for `grow`, and the block to copy first, or -1. The last block is copied unless
        its next slot is its fill mark, or its only other owners are nodes from `node`, the deepest one, upward.
        """
        pool, blocks = self._pool, self.blocks
        size = pool.block_size
        need, offset = -(-end // size) - len(blocks), start % size
        if offset:
            last = blocks[-1]
            entry = pool.shared.get(last) if offset != pool.fill.get(last, size) else None
            if entry and entry.owners != 1 + len(self._shared.owners_above(node, last, start // size)):
                return need + 1, last
        if not need:
            pool.reserve(blocks[-1], end % size or size)
        return need, -1

    def grow(self, start: int, end: int, need: int, source: int) -> None:
        """Take the `need` free blocks that `reserve` returned for these tokens, and reserve their slots."""
        pool, blocks, rest = self._pool, self.blocks, end % self._pool.block_size
        new = pool.take(need)
        if source >= 0:
            blocks[-1] = new.pop(0)
        elif start % pool.block_size:
            pool.reserve(blocks[-1], pool.block_size)
        blocks += new
        if rest:
            pool.fill[blocks[-1]] = rest

    def slots(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the flat slots of the tokens [start, end)."""
        pool, size = self._pool, self._pool.block_size
        if end - start == 1:
            return np.array((self.blocks[-1] * size + start % size,), np.int64)
        first, offset = divmod(start, size)
        blocks = self.blocks[first:]
        if pool.is_run(blocks):
            base = blocks[0] * size + offset if blocks else 0
            return np.arange(base, base + end - start)
        bases = pool.bases.take(np.frombuffer(blocks, np.int32))
        slots: npt.NDArray[np.int64] = np.add.outer(bases, pool.offsets).ravel()
        return slots[offset : offset + end - start]

    def hand_over(self, node: Node, blocks: array[int], end: int, *, owned: bool) -> None:
        """Make `node`, which ends at `end` now, the owner of `blocks`; with `owned` it has owned the first of them.

        The sequence keeps a reference to its part-filled last block only.
        """
        pool = self._pool
        self.own, part = divmod(end, pool.block_size)
        if owned:  # this block is full now: the node's reference is enough
            pool.release(blocks[0], idle=False)
        if part:
            pool.share(blocks[-1], idle=False, sole_idle=False)
            pool.shared[blocks[-1]].deepest_owner = node
        entry = pool.shared.get(blocks[0])
        if entry is not None:
            entry.deepest_owner = node

    def follow(self, theirs: array[int], end: int) -> None:
        """Use the full blocks of others, from our own ones up to token `end`, in place of ours."""
        full = end // self._pool.block_size
        mine = self.blocks[self.own : full]
        self.blocks[self.own : full] = theirs[: full - self.own]
        self._shared.release_run(mine)
        self.own = full

    def release(self, start: int) -> None:
        """Drop the blocks from `start` on, and the references to them, last block first."""
        own = self.blocks[start:]
        del self.blocks[start:]
        if own:
            self._shared.release_run(own)

    def cut(self, length: int, end: int, *, reserved: bool) -> None:
        """Drop the blocks of the tokens [length, end), whose slots are written next unless they stay `reserved`."""
        pool, slots = self._pool, length % self._pool.block_size
        self.release(-(-length // pool.block_size))
        if slots and not reserved:
            pool.unreserve(self.blocks[-1], min(end - length + slots, pool.block_size), slots)

    def return_to(self, node: Node, length: int) -> None:
        """Drop the blocks of later tokens, none of which it references any more: `node`, which ends here, is held."""
        self.own, part = divmod(length, self._pool.block_size)
        del self.blocks[self.own :]
        if part:
            self.blocks.append(node.blocks[-1])
            self._pool.share(node.blocks[-1], idle=False, sole_idle=False, sole_node=node)


def _pick_copy(node: Node, *, locked: bool) -> Node | None:
    """Return the child whose copy a node should take: the youngest, as it is likely to stay longest."""
    if locked and node.locks == node.direct_holders:  # no child is locked
        return None
    return next((child for child in reversed(node.children.values()) if child.locks or not locked), None)
