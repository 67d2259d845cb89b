"""The recurrent state of one sequence: its row, and the snapshots that its chunks leave in the tree.

The row holds the state after `length` tokens of the sequence whenever no plan is pending. A state cannot be cut: going
back restores the last snapshot, so the sequence may end up shorter than asked for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from radixkv.cache.recurrent.snapshots import Kind, Snapshot, Snapshots
from radixkv.cache.types import Node
from radixkv.sizing.recurrent_state import EMPTY, StateRow, StateSnapshot, StateStep


class Written(NamedTuple):
    """A snapshot that a plan writes or wrote, and that no node has yet."""

    position: int
    slot: int
    kind: Kind


class RowState:
    """A row, which one sequence holds, with the positions of the snapshots that the sequence takes.

    Positions are tokens of the sequence, and `asked` is the length of its prompt.
    """

    __slots__ = ("_asked", "_drains", "_last", "_snapshots", "_steps", "_wanted", "_written", "row")

    def __init__(
        self,
        snapshots: Snapshots,
        asked: int,
        last: Snapshot | None = None,
        wanted: Mapping[int, Kind] = MappingProxyType({}),
    ) -> None:
        """Take a row; raises OutOfStates if there is none. Its state is undefined until it is set."""
        snapshots.slots.refuse_full()
        self.row: StateRow = snapshots.slots.take_row()
        self._snapshots = snapshots
        self._asked = asked
        self._last = last  # that this sequence used or took last
        self._wanted = dict(wanted)  # positions to take a snapshot at
        self._steps: list[StateSnapshot] = []  # of the pending plan
        self._written: list[Written] = []  # by the pending plan, or earlier and not published
        self._drains = 0  # at the last plan

    @property
    def reserved_slots(self) -> list[int]:
        """The snapshot slots that the sequence has reserved, and that no node has yet."""
        return [each.slot for each in self._written]

    # ---- the beginning

    def begin(self, snapshot: Snapshot | None, matched: int, *, counts: bool, diverged: bool, branches: bool) -> None:
        """Restore a snapshot, or the empty state. `matched` is the length of the cached KV.

        `counts` says that a new prompt resumes, which is evidence about later ones. Without `diverged`, the limit of
        `open` ended the match. `branches` says that other text is cached after it; else this text continues it.
        """
        spacing = self._snapshots.spacing
        length = 0 if snapshot is None else snapshot.position
        self._set(snapshot)
        if snapshot is not None:
            self._snapshots.use(snapshot, matched if counts else None)
        end = (self._asked - 1) // spacing.prompt * spacing.prompt
        if end - length >= spacing.prompt:
            self._want(end, length, "prompt")
        if matched - length >= spacing.least:
            if diverged:
                self._want(matched, length, "branch" if branches else "spaced")
            elif matched - max(length, end) >= spacing.least:
                self._want(matched, length, "prompt")

    def fork(self) -> RowState:
        """Return the state of a fork: a copy of the row, with the snapshots that this sequence used and wants.

        Raises OutOfStates.
        """
        twin = RowState(self._snapshots, self._asked, self._last, self._wanted)
        self._snapshots.slots.copy(self.row.number, twin.row.number)
        return twin

    # ---- plans

    def plan(self, start: int, end: int) -> StateStep:
        """Return the state of a chunk [start, end), with the snapshots inside it."""
        self._steps = []
        self._drains = self._snapshots.slots.drains
        long = self._snapshots.spacing.long
        if self._wanted or end // long > start // long:
            self._reserve_snapshots(start, end)
        return StateStep(self.row, self._steps)

    def load(self, snapshot: Snapshot, matched: int, *, counts: bool) -> None:
        """Restore the snapshot at the end of a run that is loaded; see `begin`."""
        self._steps = []
        self._drains = -1  # the row is ahead of the committed tokens until the load is committed
        self._set(snapshot)
        self._snapshots.use(snapshot, matched if counts else None)

    def snapshot_at(self, position: int, start: int, end: int | None, *, shared: bool) -> None:
        """Take a snapshot at `position`, also inside the plan [start, end) if it was not executed; see Sequence."""
        named = [at for at, kind in self._wanted.items() if kind != "prompt"]
        if shared and any(0 <= position - at < self._snapshots.spacing.least for at in named):
            return  # many texts branch nearby
        self._want(position, start, "branch" if shared else "message")
        if end is not None and self._drains == self._snapshots.slots.drains:
            self._reserve_snapshots(start, end)

    def attach(self, node: Node) -> None:
        """Hand the snapshots inside the tokens that are published up to the end of `node` to the tree."""
        if not self._written:
            return
        published = [each for each in self._written if each.position <= node.end]
        self._written = self._written[len(published) :]
        for position, slot, kind in published:
            self._last = self._snapshots.attach(node, position, slot, kind, self._last)

    # ---- going back, and the end

    def restore(self, node: Node, length: int) -> int:
        """Set the row to the last state at or before `length`; returns its position.

        `node` ends with the published tokens. A snapshot is taken at `length` if much is lost.
        """
        snapshots = self._snapshots
        found = snapshots.last(node, length)
        position, slot = (0, EMPTY) if found is None else (found.position, found.slot)
        for each in self._written:
            if each.position <= length:
                position, slot = each.position, each.slot  # deeper than those of the tree, as it is not published
            else:
                snapshots.slots.give_back(each.slot)
        self._written = [each for each in self._written if each.position <= length]
        snapshots.slots.copy(slot, self.row.number)
        self._last = found
        if length - position >= snapshots.spacing.least:
            self._want(length, position, "branch")
        return position

    def close(self, node: Node, length: int, *, planned: bool, done: bool) -> None:
        """Release the row; it becomes a snapshot if `length` tokens up to the end of `node` are published.

        `planned` says that a plan was pending, which may have been executed; `done` that the tail is not needed.
        """
        slots = self._snapshots.slots
        for each in self._written:
            slots.give_back(each.slot)
        executed = planned and self._drains != slots.drains
        if not executed and length == node.end and not done:
            self._hand_over(node, length)
        slots.release_row(self.row)

    def _hand_over(self, node: Node, length: int) -> None:
        """Keep the state of the row as a snapshot, unless one lies shortly before."""
        snapshots = self._snapshots
        last = snapshots.last(node, length)
        gain = length - (0 if last is None else last.position)
        if length % snapshots.spacing.grid or gain < snapshots.spacing.least:
            return
        snapshots.end_turn(self._last, length)
        slot = snapshots.reserve(superseded_only=not snapshots.turns_are_resumed)
        if slot is not None:
            snapshots.slots.copy(self.row.number, slot)
            snapshots.attach(node, length, slot, "turn", self._last)

    # ---- helpers

    def _set(self, snapshot: Snapshot | None) -> None:
        self._last = snapshot
        self._snapshots.slots.copy(EMPTY if snapshot is None else snapshot.slot, self.row.number)

    def _want(self, position: int, length: int, kind: Kind) -> None:
        """Take a snapshot at a position after `length`, or at the multiple of the grid before it."""
        grid = self._snapshots.spacing.grid
        position = position // grid * grid
        if position > length:
            self._wanted[position] = kind

    def _reserve_snapshots(self, start: int, end: int) -> None:
        """Reserve slots for the snapshots inside the plan [start, end).

        A spaced snapshot serves this text alone, so it evicts superseded snapshots only.
        """
        spacing = self._snapshots.spacing
        places = {at: kind for at, kind in self._wanted.items() if start < at <= end}
        for at, kind in list(places.items()):
            near = (other for other in self._wanted if at - spacing.prompt < other < self._asked)
            if kind == "prompt" and any(self._wanted[other] != "prompt" for other in near):
                del places[at]
        step = spacing.long if spacing.long % spacing.grid == 0 else spacing.long * spacing.grid
        for at in range(start // step * step + step, min(end, self._asked) + 1, step):
            places.setdefault(at, "spaced")
        taken = {each.position for each in self._written}
        for at in sorted(places.keys() - taken):
            slot = self._snapshots.reserve(superseded_only=places[at] == "spaced")
            if slot is None:
                continue
            insort(self._written, Written(at, slot, places[at]), key=attrgetter("position"))
            insort(self._steps, StateSnapshot(at - start, slot), key=attrgetter("tokens"))
