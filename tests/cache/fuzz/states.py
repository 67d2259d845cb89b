"""The model of recurrent state: an arena whose states derive from the whole history of tokens.

The naive model is a set of texts, one for each snapshot that was ever taken. Rows, slots of the device and slots of the
host are three ranges of one numbering, and the copies between them run in their order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache import Hint, Match
from radixkv.cache.recurrent import Spacing
from radixkv.cache.types import Purpose
from radixkv.errors import OutOfStates
from tests.cache.fuzz import inside
from tests.cache.fuzz.options import GRID, Sizes
from tests.cache.fuzz.tracked import Tracked, common
from tests.cache.naive import kv

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

NOTHING, GARBAGE = 7, 13  # the empty state, and the state after a forward that failed
Text = tuple[int, ...]


def state(namespace: Hashable, tokens: Sequence[int]) -> int:
    """The state after some tokens."""
    return int(kv(namespace, tokens)[-1]) if len(tokens) else NOTHING


@dataclass
class Facts:
    """The model of a sequence's state."""

    wanted: set[int] = field(default_factory=set)  # positions at which a snapshot must be taken
    written: set[int] = field(default_factory=set)  # positions of snapshots that are not published
    drained: bool = False  # since the last extend


class StateModel:
    """The rows and slots of one world."""

    def __init__(self, world: World) -> None:
        self.world, rng, ample = world, world.rng, world.options.ample
        self.rows = rng.choice((2, 4, 9, 30))
        self.snapshots = 4000 if ample else rng.choice((0, 1, 2, 5, 20))
        self.host_snapshots = (4000 if ample else rng.choice((0, 1, 5, 20))) if world.options.host else 0
        prompt, long, least = rng.choice((4, 8)), rng.choice((16, 32, 1000)), rng.choice((1, 1, 3))
        self.spacing = Spacing(GRID if world.options.aligned else 1, prompt, long, least)
        self.slots = np.zeros(self.rows + self.snapshots + self.host_snapshots, np.uint64)
        self.facts: dict[int, Facts] = {}
        self.states: dict[Hashable, set[Text]] = {}

    def sized(self, sizes: Sizes) -> Sizes:
        slots = {"snapshots": self.snapshots, "host_snapshots": self.host_snapshots}
        return replace(sizes, rows=self.rows, **slots, spacing=self.spacing)

    # Reading

    def usable(self, namespace: Hashable, prompt: Sequence[int], kv_match: Match) -> int:
        """The position of the last snapshot within the KV on the device."""
        cache = self.world.cache
        found = cache.match(self.world.shaped(prompt), namespace)
        assert (found.matched, len(found.blocks)) == (kv_match.length, -(-found.length // cache.block_size))
        at = found.length
        assert np.array_equal(found.blocks[: at // cache.block_size], kv_match.blocks[: at // cache.block_size])
        assert at % self.spacing.grid == 0
        last = self.last_state(namespace, prompt[: kv_match.length])
        assert not at or tuple(prompt[:at]) in self.states[namespace], "a snapshot that was never taken"
        assert at == last or not self.world.options.ample, f"a snapshot at {last} is not found"
        return at

    def last_state(self, namespace: Hashable, text: Sequence[int]) -> int:
        known = self.states.get(namespace, set())
        return next((at for at in range(len(text), 0, -1) if tuple(text[:at]) in known), 0)

    def rows_are_full(self) -> bool:
        return self.world.cache.stats().state_rows_used == self.world.cache.stats().state_rows

    def assert_loadable(self, one: Tracked, text: Sequence[int], found: Match, count: int) -> None:
        """Check that a load ends at a snapshot that follows the KV on the device, or is not possible."""
        assert count >= 0, "a load after a plan or after unpublished tokens"
        end = len(one.tokens) + count
        if count:
            assert found.length < end <= found.length + found.host
            assert tuple(text[:end]) in self.states[one.namespace], "a snapshot that was never taken"
        ready = one.plan is None and one.published == len(one.tokens)
        if self.world.options.ample and ready:
            last = self.last_state(one.namespace, text[: found.length + found.host])
            assert end == last or last <= found.length, f"a snapshot at {last} is not loadable"

    # Verbs

    def make_a_row_free(self, namespace: Hashable, prompt: Sequence[int], limit: int | None, purpose: Purpose) -> None:
        """If all rows are in use, check that `open` is refused, and close a sequence."""
        if self.rows_are_full():
            world, asked = self.world, self.world.shaped(prompt)
            world.assert_refused(OutOfStates, lambda: world.cache.open(asked, namespace, limit, purpose=purpose))
            world.close(world.rng.choice([one for one in world.live if one.purpose != "audit"]))

    def opened(self, one: Tracked, prompt: Sequence[int], limit: int | None, found: Match) -> None:
        """Note a new sequence; `found` is the match of KV before."""
        most = len(prompt) if limit is None else min(len(prompt), limit)
        facts = self.facts[one.seq.id] = Facts()
        if one.purpose == "audit":
            return
        rng, matched = self.world.rng, found.length
        if matched < most and not found.host and matched - one.seq.length >= self.spacing.least:
            self.want(one, matched)
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.snapshot_at(one, rng.randrange(len(prompt) + 10))
        assert len(facts.written) == 0

    def want(self, one: Tracked, position: int) -> None:
        position -= position % self.spacing.grid
        if position > len(one.tokens):
            self.facts[one.seq.id].wanted.add(position)

    def snapshot_at(self, one: Tracked, position: int) -> None:
        """Ask for a snapshot at a position."""
        shared = self.world.rng.random() < 0.5
        one.seq.snapshot_at(position, shared=shared)
        if one.purpose == "audit":
            return
        facts = self.facts[one.seq.id]
        sure = not shared or self.spacing.least == 1  # else another one may lie shortly before
        if sure and (one.plan is None or not facts.drained):
            self.want(one, position)
        if one.plan is not None:
            self.note_snapshots(one)

    def planned(self, one: Tracked) -> None:
        """Note the snapshots of a new plan."""
        self.facts[one.seq.id].drained = False
        self.note_snapshots(one)

    def is_load(self, one: Tracked) -> bool:
        """Whether the plan is a load: the state of its end is copied into the row."""
        return self.world.host is not None and one.seq.id in self.world.host.loads

    def note_snapshots(self, one: Tracked) -> None:
        """Check the snapshots of a plan: inside its tokens, in order, on the grid, and all that were asked for."""
        step = one.plan.state if one.plan else None
        if one.purpose == "audit":
            assert step is None
            return
        if self.is_load(one):
            assert step is None or not step.snapshots
            return
        assert step is not None
        facts, start = self.facts[one.seq.id], len(one.tokens)
        positions = [each.tokens for each in step.snapshots]
        assert positions == sorted(set(positions))
        assert all(0 < each <= len(one.planned) and (start + each) % self.spacing.grid == 0 for each in positions)
        facts.written |= {start + each for each in positions}
        assert step.row is one.seq.row
        if self.world.options.ample and not facts.drained:
            due = {at for at in facts.wanted if start < at <= start + len(one.planned)}
            assert due <= facts.written, f"no snapshots at {due - facts.written}"

    def published(self, one: Tracked) -> None:
        """Note the snapshots inside published tokens."""
        facts = self.facts[one.seq.id]
        written = {at for at in facts.written if at <= one.published}
        self.remember(one, written)
        facts.written -= written

    def remember(self, one: Tracked, positions: set[int]) -> None:
        self.states.setdefault(one.namespace, set()).update(tuple(one.tokens[:at]) for at in positions)

    def refuses_fork(self, one: Tracked) -> bool:
        if one.purpose == "audit" or not self.rows_are_full():
            return False
        self.world.assert_refused(OutOfStates, one.seq.fork)
        return True

    def forked(self, one: Tracked, twin: Tracked) -> None:
        self.facts[twin.seq.id] = Facts(set(self.facts[one.seq.id].wanted))

    def cut(self, one: Tracked, length: int) -> int:
        """The length of a sequence that was cut at `length`: a cut goes back to the last state before it."""
        cut, facts = one.seq.length, self.facts[one.seq.id]
        if one.purpose == "audit" or length == len(one.tokens):
            return length
        assert cut <= length
        facts.written = {at for at in facts.written if at <= length}
        own = max(facts.written, default=0)
        last = max(own, self.last_state(one.namespace, one.tokens[: min(length, one.published)]))
        assert own <= cut <= last
        assert cut == last or not self.world.options.ample, f"cut to {cut}, a snapshot at {last} is not found"
        one.tokens, one.published = one.tokens[:cut], min(one.published, cut)
        if length - cut >= self.spacing.least:
            self.want(one, length)
        return cut

    def closing(self, one: Tracked, hint: Hint | None) -> None:
        """Note the snapshot that the row of a sequence becomes; sometimes its plan was executed and failed."""
        if one.plan is not None and not one.executed and self.world.rng.random() < 0.2:
            self.run_copies()
            self.run_chunk(one, GARBAGE)
        facts, length = self.facts.pop(one.seq.id), len(one.tokens)
        intact = one.plan is None or not (facts.drained or self.is_load(one))
        done = hint is not None and hint.done
        if one.purpose != "audit" and intact and one.published == length and not done:
            gain = length - self.last_state(one.namespace, one.tokens)
            kept = gain >= self.spacing.least or not self.world.options.ample
            if length and length % self.spacing.grid == 0 and kept:
                self.remember(one, {length})

    def discarded(self, namespace: Hashable, gone: list[int], start: int) -> None:
        known = self.states.get(namespace, set())
        self.states[namespace] = {each for each in known if common(gone, list(each)) <= start}

    def forget_lost(self) -> None:
        """Forget the states whose KV is gone."""
        world = self.world
        for namespace, known in self.states.items():
            kept = {text for text in known if world.texts_of(namespace).longest_prefix(text) == len(text)}
            if not world.host:  # the KV of moves that are pending is not matchable, but their states are kept
                kept = {text for text in kept if inside.cached_kv(world.cache, text, namespace).length == len(text)}
            self.states[namespace] = kept

    # Steps

    def run_copies(self) -> None:
        inside.copied(self.slots, inside.drained_copies(self.world.cache), NOTHING)
        for facts in self.facts.values():
            facts.drained = True

    def run_chunk(self, one: Tracked, value: int | None = None) -> None:
        """Advance a row over the planned tokens; `value` replaces the result of a forward that failed."""
        step = one.plan.state if one.plan else None
        if step is None or self.is_load(one):
            return
        row, text = step.row.number, one.tokens + one.planned
        assert self.slots[row] == state(one.namespace, one.tokens), "a row has the state of another text"
        for tokens, slot in step.snapshots:
            reached = state(one.namespace, text[: len(one.tokens) + tokens])
            self.slots[slot] = reached if value is None else value
        self.slots[row] = state(one.namespace, text) if value is None else value

    # Invariants

    def verify(self) -> None:
        cache, values = self.world.cache, self.slots.copy()
        inside.copied(values, inside.queued_copies(cache), NOTHING)
        for one in self.world.live:
            assert (one.seq.row is None) == (one.purpose == "audit")
            if one.seq.row is not None:
                ran = one.executed or self.is_load(one)
                expected = state(one.namespace, one.tokens + (one.planned if ran else []))
                assert values[one.seq.row.number] == expected, "a row has the state of another text"
        for stored in inside.stored_states(cache):
            assert values[stored.slot] == state(stored.namespace, stored.text), "a snapshot of another text"
            assert stored.text in self.states[stored.namespace]
        stats = cache.stats()
        assert (stats.state_rows, stats.state_rows_used) == (
            self.rows,
            sum(one.seq.row is not None for one in self.world.live),
        )
        if self.world.options.ample:
            assert stats.evicted_states == 0
