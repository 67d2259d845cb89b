"""Snapshots of recurrent state at token positions of the tree, and the order in which they are evicted.

A snapshot at position p of a node, start < p <= end, is the state after the first p tokens of the node's path. A node
may have any number of them. Cached KV may lose its snapshots; a snapshot never outlives the KV of its tokens.

Eviction goes by the last use, superseded snapshots first. A snapshot is superseded once the sequence that took it, or
that alone resumed from it, has taken a deeper one: the conversation went on. A snapshot where texts branch is never
superseded. A use refreshes only the snapshot that was used (SGLang found 0.83 hits instead of 0.61 by that rule).

At the end of a turn two snapshots compete: the end of its prompt (or of the last message in it), and the end of the
reply. Templates that strip the reasoning from earlier replies resume from the first only, others from the second. How
far later prompts followed the replies decides which one supersedes the other; without evidence the end of the reply
goes first. Where snapshots should be taken: Marconi (MLSys 2025).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from sortedcontainers import SortedDict

from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.types import Node

# Where texts branch; the end of the last message; the end of a prompt; inside a long prompt; the end of a turn.
Kind = Literal["branch", "message", "prompt", "spaced", "turn"]
_ENDS = ("message", "prompt")
_position: Callable[[Snapshot], int] = attrgetter("position")
_EVIDENCE = 8  # the most prompts that count as evidence
_DECIDED = 2  # by how many more prompts one of the two must lead


@dataclass(slots=True, eq=False)
class Snapshot:
    """The recurrent state after the first `position` tokens of a path, in `slot`."""

    position: int
    slot: int
    kind: Kind
    node: Node
    tick: int = 0  # of the last use
    uses: int = 0
    superseded_by: Snapshot | None = None  # itself, if its turn is known not to be resumed
    before: Snapshot | None = None  # the snapshot that the same sequence used or took before
    turn_end: int = 0  # where the turn ended that continued this end of a prompt

    @property
    def key(self) -> tuple[bool, int]:
        """Its place in the order of eviction."""
        return self.superseded_by is None, self.tick


class Snapshots:
    """The snapshots of all nodes, and the free slots for more."""

    def __init__(self, slots: StateSlots, pinned_nodes: Callable[[], list[Node]]) -> None:
        self.slots = slots
        self.by_node: dict[Node, list[Snapshot]] = {}  # by position
        self.evicted = 0  # to make room, KV with them or not counted
        self.taken = 0
        self._order: SortedDict = SortedDict()  # Snapshot.key -> Snapshot, coldest first
        self._pinned_nodes = pinned_nodes
        self._tick = 0
        self._turns = 0  # prompts that followed a reply to its end, less those that left it earlier

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield all snapshots, the next one to be evicted first."""
        return iter(self._order.values())

    # ---- reading

    def last(self, node: Node | None, length: int) -> Snapshot | None:
        """Return the last snapshot at or before position `length` on the path to `node`. O(depth)."""
        while node is not None:
            found = self.by_node.get(node)
            if found:
                at = bisect_right(found, length, key=_position)
                if at:
                    return found[at - 1]
            node = node.parent
        return None

    # ---- slots

    def reserve(self, *, superseded_only: bool = False) -> int | None:
        """Take a slot for a snapshot, if need be by an eviction; None if there is none.

        With `superseded_only` it evicts no other snapshots. O(pins * depth) where it evicts.
        """
        if not self.slots.free:
            victim = self._victim(superseded_only)
            if victim is None:
                return None
            self._free(victim)
            self.evicted += 1
        return self.slots.free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that was reserved."""
        self.slots.free.append(slot)

    def protected(self) -> set[int]:
        """Return the slots that pins protect: of the last snapshot on each pinned path. O(pins * depth)."""
        found = (self.last(node, node.end) for node in self._pinned_nodes())
        return {snapshot.slot for snapshot in found if snapshot is not None}

    def _victim(self, superseded_only: bool) -> Snapshot | None:
        protected = self.protected()
        for snapshot in self:
            if superseded_only and snapshot.superseded_by is None:
                return None
            if snapshot.slot not in protected:
                return snapshot
        return None

    # ---- snapshots

    def attach(self, node: Node, position: int, slot: int, kind: Kind, before: Snapshot | None) -> Snapshot:
        """Make a written snapshot usable, or free its slot if the path has one at this position; returns that one.

        `node` ends at `position` or later. O(depth).
        """
        while node.start >= position and node.parent is not None:
            node = node.parent
        found = self.by_node.setdefault(node, [])
        at = bisect_right(found, position, key=_position)
        if at and found[at - 1].position == position:
            self.give_back(slot)
            return found[at - 1]
        snapshot = Snapshot(position, slot, kind, node, before=before)
        found.insert(at, snapshot)
        self.taken += 1
        self._touch(snapshot)
        if before is not None:
            if kind != "turn" or before.kind not in _ENDS or self.turns_are_resumed:
                self._supersede(before, snapshot)
            else:
                self._supersede(snapshot, snapshot)
        return snapshot

    def use(self, snapshot: Snapshot, matched: int | None) -> None:
        """Note that a sequence resumes from a snapshot: it alone becomes the most recently used one.

        `matched` is how far the text of a new prompt has cached KV. None for a request that goes on after a preemption:
        it says nothing about later prompts.
        """
        snapshot.uses += 1
        if matched is None:
            snapshot.turn_end = 0
        elif snapshot.kind == "turn" or snapshot.turn_end:
            followed = snapshot.kind == "turn" or matched >= snapshot.turn_end
            self._turns = min(max(self._turns + (1 if followed else -1), -_EVIDENCE), _EVIDENCE)
            snapshot.turn_end = 0
        self._touch(snapshot)

    @property
    def turns_are_resumed(self) -> bool:
        """Whether conversations resume from the ends of turns rather than from the ends of prompts."""
        return self._turns > _DECIDED

    @staticmethod
    def end_turn(snapshot: Snapshot | None, length: int) -> None:
        """Note that the turn that continued a snapshot ended at `length`."""
        if snapshot is not None and snapshot.kind in _ENDS:
            snapshot.turn_end = length

    def _touch(self, snapshot: Snapshot) -> None:
        self._order.pop(snapshot.key, None)
        self._tick += 1
        snapshot.tick, snapshot.superseded_by = self._tick, None
        self._order[snapshot.key] = snapshot

    def _supersede(self, snapshot: Snapshot, by: Snapshot | None) -> None:
        """Let a snapshot be evicted first, unless texts branch there or several sequences have used it; None: not."""
        if snapshot.slot >= 0 and snapshot.kind != "branch" and snapshot.uses <= 1:
            del self._order[snapshot.key]
            snapshot.superseded_by = by
            self._order[snapshot.key] = snapshot

    def _free(self, snapshot: Snapshot) -> None:
        found = self.by_node[snapshot.node]
        found.remove(snapshot)
        if not found:
            del self.by_node[snapshot.node]
        self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        del self._order[snapshot.key]
        self.give_back(snapshot.slot)
        before = snapshot.before
        snapshot.slot, snapshot.before, snapshot.superseded_by = -1, None, None
        if before is not None and before.superseded_by is snapshot:  # the deepest of its conversation again
            self._supersede(before, None)

    # ---- as nodes change

    def split(self, node: Node, upper: Node) -> None:
        """Move the snapshots of `node` that lie in its new upper half."""
        found = self.by_node.get(node)
        if found:
            at = bisect_right(found, upper.end, key=_position)
            self._place(upper, found[:at])
            self._place(node, found[at:])

    def merge(self, upper: Node, node: Node) -> None:
        """Move the snapshots of `upper` to the node that took over its tokens."""
        found = self.by_node.pop(upper, None)
        if found:
            self._place(node, found + self.by_node.get(node, []))

    def trim(self, node: Node, end: int) -> None:
        """Free the snapshots of a node after position `end`."""
        found = self.by_node.get(node)
        if found:
            at = bisect_right(found, end, key=_position)
            for snapshot in found[at:]:
                self._forget(snapshot)
            self._place(node, found[:at])

    def _place(self, node: Node, snapshots: list[Snapshot]) -> None:
        if snapshots:
            self.by_node[node] = snapshots
        else:
            self.by_node.pop(node, None)
        for snapshot in snapshots:
            snapshot.node = node
