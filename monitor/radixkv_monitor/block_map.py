"""Map each block of the pool, or of host memory, to its owners, and keep the map up to date record by record.

A block is free, or it has owners: the nodes that name it, and the sequences that hold it privately. Its *tip* is the
owner to show: a sequence, else the deepest node. A record names its blocks as runs (first, count, first, count, ...) of
block ids, in logical order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt

from radixkv.telemetry.records import NodeRecord, Residence, SequenceRecord

FREE, CACHED, ACTIVE, PRIVATE, PINNED = range(5)
"""The states of a block. Cached: in the tree and not held. Private: held by a sequence and not (yet) in the tree."""

NO_OWNER = 0
"""The slot that stands for no owner."""


Owner = int
"""The id of a node, or the negated id of a sequence."""


Record = NodeRecord | SequenceRecord
SLICE = 4096
"""The records of one step of `BlockMap.updating`: a few milliseconds of work."""
BELOW_ALL = 1 << 62
"""The depth of sequences."""


class BlockMap:
    """Map `num_blocks` blocks of `block_size` tokens to their owners, of the records that have this residence."""

    def __init__(self, num_blocks: int, block_size: int, residence: Residence = "device") -> None:
        self.num_blocks, self.block_size, self.residence = num_blocks, block_size, residence
        self.tip = np.zeros(num_blocks, np.int32)  # block -> slot of its tip, NO_OWNER if it is free
        self.owners = np.zeros(num_blocks, np.int32)
        self.holding = np.zeros(num_blocks, np.int32)  # owners that hold the block: sequences and locked nodes
        self.pinned = np.zeros(num_blocks, np.bool_)
        self.slots: dict[Owner, int] = {}
        self._records: list[Record | None] = [None]  # slot -> the record of its owner; slot 0 has none
        self._free_slots: list[int] = []
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
        for _ in self.updating(nodes, sequences, touched_nodes, touched_sequences):
            pass

    def updating(
        self,
        nodes: Mapping[int, NodeRecord],
        sequences: Mapping[int, SequenceRecord],
        touched_nodes: Iterable[int] | None = None,
        touched_sequences: Iterable[int] | None = None,
    ) -> Iterator[float]:
        """Do the work of `update` in slices, and yield the completed share after each. The map is right at the end."""
        changed = self._changes(nodes, sequences, touched_nodes, touched_sequences)
        known = [owner for owner in changed if owner in self.slots]
        new = [record for record in changed.values() if record is not None]
        steps = len(known) + len(new)
        for first in range(0, len(known), SLICE):
            yield first / steps
            self._remove_owners(known[first : first + SLICE])
        for first in range(0, len(new), SLICE):
            yield (len(known) + first) / steps
            self._add_owners(new[first : first + SLICE])
        self._mark_pinned(nodes)

    def _changes(
        self,
        nodes: Mapping[int, NodeRecord],
        sequences: Mapping[int, SequenceRecord],
        touched_nodes: Iterable[int] | None,
        touched_sequences: Iterable[int] | None,
    ) -> dict[Owner, Record | None]:
        """Return the records whose claims differ from the known ones; None for owners that claim nothing any more."""
        before = self.slots
        some_nodes = {*nodes, *filter(is_node, before)} if touched_nodes is None else touched_nodes
        gone = (-owner for owner in before if not is_node(owner))
        some_sequences = {*sequences, *gone} if touched_sequences is None else touched_sequences
        changed: dict[Owner, Record | None] = {}
        for number in some_nodes:
            node = nodes.get(number)
            self._compare(changed, number, None if node is None or node.residence != self.residence else node)
            self._note_pins(number, node)
        for number in some_sequences:
            self._compare(changed, -number, sequences.get(number))
        return changed

    def _compare(self, changed: dict[Owner, Record | None], owner: Owner, new: Record | None) -> None:
        """Note a change of the blocks that the owner claims, or of whether it holds them."""
        slot = self.slots.get(owner, NO_OWNER)
        old = self._records[slot]
        if new is not None and (not new.blocks or len(new.blocks) % 2):
            new = None
        if new is None or old is None:
            if new is not old:
                changed[owner] = new
        elif (new.blocks, _holds(new), _depth(new)) != (old.blocks, _holds(old), _depth(old)):
            changed[owner] = new
        else:
            self._records[slot] = new  # the older record is needed no longer

    def _note_pins(self, number: int, node: NodeRecord | None) -> None:
        if node is not None and node.pins:
            self.pin_ends.add(number)
        else:
            self.pin_ends.discard(number)

    def _remove_owners(self, owners: list[Owner]) -> None:
        """Take all blocks and the slots from these owners."""
        slots = [self.slots.pop(owner) for owner in owners]
        records = [self._record(slot) for slot in slots]
        blocks, of = self._expand(records, slots)
        held, _ = self._expand([record for record in records if _holds(record)], [0] * len(records))
        alone = self.owners[blocks] == 1
        self.tip[blocks[alone]] = NO_OWNER
        np.subtract.at(self.owners, blocks, 1)
        np.subtract.at(self.holding, held, 1)
        for block, slot in zip(blocks[~alone].tolist(), of[~alone].tolist(), strict=True):
            self._remove_shared_owner(block, slot)
        for slot in slots:
            self._records[slot] = None
            self._private.discard(slot)
        self._free_slots += slots

    def _remove_shared_owner(self, block: int, slot: int) -> None:
        others = self._shared.get(block, [])
        if slot in others:
            others.remove(slot)
        if len(others) < 2:
            self._shared.pop(block, None)
        self.tip[block] = self._deepest(others)

    def _add_owners(self, records: list[Record]) -> None:
        """Give the owners of these records their blocks and a slot each."""
        slots = [self._assign_slot(record) for record in records]
        blocks, of = self._expand(records, slots)
        held, _ = self._expand([record for record in records if _holds(record)], [0] * len(records))
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
        return max(slots, key=self._depth_of, default=NO_OWNER)

    def _depth_of(self, slot: int) -> tuple[int, int]:
        return _depth(self._record(slot))

    def _record(self, slot: int) -> Record:
        record = self._records[slot]
        assert record is not None
        return record

    def _assign_slot(self, record: Record) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._records[slot] = record
        else:
            slot = len(self._records)
            self._records.append(record)
        self.slots[_owner_of(record)] = slot
        if isinstance(record, SequenceRecord):
            self._private.add(slot)
        return slot

    def _expand(self, records: list[Record], slots: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return all blocks of these records and the slot of each, without ids outside of the pool."""
        runs = [record.blocks for record in records]
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
        return len(self._records)

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
        tip = int(self.tip[block])
        return None if tip == NO_OWNER else _owner_of(self._record(tip))

    def all_owners(self, block: int) -> list[Owner]:
        """Return all owners of a block, the tip first."""
        slots = self._shared.get(block)
        if slots is None:
            owner = self.owner(block)
            return [] if owner is None else [owner]
        return [_owner_of(self._record(slot)) for slot in sorted(slots, key=self._depth_of, reverse=True)]

    def blocks_of(self, owner: Owner) -> npt.NDArray[np.int64]:
        """Return the owner's blocks, in logical order."""
        slot = self.slots.get(owner)
        return np.empty(0, np.int64) if slot is None else self._expand([self._record(slot)], [0])[0]


def is_node(owner: Owner) -> bool:
    """Return whether the owner is a node of the tree."""
    return owner > 0


def _owner_of(record: Record) -> Owner:
    return -record.id if isinstance(record, SequenceRecord) else record.id


def _holds(record: Record) -> bool:
    """Return whether the owner holds its blocks, so that they cannot be evicted."""
    return isinstance(record, SequenceRecord) or record.locks > 0


def _depth(record: Record) -> tuple[int, int]:
    """Order the owners of a block: the one of the greatest depth is its tip."""
    return (BELOW_ALL if isinstance(record, SequenceRecord) else record.start, record.id)


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
