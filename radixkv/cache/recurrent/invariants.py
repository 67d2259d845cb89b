"""check() of rows, slots and snapshots. It reads private attributes on purpose; tests call it after every step."""

from __future__ import annotations

from radixkv.cache.partition import check_partition
from radixkv.cache.recurrent.row import RowState
from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.recurrent.snapshots import Snapshots
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.sizing.recurrent_state import EMPTY


def check(state: CacheState, snapshots: Snapshots, sequences: list[Sequence]) -> None:
    """Recount rows, slots, snapshots and their order of eviction, and compare. O(nodes + snapshots + sequences)."""
    for sequence in sequences:
        assert (sequence.row_state is None) == (sequence.purpose == "audit"), f"{sequence!r}: has it a row?"
    held = [sequence.row_state for sequence in sequences if sequence.row_state is not None]
    _check_rows(snapshots.slots, held)
    _check_slots(snapshots, held)
    _check_places(state, snapshots)
    _check_order(snapshots)


def _check_rows(slots: StateSlots, states: list[RowState]) -> None:
    held = [each.row for each in states]
    assert {id(row) for row in held} == {id(row) for row in slots.rows()}, "rows in use that no sequence holds"
    assert len({row.number for row in held}) == len(held), "two sequences have the same row"
    assert len(held) == slots.rows_in_use <= slots.num_rows, f"{slots.rows_in_use} rows in use, recounted {len(held)}"
    for number, row in enumerate(slots._rows):
        assert row is None or row.number == number, f"row {number} has another number"
    gaps = [number for number, row in enumerate(slots._rows) if row is None]
    assert sorted(slots._gaps) == gaps, f"gaps {sorted(slots._gaps)}, recounted {gaps}"
    used = range(slots.host_start + slots.num_host)
    for source, target in slots.queued():
        assert source in used or source == EMPTY, f"a copy from slot {source}"
        assert target in used, f"a copy to slot {target}"


def _check_slots(snapshots: Snapshots, states: list[RowState]) -> None:
    slots = snapshots.slots
    owned = [*slots.free, *slots.host_free, *(each.slot for each in snapshots)]
    for each in states:
        assert all(slot < slots.host_start for slot in each.reserved_slots), "a forward writes a slot in host memory"
        owned += each.reserved_slots
    assert all(slot < slots.host_start for slot in slots.free), "a slot in host memory is free on the device"
    check_partition("slots", owned, range(slots.num_rows, slots.host_start + slots.num_host))


def _check_places(state: CacheState, snapshots: Snapshots) -> None:
    nodes = set(state.tree.residents())
    for node, found in snapshots.by_node.items():
        assert node in nodes, f"node {node.id} left the tree, its snapshots did not"
        assert found, f"node {node.id} has an empty list of snapshots"
        positions = [each.position for each in found]
        assert positions == sorted(set(positions)), f"node {node.id}: snapshots at {positions}"
        assert node.start < positions[0] and positions[-1] <= node.end, f"node {node.id}: snapshots at {positions}"
        assert all(each.node is node for each in found), f"node {node.id}: a snapshot of another node"


def _check_order(snapshots: Snapshots) -> None:
    placed = [each for found in snapshots.by_node.values() for each in found]
    assert {id(each) for each in placed} == {id(each) for each in snapshots}, "the order of eviction is incomplete"
    assert len(placed) == len(snapshots), "the order of eviction lists a snapshot twice"
    on_host = snapshots.slots.host_start
    assert all(each.slot < on_host for each in snapshots._on_device.values()), "a slot is listed in the other memory"
    assert all(each.slot >= on_host for each in snapshots._on_host.values()), "a slot is listed in the other memory"
    for key, snapshot in [*snapshots._on_device.items(), *snapshots._on_host.items()]:
        assert key == snapshot.key, f"the snapshot at {snapshot.position} is listed at an old place"
        assert snapshot.slot >= 0, "a freed snapshot is listed"
        assert snapshot.kind != "branch" or snapshot.superseded_by is None, (
            "a snapshot where texts branch is superseded"
        )
