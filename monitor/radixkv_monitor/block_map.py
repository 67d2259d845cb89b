"""Which block of the pool is whose: the owners of every block, kept up to date record by record.

Knows node and sequence records, and numpy. Knows no cache, no screen and no colour. A block is free, or it has owners:
nodes that name it, and sequences that alone hold it. Its *tip* is the owner to show: a sequence, else the deepest node.

The blocks of a record: runs (first, count, first, count, ...) of block ids, in logical order. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.telemetry.records import NodeRecord, SequenceRecord

FREE, CACHED, ACTIVE, PRIVATE, PINNED = range(5)
"""States of a block. Cached: in the tree, held by nobody. Private: of a sequence, not in the tree (yet)."""

NO_OWNER = 0
"""The slot of no owner."""


Owner = int
"""The id of a node, or a sequence's id with a minus before it."""


class Claim(NamedTuple):
    """What of a record decides who owns which block: all else may change without a change here."""

    blocks: Runs
    holds: bool
    depth: tuple[int, int]  # which of a block's owners is its tip: the greatest


class BlockMap:
    """The owners of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tip = np.zeros(num_blocks, np.int32)  # block -> slot of its tip, NOBODY if it is free
        self.owners = np.zeros(num_blocks, np.int32)
        self.holding = np.zeros(num_blocks, np.int32)  # owners that hold it: sequences, locked nodes
        self.pinned = np.zeros(num_blocks, np.bool_)
        self.slots: dict[Owner, int] = {}
        self._owner: list[Owner] = [0]  # slot -> owner; 0 is nobody
        self._free_slots: list[int] = []
        self._claims: dict[Owner, Claim] = {}
        self._private: set[int] = set()  # slots of sequences
        self._shared: dict[int, list[int]] = {}  # block -> slots of its owners, where there are two or more
        self.pin_ends: set[int] = set()  # nodes at which a pin ends

    # ---- telling it what changed

    def update(
        self,
        nodes: Mapping[int, NodeRecord],
        sequences: Mapping[int, SequenceRecord],
        touched_nodes: Iterable[int] | None = None,
        touched_sequences: Iterable[int] | None = None,
    ) -> None:
        """Be the map of these records; only touched ids may differ from last time (None: any may).

        O(touched + blocks of those whose blocks or locks changed + blocks of pinned prefixes).
        """
        before = self._claims
        some_nodes = {*nodes, *filter(is_node, before)} if touched_nodes is None else touched_nodes
        gone = (-owner for owner in before if not is_node(owner))
        some_sequences = {*sequences, *gone} if touched_sequences is None else touched_sequences
        changed: dict[Owner, Claim | None] = {}
        for number in some_nodes:
            node = nodes.get(number)
            _compare(changed, number, before.get(number), None if node is None else _claim_of_node(node))
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
        """These owners let go of all their blocks, and lose their slots."""
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
        """These owners take their blocks, and slots."""
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
        """All blocks of these claims, and the slot of each; what lies outside of the pool is left out."""
        runs = [claim.blocks for claim in claims]
        flat = np.fromiter(chain.from_iterable(runs), np.int64)
        first = flat[0::2].clip(0, self.num_blocks)
        count = (flat[0::2] + flat[1::2]).clip(first, self.num_blocks) - first
        blocks = np.arange(count.sum()) + np.repeat(first - (count.cumsum() - count), count)
        of_run = np.repeat(np.array(slots[: len(runs)], np.int64), [len(run) // 2 for run in runs])
        return blocks, np.repeat(of_run, count)

    def _mark_pinned(self, nodes: Mapping[int, NodeRecord]) -> None:
        """Pinned are the block tables of the paths to nodes with pins: of each logical block the deepest node's."""
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

    # ---- asking it

    @property
    def capacity(self) -> int:
        """Slots are below it."""
        return len(self._owner)

    def private(self) -> npt.NDArray[np.bool_]:
        """Of every slot, whether it is a sequence's. O(owners), in numpy."""
        private = np.zeros(self.capacity, np.bool_)
        private[list(self._private)] = True
        return private

    def states(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """The state of every block, or of part. O(blocks asked for)."""
        part = slice(first, end)
        owners, holding = self.owners[part], self.holding[part]
        states = np.full(len(owners), CACHED, np.uint8)
        states[holding > 0] = ACTIVE
        states[self.private()[self.tip[part]]] = PRIVATE
        states[self.pinned[part] & (owners > 0)] = PINNED
        states[owners == 0] = FREE
        return states

    def owner(self, block: int) -> Owner | None:
        """Whose block it is; None if it is free."""
        return self._owner[int(self.tip[block])] or None

    def all_owners(self, block: int) -> list[Owner]:
        """Everyone whose block it is, the tip first."""
        slots = self._shared.get(block)
        if slots is None:
            owner = self.owner(block)
            return [] if owner is None else [owner]
        order = sorted(slots, key=lambda slot: self._claims[self._owner[slot]].depth, reverse=True)
        return [self._owner[slot] for slot in order]

    def blocks_of(self, owner: Owner) -> npt.NDArray[np.int64]:
        """Its blocks, in logical order."""
        claim = self._claims.get(owner)
        return np.empty(0, np.int64) if claim is None else self._expand([claim], [0])[0]


def is_node(owner: Owner) -> bool:
    """Whether the owner is a node of the tree."""
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
    """The runs (first, count) of a record's blocks."""
    return zip(blocks[0::2], blocks[1::2], strict=False)


def count_blocks(blocks: Runs) -> int:
    """How many blocks these runs have."""
    return sum(blocks[1::2])


def without_last(blocks: Runs) -> Runs:
    """The runs but for their last block."""
    if not blocks:
        return ()
    return (*blocks[:-1], blocks[-1] - 1) if blocks[-1] > 1 else blocks[:-2]


def block_at(blocks: Runs, place: int) -> int | None:
    """The block that stands at this place in logical order; None behind the end."""
    for first, count in runs(blocks):
        if place < count:
            return first + place
        place -= count
    return None


def place_of(blocks: Runs, block: int) -> int | None:
    """The place of a block in logical order; None if it is not there."""
    before = 0
    for first, count in runs(blocks):
        if first <= block < first + count:
            return before + block - first
        before += count
    return None
