"""The world of a cache with recurrent state: a fake arena whose states derive from the whole history of tokens.

The naive model is a set of texts, one for each snapshot that was ever taken. `exact`: there are enough slots for all.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radixkv.cache import Hint, Match, PrefixCache, WritePlan
from radixkv.cache.recurrent import StatefulPrefixCache, StatefulSequence
from radixkv.cache.recurrent.sequence import Spacing
from radixkv.cache.tokens import as_bytes
from radixkv.cache.types import Purpose
from radixkv.errors import OutOfStates
from radixkv.recurrent_state import EMPTY
from tests.cache.naive import kv
from tests.cache.verbs import Ids
from tests.cache.world import Tracked, World, common

NOTHING, GARBAGE = 7, 13  # the empty state, and that of a forward that failed
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


class StatefulWorld(World):
    """A world whose cache has rows and snapshots; see World."""

    cache: StatefulPrefixCache

    def make_cache(self, eviction: str) -> PrefixCache:
        rows = self.rng.choice((2, 4, 9, 30))
        slots = 4000 if self.exact else self.rng.choice((1, 2, 5, 20))
        grid = self.rng.choice((1, 1, 1, 4))
        prompt, long, least = self.rng.choice((4, 8)), self.rng.choice((16, 32, 1000)), self.rng.choice((1, 1, 3))
        self.spacing = Spacing(grid, prompt, long, least)
        self.slots = np.zeros(rows + slots, np.uint64)
        self.facts: dict[int, Facts] = {}
        self.states: dict[Hashable, set[Text]] = {}
        return StatefulPrefixCache(
            self.num_blocks,
            self.block_size,
            eviction,
            clock=lambda: self.now,
            rows=rows,
            snapshots=slots,
            spacing=self.spacing,
            namespace_limits=self.limits(),
        )

    # Reading

    def cached(self, namespace: Hashable, prompt: Ids) -> Match:
        """The match of KV alone."""
        return PrefixCache._match(self.cache, as_bytes(prompt), self.cache.state.tree.namespaces.find(namespace))

    def usable(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        found, kv_match = self.cache.match(self.shaped(prompt), namespace), self.match(namespace, prompt)
        assert (found.matched, len(found.blocks)) == (kv_match.length, -(-found.length // self.block_size))
        at = found.length
        assert np.array_equal(found.blocks[: at // self.block_size], kv_match.blocks[: at // self.block_size])
        assert at % self.spacing.grid == 0
        last = self.last_state(namespace, prompt[: kv_match.length])
        assert not at or tuple(prompt[:at]) in self.states[namespace], "a snapshot that was never taken"
        assert at == last or not self.exact, f"a snapshot at {last} is not found"
        return at

    def last_state(self, namespace: Hashable, text: Sequence[int]) -> int:
        known = self.states.get(namespace, set())
        return next((at for at in range(len(text), 0, -1) if tuple(text[:at]) in known), 0)

    def sequence(self, one: Tracked) -> StatefulSequence:
        assert isinstance(one.seq, StatefulSequence)
        return one.seq

    # Verbs

    def open(
        self,
        namespace: Hashable,
        prompt: Sequence[int],
        limit: int | None = None,
        priority: int = 0,
        purpose: Purpose = "request",
    ) -> Tracked:
        if purpose != "audit" and self.rows_are_full():
            asked = self.shaped(prompt)
            self.assert_refused(OutOfStates, lambda: self.cache.open(asked, namespace, limit, purpose=purpose))
            self.close(self.rng.choice([one for one in self.live if one.purpose != "audit"]))
        matched = self.match(namespace, prompt).length
        most = len(prompt) if limit is None else min(len(prompt), limit)
        one = super().open(namespace, prompt, limit, priority, purpose)
        facts = self.facts[one.seq.id] = Facts()
        if matched < most and purpose != "audit" and matched - one.seq.length >= self.spacing.least:
            self.want(one, matched)
        for _ in range(self.rng.choice((0, 0, 1, 2)) if purpose != "audit" else 0):
            self.snapshot_at(one, self.rng.randrange(len(prompt) + 10))
        assert len(facts.written) == 0
        return one

    def rows_are_full(self) -> bool:
        return self.cache.stats().state_rows_used == self.cache.stats().state_rows

    def want(self, one: Tracked, position: int) -> None:
        position -= position % self.spacing.grid
        if position > len(one.tokens):
            self.facts[one.seq.id].wanted.add(position)

    def snapshot_at(self, one: Tracked, position: int) -> None:
        shared = self.rng.random() < 0.5
        one.seq.snapshot_at(position, shared=shared)
        if one.purpose == "audit":
            return
        facts = self.facts[one.seq.id]
        sure = not shared or self.spacing.least == 1  # else another one may lie shortly before
        if sure and (one.plan is None or not facts.drained):
            self.want(one, position)
        if one.plan is not None:
            self.note_snapshots(one, one.plan)

    def plan(self, one: Tracked, tokens: Sequence[int], verb: Callable[[Ids], WritePlan]) -> bool:
        planned = super().plan(one, tokens, verb)
        if planned and one.plan is not None:
            facts = self.facts[one.seq.id]
            facts.drained = False
            self.note_snapshots(one, one.plan)
        return planned

    def note_snapshots(self, one: Tracked, plan: WritePlan) -> None:
        """Check the snapshots of a plan: inside its tokens, in order, on the grid, and all that were asked for."""
        if one.purpose == "audit":
            assert plan.state is None
            return
        assert plan.state is not None
        facts, start = self.facts[one.seq.id], len(one.tokens)
        inside = [each.tokens for each in plan.state.snapshots]
        assert inside == sorted(set(inside))
        assert all(0 < each <= len(one.planned) and (start + each) % self.spacing.grid == 0 for each in inside)
        facts.written |= {start + each for each in inside}
        assert plan.state.row is self.sequence(one).row
        if self.exact and not facts.drained:
            due = {at for at in facts.wanted if start < at <= start + len(one.planned)}
            assert due <= facts.written, f"no snapshots at {due - facts.written}"

    def execute(self, some: Sequence[Tracked]) -> None:
        waiting = [one for one in some if one.plan is not None and not one.executed]
        if waiting:
            self.run_copies()
        super().execute(some)
        for one in self.rng.sample(waiting, len(waiting)):
            self.run_chunk(one)

    def run_copies(self) -> None:
        for source, target in self.cache.copies.drain():
            self.slots[target] = NOTHING if source == EMPTY else self.slots[source]
        for facts in self.facts.values():
            facts.drained = True

    def run_chunk(self, one: Tracked, value: int | None = None) -> None:
        """Advance a row over the planned tokens; `value` replaces the result, as of a forward that failed."""
        step = one.plan.state if one.plan else None
        if step is None:
            return
        row, text = step.row.number, one.tokens + one.planned
        assert self.slots[row] == state(one.namespace, one.tokens), "a row has the state of another text"
        for tokens, slot in step.snapshots:
            reached = state(one.namespace, text[: len(one.tokens) + tokens])
            self.slots[slot] = reached if value is None else value
        self.slots[row] = state(one.namespace, text) if value is None else value

    def commit(self, one: Tracked, publish: bool = True) -> None:
        super().commit(one, publish)
        facts = self.facts[one.seq.id]
        if one.published == len(one.tokens) and one.purpose != "audit":
            self.remember(one, facts.written)
            facts.written.clear()

    def publish(self, one: Tracked, length: int) -> None:
        super().publish(one, length)
        if one.purpose != "audit":
            facts = self.facts[one.seq.id]
            published = {at for at in facts.written if at <= one.published}
            self.remember(one, published)
            facts.written -= published

    def remember(self, one: Tracked, positions: set[int]) -> None:
        self.states.setdefault(one.namespace, set()).update(tuple(one.tokens[:at]) for at in positions)

    def fork(self, one: Tracked) -> Tracked | None:
        if one.plan is None and one.purpose != "audit" and self.rows_are_full():
            self.assert_refused(OutOfStates, one.seq.fork)
            return None
        twin = super().fork(one)
        if twin is not None:
            self.facts[twin.seq.id] = Facts(set(self.facts[one.seq.id].wanted))
        return twin

    def cut_length(self, one: Tracked, length: int) -> int:
        cut, facts = one.seq.length, self.facts[one.seq.id]
        if one.purpose == "audit" or length == len(one.tokens):
            return length
        assert cut <= length
        facts.written = {at for at in facts.written if at <= length}
        own = max(facts.written, default=0)
        last = max(own, self.last_state(one.namespace, one.tokens[: min(length, one.published)]))
        assert own <= cut <= last
        assert cut == last or not self.exact, f"cut to {cut}, a snapshot at {last} is not found"
        one.tokens, one.published = one.tokens[:cut], min(one.published, cut)
        if length - cut >= self.spacing.least:
            self.want(one, length)
        return cut

    def close(self, one: Tracked, hint: Hint | None = None) -> None:
        if one.plan is not None and not one.executed and self.rng.random() < 0.2:
            self.run_copies()
            self.run_chunk(one, GARBAGE)
        facts, length = self.facts.pop(one.seq.id), len(one.tokens)
        intact = one.plan is None or not facts.drained
        if one.purpose != "audit" and intact and one.published == length and not (hint is not None and hint.done):
            gain = length - self.last_state(one.namespace, one.tokens)
            if length and length % self.spacing.grid == 0 and (gain >= self.spacing.least or not self.exact):
                self.remember(one, {length})
        super().close(one, hint)
        assert self.sequence(one).row is None

    def discard(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        wrong = list(prompt[: self.match(namespace, prompt).length])
        forgotten = super().discard(namespace, prompt, start)
        if forgotten:
            gone = {each for each in self.states.get(namespace, ()) if common(wrong, list(each)) > start}
            self.states[namespace] = {each for each in self.states.get(namespace, ()) if each not in gone}
        return forgotten

    def clear(self, *, pins: bool = False) -> None:
        super().clear(pins=pins)
        self.forget_lost_states()

    def clear_namespace(self, namespace: Hashable) -> None:
        super().clear_namespace(namespace)
        self.forget_lost_states()

    def drain(self) -> None:
        super().drain()
        self.forget_lost_states()

    def forget_what_is_gone(self) -> None:
        super().forget_what_is_gone()
        self.forget_lost_states()

    def forget_lost_states(self) -> None:
        """Forget the states whose KV is gone."""
        for namespace, texts in self.states.items():
            self.states[namespace] = {text for text in texts if self.cached(namespace, text).length == len(text)}

    # Invariants

    def verify(self) -> None:
        super().verify()
        values = self.slots.copy()
        for source, target in self.cache.copies.queued():
            values[target] = NOTHING if source == EMPTY else values[source]
        for one in self.live:
            row = self.sequence(one).row
            if row is not None:
                text = one.tokens + (one.planned if one.executed else [])
                assert values[row.number] == state(one.namespace, text), "a row has the state of another text"
        tree = self.cache.state.tree
        for snapshot in self.cache.snapshots:
            text = np.frombuffer(b"".join(bytes(node.key) for node in tree.path(snapshot.node)), np.int32)
            text = text[: snapshot.position]
            namespace = tree.namespace(snapshot.node)
            assert values[snapshot.slot] == state(namespace, text.tolist()), "a snapshot of another text"
            assert tuple(text.tolist()) in self.states[namespace]
        if self.exact:
            assert self.cache.stats().evicted_states == 0
