"""A sequence of a model with recurrent state: it has a row, and its chunks leave snapshots in the tree.

The row holds the state after `length` tokens whenever no plan is pending. A state cannot be cut: `truncate` goes back
to the last snapshot, so the sequence may end up shorter than asked for.
"""

from __future__ import annotations

from array import array
from bisect import insort
from operator import attrgetter
from typing import NamedTuple, cast

from radixkv.cache.recurrent.snapshots import Kind, Snapshot
from radixkv.cache.recurrent.tree import StatefulTree
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, check_int
from radixkv.cache.types import Hint, Node, WritePlan
from radixkv.recurrent_state import EMPTY, StateRow, StateSnapshot, StateStep


class Written(NamedTuple):
    """A snapshot that a plan writes or wrote, and that no node has yet."""

    position: int
    slot: int
    kind: Kind


class Spacing(NamedTuple):
    """How far apart snapshots lie, in tokens.

    `grid`: every snapshot lies on a multiple of it. `prompt`: the end of a prompt is rounded down to a multiple of it.
    `long`: the distance in long prompts. `least`: where a text branches or ends, the least gain over the last snapshot.
    """

    grid: int = 1
    prompt: int = 64
    long: int = 2048
    least: int = 16


class StatefulSequence(Sequence):
    """A sequence with a row of recurrent state. Made by StatefulPrefixCache.open and by fork.

    An audit reads cached KV only: it has no row, and its plans have no state.
    """

    __slots__ = ("_drains", "_last", "_row", "_snapshots", "_spacing", "_steps", "_wanted", "_written")

    def __init__(self, state: CacheState, node: Node, length: int, table: array[int]) -> None:
        super().__init__(state, node, length, table)
        self._snapshots = cast(StatefulTree, state.tree).snapshots
        self._spacing = Spacing()
        self._row: StateRow | None = None
        self._last: Snapshot | None = None  # that this sequence used or took last
        self._wanted: dict[int, Kind] = {}  # positions to take a snapshot at
        self._steps: list[StateSnapshot] = []  # of the pending plan
        self._written: list[Written] = []  # by the pending plan, or earlier and not published
        self._drains = 0  # at the last extend

    # ---- for the cache's own modules

    def begin(
        self, spacing: Spacing, snapshot: Snapshot | None, matched: int, *, diverged: bool, branches: bool
    ) -> None:
        """Take a row, and restore a snapshot into it, or the empty state.

        `matched` is the length of the cached KV. Without `diverged`, the limit of `open` ended the match. `branches`
        says that other text is cached after it; else this text continues the cached one.
        """
        slots = self._snapshots.slots
        self._spacing, self._row, self._last = spacing, slots.take_row(), snapshot
        slots.copy_to_row(EMPTY if snapshot is None else snapshot.slot, self._row)
        if snapshot is not None:
            self._snapshots.use(snapshot, None if self.purpose == "resume" else matched)
        end = (self.asked - 1) // spacing.prompt * spacing.prompt
        if end - self.length >= spacing.prompt:
            self._want(end, "prompt")
        if matched - self.length >= spacing.least:
            if diverged:
                self._want(matched, "branch" if branches else "spaced")
            elif matched - max(self.length, end) >= spacing.least:
                self._want(matched, "prompt")

    def begin_fork(
        self, spacing: Spacing, last: Snapshot | None, wanted: dict[int, Kind], row: StateRow | None
    ) -> None:
        """Begin as a fork: with a copy of `row`, and with the snapshots that its sequence used and still wants."""
        self._spacing, self._last, self._wanted = spacing, last, dict(wanted)
        if row is not None:
            slots = self._snapshots.slots
            self._row = slots.take_row()
            slots.copy_to_row(row.number, self._row)

    @property
    def row(self) -> StateRow | None:
        """The row; None for an audit, and after close."""
        return self._row

    def reserved_slots(self) -> list[int]:
        """The snapshot slots that the sequence has reserved, and that no node has yet."""
        return [each.slot for each in self._written]

    # ---- verbs

    def snapshot_at(self, position: int, *, shared: bool = False) -> None:
        """Take a snapshot when the sequence computes this position; `shared` says that other texts branch there.

        Without `shared` it is the end of the last message before the reply. It may come after `extend`, if the plan was
        not executed yet. A position that was computed before, or that finds no slot, is left out.
        """
        check_int("position", position)
        if self._row is None:
            return
        named = [at for at, kind in self._wanted.items() if kind != "prompt"]
        if shared and any(0 <= position - at < self._spacing.least for at in named):
            return  # many texts branch nearby
        kind: Kind = "branch" if shared else "message"
        self._want(int(position), kind)
        if self._planned is not None and self._drains == self._snapshots.slots.drains:
            self._reserve_snapshots(self.length + len(self._planned) // WIDTH)

    def extend(self, tokens: Tokens) -> WritePlan:
        """Plan the KV of the next `tokens`, their state, and the snapshots inside them."""
        plan = super().extend(tokens)
        if self._row is None:
            return plan
        self._steps = []
        self._drains = self._snapshots.slots.drains
        end = self.length + len(plan.slots)
        if self._wanted or end // self._spacing.long > self.length // self._spacing.long:
            self._reserve_snapshots(end)
        return WritePlan(plan.slots, plan.copies, StateStep(self._row, self._steps))

    def commit(self, publish: bool = True) -> None:
        """Count the tokens of the executed plan, and publish them with their snapshots."""
        super().commit(publish)
        if self._written:
            self._attach_published()

    def publish(self, length: int) -> None:
        """Publish the committed tokens up to `length` with their snapshots."""
        super().publish(length)
        self._attach_published()

    def fork(self) -> StatefulSequence:
        """Return another sequence with the same tokens, whose row is a copy. Raises OutOfStates."""
        self._refuse_pending()
        if self._row is not None:
            self._snapshots.slots.refuse_full()
        twin = cast(StatefulSequence, super().fork())
        twin.begin_fork(self._spacing, self._last, self._wanted, self._row)
        return twin

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on, and those after the last snapshot at or before it."""
        self._refuse_pending()
        check_int("length", length)
        if self._row is None or not 0 <= length < self.length:
            super().truncate(length)
            return
        position = self._restore(int(length))
        super().truncate(position)
        if length - position >= self._spacing.least:
            self._want(int(length), "branch")

    def close(self, hint: Hint | None = None) -> None:
        """Release everything; the row becomes a snapshot if its tokens are published and end there."""
        if self.closed or not (hint is None or isinstance(hint, Hint)):
            super().close(hint)
            return
        executed = self.has_plan and self._drains != self._snapshots.slots.drains
        super().close(hint)
        row, self._row = self._row, None
        snapshots = self._snapshots
        for each in self._written:
            snapshots.give_back(each.slot)
        self._written = []
        if row is not None:
            if not executed and self.length == self.node.end and not (hint is not None and hint.done):
                self._hand_over_row(row)
            snapshots.slots.release_row(row)
        self._last = None

    # ---- helpers

    def _attach_published(self) -> None:
        """Hand the snapshots inside published tokens to the tree."""
        published = [each for each in self._written if each.position <= self.node.end]
        self._written = self._written[len(published) :]
        for position, slot, kind in published:
            self._last = self._snapshots.attach(self.node, position, slot, kind, self._last)

    def _want(self, position: int, kind: Kind) -> None:
        """Take a snapshot at a position, or at the multiple of the grid before it."""
        position = position // self._spacing.grid * self._spacing.grid
        if position > self.length:
            self._wanted[position] = kind

    def _reserve_snapshots(self, end: int) -> None:
        """Reserve slots for the snapshots inside the plan, which ends at `end`.

        A spaced snapshot serves this text alone, so it evicts superseded snapshots only.
        """
        start, spacing = self.length, self._spacing
        places = {at: kind for at, kind in self._wanted.items() if start < at <= end}
        for at, kind in list(places.items()):
            near = (other for other in self._wanted if at - spacing.prompt < other < self.asked)
            if kind == "prompt" and any(self._wanted[other] != "prompt" for other in near):
                del places[at]
        step = spacing.long if spacing.long % spacing.grid == 0 else spacing.long * spacing.grid
        for at in range(start // step * step + step, min(end, self.asked) + 1, step):
            places.setdefault(at, "spaced")
        taken = {each.position for each in self._written}
        for at in sorted(places.keys() - taken):
            slot = self._snapshots.reserve(superseded_only=places[at] == "spaced")
            if slot is None:
                continue
            insort(self._written, Written(at, slot, places[at]), key=attrgetter("position"))
            insort(self._steps, StateSnapshot(at - start, slot), key=attrgetter("tokens"))

    def _restore(self, length: int) -> int:
        """Set the row to the last state at or before `length`; returns its position."""
        snapshots, row = self._snapshots, cast(StateRow, self._row)
        found = snapshots.last(self.node, length)
        position, slot = (0, EMPTY) if found is None else (found.position, found.slot)
        for each in self._written:
            if each.position <= length:
                position, slot = each.position, each.slot  # deeper than those of the tree, as it is not published
            else:
                snapshots.give_back(each.slot)
        self._written = [each for each in self._written if each.position <= length]
        snapshots.slots.copy_to_row(slot, row)
        self._last = found
        return position

    def _hand_over_row(self, row: StateRow) -> None:
        """Keep the state of a row that ends with the published tokens, unless a snapshot lies shortly before."""
        snapshots, length = self._snapshots, self.length
        last = snapshots.last(self.node, length)
        gain = length - (0 if last is None else last.position)
        if length % self._spacing.grid or gain < self._spacing.least or self.purpose == "audit":
            return
        snapshots.end_turn(self._last, length)
        slot = snapshots.reserve(superseded_only=not snapshots.turns_are_resumed)
        if slot is not None:
            snapshots.slots.copy_from_row(row, slot)
            snapshots.attach(self.node, length, slot, "turn", self._last)
