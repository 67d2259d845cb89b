"""Map each block of the pool, or of host memory, to its owners, and keep the map up to date record by record.

A block is free, or it has owners: the nodes that name it, and the sequences that hold it privately. Its *tip* is the
owner to show: a sequence, else the deepest node. A record names its blocks as runs (first, count, first, count, ...) of
block ids, in logical order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.telemetry.records import NodeRecord, Residence, SequenceRecord

FREE, CACHED, ACTIVE, PRIVATE, PINNED = range(5)
"""The states of a block. Cached: in the tree and not held. Private: held by a sequence and not (yet) in the tree."""

NO_OWNER = 0
"""The slot that stands for no owner."""


Owner = int
"""The id of a node, or the negated id of a sequence."""


class Claim(NamedTuple):
    """The part of a record that decides which blocks it owns; other fields do not change the map."""

    blocks: Runs
    holds: bool
    depth: tuple[int, int]  # the owner of the greatest depth is the block's tip


class BlockMap:
    """Map `num_blocks` blocks of `block_size` tokens to their owners, of the records that have this residence."""

    def __init__(self, num_blocks: int, block_size: int, residence: Residence = "device") -> None:
        self.num_blocks, self.block_size, self.residence = num_blocks, block_size, residence
        self.tip = np.zeros(num_blocks, np.int32)  # block -> slot of its tip, NO_OWNER if it is free
        self.owners = np.zeros(num_blocks, np.int32)
        self.holding = np.zeros(num_blocks, np.int32)  # owners that hold the block: sequences and locked nodes
        self.pinned = np.zeros(num_blocks, np.bool_)
        self.slots: dict[Owner, int] = {}
        self._owner: list[Owner] = [0]  # slot -> owner; slot 0 has none
        self._free_slots: list[int] = []
        self._claims: dict[Owner, Claim] = {}
        self._private: set[int] = set()  # slots of sequences
        self._shared: dict[int, list[int]] = {}  # block -> slots of its owners, if it has two or more
        self.pin_ends: set[int] = set()  # nodes at which a pin ends

    # ---- updates

    def update(
        self,
        nodes: Mapping[int, NodeRecord],
        sequences: Mapping[int, SequenceRecord],
        touched_nodes: Iterable[int] | None = None,
        touched_sequences: Iterable[int] | None = None,
    ) -> None:
        """Update the map to these records; only touched ids may differ from the last call (None: any may).

        O(touched + blocks of records whose blocks or locks changed + blocks of pinned prefixes).
        """
        before = self._claims
        some_nodes = {*nodes, *filter(is_node, before)} if touched_nodes is None else touched_nodes
        gone = (-owner for owner in before if not is_node(owner))
        some_sequences = {*sequences, *gone} if touched_sequences is None else touched_sequences
        changed: dict[Owner, Claim | None] = {}
        for number in some_nodes:
            node = nodes.get(number)
            claim = None if node is None or node.residence != self.residence else _claim_of_node(node)
            _compare(changed, number, before.get(number), claim)
            self._note_pins(number, node)
        for number in some_sequences:
            sequence = sequences.get(number)
            _compare(changed, -number, before.get(-number), None if sequence is None else _claim_of_sequence(sequence))
        self._remove_owners([owner for owner in changed if owner in before])
        self._add_owners({owner: claim for owner, claim in changed.items() if claim is not None})
        self._mark_pinned(nodes)

    def _note_pins(self, number: int, node: NodeRecord | None) -> None:
        if node is not None and node.pins:
            self.pin_ends.add(number)
        else:
            self.pin_ends.discard(number)

    def _remove_owners(self, owners: list[Owner]) -> None:
        """Take all blocks and the slots from these owners."""
        if not owners:
            return
        claims = [self._claims[owner] for owner in owners]
        slots = [self.slots.pop(owner) for owner in owners]
        blocks, of = self._expand(claims, slots)
        held, _ = self._expand([claim for claim in claims if claim.holds], [0] * len(claims))
        alone = self.owners[blocks] == 1
        self.tip[blocks[alone]] = NO_OWNER
        np.subtract.at(self.owners, blocks, 1)
        np.subtract.at(self.holding, held, 1)
        for block, slot in zip(blocks[~alone].tolist(), of[~alone].tolist(), strict=True):
            self._remove_shared_owner(block, slot)
        for owner, slot in zip(owners, slots, strict=True):
            del self._claims[owner]
            self._owner[slot] = 0
            self._private.discard(slot)
        self._free_slots += slots

    def _remove_shared_owner(self, block: int, slot: int) -> None:
        others = self._shared.get(block, [])
        if slot in others:
            others.remove(slot)
        if len(others) < 2:
            self._shared.pop(block, None)
        self.tip[block] = self._deepest(others)

    def _add_owners(self, claims: dict[Owner, Claim]) -> None:
        """Give these owners their blocks and a slot each."""
        if not claims:
            return
        self._claims |= claims
        slots = [self._assign_slot(owner) for owner in claims]
        blocks, of = self._expand(list(claims.values()), slots)
        held, _ = self._expand([claim for claim in claims.values() if claim.holds], [0] * len(claims))
        np.add.at(self.owners, blocks, 1)
        np.add.at(self.holding, held, 1)
        alone = self.owners[blocks] == 1
        self.tip[blocks[alone]] = of[alone]
        for block, slot in zip(blocks[~alone].tolist(), of[~alone].tolist(), strict=True):
            self._add_shared_owner(block, slot)

    def _add_shared_owner(self, block: int, slot: int) -> None:
        others = self._shared.get(block)
        if others is None:
            tip = int(self.tip[block])
            others = self._shared[block] = [] if tip == NO_OWNER else [tip]
        others.append(slot)
        self.tip[block] = self._deepest(others)

    def _deepest(self, slots: list[int]) -> int:
        return max(slots, key=lambda slot: self._claims[self._owner[slot]].depth, default=NO_OWNER)

    def _assign_slot(self, owner: Owner) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owner[slot] = owner
        else:
            slot = len(self._owner)
            self._owner.append(owner)
        self.slots[owner] = slot
        if not is_node(owner):
            self._private.add(slot)
        return slot

    def _expand(self, claims: list[Claim], slots: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return all blocks of these claims and the slot of each, without ids outside of the pool."""
        runs = [claim.blocks for claim in claims]
        flat = np.fromiter(chain.from_iterable(runs), np.int64)
        first = flat[0::2].clip(0, self.num_blocks)
        count = (flat[0::2] + flat[1::2]).clip(first, self.num_blocks) - first
        blocks = np.arange(count.sum()) + np.repeat(first - (count.cumsum() - count), count)
        of_run = np.repeat(np.array(slots[: len(runs)], np.int64), [len(run) // 2 for run in runs])
        return blocks, np.repeat(of_run, count)

    def _mark_pinned(self, nodes: Mapping[int, NodeRecord]) -> None:
        """Mark the block tables of pinned prefixes: for each logical block, the block of the deepest node."""
        if not self.pin_ends and not self.pinned.any():
            return
        self.pinned[:] = False
        for number in self.pin_ends:
            below: NodeRecord | None = None
            node = nodes.get(number)
            while node is not None:
                shares = below is not None and below.start % self.block_size
                for first, count in runs(without_last(node.blocks) if shares else node.blocks):
                    self.pinned[max(first, 0) : max(first + count, 0)] = True
                below, node = (node if node.tokens else below), nodes.get(node.parent)

    # ---- queries

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return len(self._owner)

    def private(self) -> npt.NDArray[np.bool_]:
        """Return for every slot whether it belongs to a sequence. O(owners), in numpy."""
        private = np.zeros(self.capacity, np.bool_)
        private[list(self._private)] = True
        return private

    def states(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """Return the states of all blocks, or of those from `first` to before `end`. O(blocks)."""
        part = slice(first, end)
        owners, holding = self.owners[part], self.holding[part]
        states = np.full(len(owners), CACHED, np.uint8)
        states[holding > 0] = ACTIVE
        states[self.private()[self.tip[part]]] = PRIVATE
        states[self.pinned[part] & (owners > 0)] = PINNED
        states[owners == 0] = FREE
        return states

    def owner(self, block: int) -> Owner | None:
        """Return the tip of a block; None if it is free."""
        return self._owner[int(self.tip[block])] or None

    def all_owners(self, block: int) -> list[Owner]:
        """Return all owners of a block, the tip first."""
        slots = self._shared.get(block)
        if slots is None:
            owner = self.owner(block)
            return [] if owner is None else [owner]
        order = sorted(slots, key=lambda slot: self._claims[self._owner[slot]].depth, reverse=True)
        return [self._owner[slot] for slot in order]

    def blocks_of(self, owner: Owner) -> npt.NDArray[np.int64]:
        """Return the owner's blocks, in logical order."""
        claim = self._claims.get(owner)
        return np.empty(0, np.int64) if claim is None else self._expand([claim], [0])[0]


def is_node(owner: Owner) -> bool:
    """Return whether the owner is a node of the tree."""
    return owner > 0


def _compare(changed: dict[Owner, Claim | None], owner: Owner, old: Claim | None, new: Claim | None) -> None:
    if new != old:
        changed[owner] = new


def _claim_of_node(node: NodeRecord) -> Claim | None:
    if not node.blocks or len(node.blocks) % 2:
        return None
    return Claim(node.blocks, node.locks > 0, (node.start, node.id))


def _claim_of_sequence(sequence: SequenceRecord) -> Claim | None:
    if not sequence.blocks or len(sequence.blocks) % 2:
        return None
    return Claim(sequence.blocks, True, (1 << 62, sequence.id))


Runs = tuple[int, ...]


def runs(blocks: Runs) -> Iterable[tuple[int, int]]:
    """Yield the runs (first, count) of a record's blocks."""
    return zip(blocks[0::2], blocks[1::2], strict=False)


def count_blocks(blocks: Runs) -> int:
    """Return the number of blocks in these runs."""
    return sum(blocks[1::2])


def without_last(blocks: Runs) -> Runs:
    """Return the runs without their last block."""
    if not blocks:
        return ()
    return (*blocks[:-1], blocks[-1] - 1) if blocks[-1] > 1 else blocks[:-2]


def block_at(blocks: Runs, place: int) -> int | None:
    """Return the block at this place in logical order; None after the end."""
    for first, count in runs(blocks):
        if place < count:
            return first + place
        place -= count
    return None


def place_of(blocks: Runs, block: int) -> int | None:
    """Return the place of a block in logical order; None if it is not there."""
    before = 0
    for first, count in runs(blocks):
        if first <= block < first + count:
            return before + block - first
        before += count
    return None
