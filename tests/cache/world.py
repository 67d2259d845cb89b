"""The cache and its naive model side by side: every verb runs on both, then asserts the promises of the contract.

It uses the public names of `radixkv.cache` only.
"""

import random
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import pytest

from radixkv.cache import CachedRun, CacheStats, Hint, Match, Pin, PrefixCache, WritePlan
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.types import Purpose
from radixkv.errors import (
    InvalidInput,
    InvalidTokens,
    OutOfBlocks,
    PinBudgetExceeded,
    PlanPending,
    PrefixHeld,
    SequenceClosed,
    UnknownToken,
)
from tests.cache.freeze import freeze
from tests.cache.naive import Pool, Texts, Work, kv
from tests.cache.verbs import Ids

COUNTERS = ("query_tokens", "hit_tokens", "evicted_blocks", "evicted_tokens", "copied_blocks", "regret_tokens")
SHAPES: tuple[Callable[[Sequence[int]], Ids], ...] = (
    lambda tokens: list(tokens),
    lambda tokens: tuple(tokens),
    lambda tokens: array("i", tokens),
    lambda tokens: np.asarray(tokens, dtype=np.int32),
    lambda tokens: np.asarray(tokens, dtype=np.int64),
)


@dataclass
class Tracked:
    """The model of one open sequence."""

    seq: CacheSequence
    namespace: Hashable
    tokens: list[int]
    published: int
    table: list[int]
    purpose: Purpose = "request"
    plan: WritePlan | None = None
    planned: list[int] = field(default_factory=list)
    executed: bool = False
    unknown: int = -1  # the position of the token that the cache does not have yet; -1 for none

    @property
    def readable(self) -> bool:
        """Whether the block table's content is valid: a planned copy may not have run yet."""
        return self.plan is None or self.executed

    @property
    def shown(self) -> list[int]:
        """The tokens that the sequence shows."""
        return [-1 if at == self.unknown else token for at, token in enumerate(self.tokens)]


@dataclass
class Pinned:
    """The model of one pin."""

    pin: Pin
    namespace: Hashable
    tokens: list[int]
    expires: float


class World:
    """One cache, one pool, and all texts that were ever published. `exact`: the pool is too large to evict."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: str = "lru",
        *,
        exact: bool = False,
        seed: int = 0,
        proofs: float = 1.0,
    ) -> None:
        self.now = 0.0
        self.num_blocks, self.block_size, self.exact, self.proofs = num_blocks, block_size, exact, proofs
        self.rng = random.Random(seed)
        self.cache = self.make_cache(eviction)
        self.pool = Pool(num_blocks, block_size, self.rng)
        self.texts: dict[Hashable, Texts] = {}
        self.live: list[Tracked] = []
        self.pins: list[Pinned] = []
        self.marks: dict[int, int] = {}  # block -> slots reserved since it was last taken
        self.private: set[int] = set()  # blocks that were in no published table since they were last taken
        self.before = self.cache.stats()

    def make_cache(self, eviction: str) -> PrefixCache:
        shape = self.num_blocks, self.block_size
        return PrefixCache(*shape, eviction, clock=lambda: self.now, namespace_limits=self.limits())

    def limits(self) -> dict[Hashable, float] | None:
        """The limits of namespaces."""
        return None

    # Reading the model

    def held_texts(self) -> dict[Hashable, Texts]:
        """The texts that open sequences and pins protect from eviction."""
        held: dict[Hashable, Texts] = {}
        for open_one in self.live:
            held.setdefault(open_one.namespace, Texts()).add(open_one.tokens[: open_one.published])
        for pinned in self.pins:
            if self.now < pinned.expires:
                held.setdefault(pinned.namespace, Texts()).add(pinned.tokens)
        return held

    def shared_length(self, one: Tracked) -> int:
        """Length of a sequence's text that others protect from eviction."""
        others = [other.tokens[: other.published] for other in self.live if other.namespace == one.namespace]
        others.remove(one.tokens[: one.published])
        others += [each.tokens for each in self.pins if each.namespace == one.namespace and self.now < each.expires]
        return max((common(one.shown, text) for text in others), default=0)

    def bounds(self, namespace: Hashable, prompt: Sequence[int]) -> tuple[int, int]:
        """The least and the most that a prompt can hit."""
        most = self.texts.get(namespace, Texts()).longest_prefix(prompt)
        return (most if self.exact else self.held_length(namespace, prompt)), most

    def held_length(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that open sequences and pins protect from eviction."""
        texts = [one.tokens[: one.published] for one in self.live if one.namespace == namespace]
        texts += [each.tokens for each in self.pins if each.namespace == namespace and self.now < each.expires]
        return max((common(prompt, text) for text in texts), default=0)

    def state(self) -> list[object] | None:
        """The whole state of the cache and its holders; in long runs only for some steps."""
        return self._frozen() if self.rng.random() < self.proofs else None

    def assert_unchanged(self, before: list[object] | None) -> None:
        assert before is None or before == self._frozen(), "the cache has changed"

    def _frozen(self) -> list[object]:
        return freeze(self.cache, [one.seq for one in self.live], [pinned.pin for pinned in self.pins])

    def available(self, namespace: Hashable = None) -> int:
        """Blocks that an extend can take; `stats` first releases expired pins."""
        self.cache.stats()
        return self.cache.free_blocks + self.cache.evictable_for(namespace)

    def forget_what_nobody_holds(self) -> None:
        self.texts = self.held_texts()

    def forget_what_is_gone(self) -> None:
        """Shrink the model to the cached texts, so that long runs do not slow down."""
        self.texts = {namespace: self.cached_texts(namespace, texts) for namespace, texts in self.texts.items()}

    def shaped(self, tokens: Sequence[int]) -> Ids:
        return self.rng.choice(SHAPES)(tokens)

    # Reading the cache

    def cached(self, namespace: Hashable, prompt: Ids) -> Match:
        """The longest prefix with cached KV."""
        return self.cache.match(prompt, namespace)

    def usable(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        """The length of the prefix that a sequence can be opened with."""
        return self.match(namespace, prompt).length

    def reach(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        """The length of the prefix that is cached in any tier."""
        found = self.match(namespace, prompt)
        return found.matched + found.host

    def match(self, namespace: Hashable, prompt: Sequence[int]) -> Match:
        least, most = self.bounds(namespace, prompt)
        found = self.cached(namespace, self.shaped(prompt))
        assert least <= found.length == found.matched <= most
        assert found.blocks.dtype == np.int32
        assert len(found.blocks) == -(-found.length // self.block_size)
        self.assert_content(namespace, prompt[: found.length], found.blocks)
        return found

    def explain(self, namespace: Hashable, prompt: Sequence[int], limit: int | None = None) -> None:
        matched, reach = self.match(namespace, prompt).length, self.reach(namespace, prompt)
        explanation = self.cache.explain(self.shaped(prompt), namespace, limit)
        assert explanation.tokens == len(prompt)
        assert explanation.matched == matched
        assert "\n" not in str(explanation)
        assert str(explanation)
        length, cut = (each if limit is None else min(each, limit) for each in (matched, reach))
        usable = self.usable(namespace, prompt[:length])
        assert explanation.length == usable
        assert (explanation.reason == "no_state") == (usable < length)
        reason = explanation.kv_reason if usable < length else explanation.reason
        assert reason in {"full", "never_seen", "diverged", "evicted", "limit"}
        assert explanation.host == cut - length
        assert (reason == "limit") == (cut < reach)
        if cut == reach:
            assert (reason == "full") == (reach == len(prompt))

    def ask_without_a_trace(self, namespace: Hashable, prompt: Sequence[int], limit: int | None = None) -> None:
        """`match` and `explain`, and a proof that they changed nothing at all."""
        self.cache.stats()
        before = self.state()
        self.match(namespace, prompt)
        self.explain(namespace, prompt, limit)
        self.assert_unchanged(before)

    def random_run(self) -> CachedRun | None:
        """Check that `random_run` returns a cached run with the right content, and changes nothing."""
        before = self.state()
        run = self.cache.random_run(self.rng)
        self.assert_unchanged(before)
        if run is None:
            assert self.cache.stats().nodes == 0
            return None
        assert 0 <= run.start < len(run.tokens)
        assert run.tokens.dtype == run.blocks.dtype == np.int32
        found = self.match(run.namespace, run.tokens.tolist())
        assert found.length == len(run.tokens)
        assert np.array_equal(found.blocks, run.blocks)
        return run

    # Verbs

    def open(
        self,
        namespace: Hashable,
        prompt: Sequence[int],
        limit: int | None = None,
        priority: int = 0,
        purpose: Purpose = "request",
    ) -> Tracked:
        before = self.cache.stats()
        hit = self.match(namespace, prompt).length
        hit = hit if limit is None else min(hit, limit)
        if purpose != "audit":
            hit = self.usable(namespace, prompt[:hit])
        found = self.match(namespace, prompt[:hit])
        seq = self.cache.open(self.shaped(prompt), namespace, limit, priority, purpose=purpose)
        opened = Tracked(seq, namespace, list(prompt[:hit]), hit, seq.block_table.tolist(), purpose)
        self.live.append(opened)
        assert seq.length == seq.cached_length == hit
        assert seq.namespace == namespace
        after = self.cache.stats()
        counts = purpose == "request"
        assert after.query_tokens - before.query_tokens == counts * len(prompt)
        assert after.hit_tokens - before.hit_tokens == counts * hit
        assert counts or after.regret_tokens == before.regret_tokens
        assert after.opened_sequences - before.opened_sequences == 1
        assert after.evicted_blocks == before.evicted_blocks
        freed = after.free_blocks - before.free_blocks  # a branch's block became redundant by the new lock
        assert before.cached_blocks - after.cached_blocks == found.idle_blocks
        assert 0 <= freed <= 1
        self.assert_sequence(opened)
        return opened

    def extend(self, one: Tracked, tokens: Sequence[int]) -> bool:
        """Plan `tokens`; return False if the pool had no room, after checking that it had none."""
        return self.plan(one, tokens, one.seq.extend)

    def plan(self, one: Tracked, tokens: Sequence[int], verb: Callable[[Ids], WritePlan]) -> bool:
        """Plan `tokens` by a verb of the sequence; see `extend`."""
        if one.plan is not None:
            self.assert_refused(PlanPending, lambda: verb(tokens))
            return False
        available, least, most = self.available(one.namespace), *self.need(one, len(tokens))
        before = self.state() if most > available else None
        stats = self.cache.stats()
        try:
            plan = verb(self.shaped(tokens))
        except OutOfBlocks:
            assert most > available, "refused, although free and evictable blocks suffice"
            self.assert_unchanged(before)
            return False
        assert least <= available
        self.note_plan(one, plan, list(tokens), must_stay_in_place=least == most)
        taken = self.taken(one, plan)
        left = self.available(one.namespace)
        # Evicting a branch may free a block that was stranded above it.
        stranded = max(len(self.live) + len(self.pins), stats.nodes - self.cache.stats().nodes)
        assert 0 <= left - (available - taken) <= stranded, f"{taken} taken of {available}, {left} left"
        if taken <= stats.free_blocks:
            assert self.cache.stats().evicted_blocks == stats.evicted_blocks, "evicted without need"
        return True

    def extend_unknown(self, one: Tracked, token: int) -> bool:
        """Plan a token that the cache gets later; see `extend`."""
        if one.unknown >= 0:
            self.assert_refused(UnknownToken, one.seq.extend_unknown)
            return False
        if not self.plan(one, [token], lambda tokens: one.seq.extend_unknown()):
            return False
        one.unknown = len(one.tokens)
        return True

    def resolve(self, one: Tracked) -> None:
        """Give the cache the token that it did not have, to every fork of its own."""
        if one.unknown < 0:
            self.assert_refused(UnknownToken, lambda: one.seq.resolve(1))
            return
        self.assert_refused(InvalidTokens, lambda: one.seq.resolve(-1))
        stats, table = self.cache.stats(), one.seq.block_table.tolist()
        one.seq.resolve((one.tokens + one.planned)[one.unknown])
        one.unknown = -1
        assert self.cache.stats() == stats
        assert one.seq.block_table.tolist() == table
        self.assert_sequence(one)

    def publish(self, one: Tracked, length: int) -> None:
        """Publish the first tokens of a sequence, whose plan may be pending."""
        if length > len(one.tokens):
            self.assert_refused(InvalidInput, lambda: one.seq.publish(length))
            return
        if 0 <= one.unknown < length:
            self.assert_refused(UnknownToken, lambda: one.seq.publish(length))
            return
        before = self.cache.stats()
        one.seq.publish(length)
        one.table = one.seq.block_table.tolist()
        if one.purpose != "audit":
            one.published = max(one.published, length)
            self.texts.setdefault(one.namespace, Texts()).add(one.tokens[: one.published])
            self.private.difference_update(one.table, *(one.plan.copies if one.plan else ()))
        assert self.cache.stats().evicted_blocks == before.evicted_blocks
        assert self.cache.free_blocks >= before.free_blocks
        assert self.match(one.namespace, one.tokens).length >= one.published
        self.assert_sequence(one)

    def need(self, one: Tracked, count: int) -> tuple[int, int]:
        """The fewest and the most blocks that `count` more tokens need; a possible copy takes one more."""
        length, size = len(one.tokens), self.block_size
        new = -(-(length + count) // size) - -(-length // size)
        offset = length % size
        if not count or not offset or self.marks[one.table[-1]] == offset or self.is_private(one, one.table[-1]):
            return new, new
        return new, new + 1

    def is_private(self, one: Tracked, block: int) -> bool:
        """Whether only this sequence can own a block."""
        others = (other for other in self.live if other is not one)
        return block in self.private and not any(
            block in other.table or any(block in copy for copy in (other.plan.copies if other.plan else ()))
            for other in others
        )

    def must_copy(self, one: Tracked, table: list[int]) -> bool:
        """Whether others have the part-filled last block too, and its next slot was reserved before."""
        offset = len(one.tokens) % self.block_size
        shared = any(table[-1] in other.table for other in self.live if other is not one) if offset else False
        return shared and self.marks[table[-1]] != offset

    def taken(self, one: Tracked, plan: WritePlan) -> int:
        return len(one.table) - -(-len(one.tokens) // self.block_size) + len(plan.copies)

    def note_plan(self, one: Tracked, plan: WritePlan, tokens: list[int], must_stay_in_place: bool) -> None:
        size, length, old = self.block_size, len(one.tokens), one.table
        table = one.seq.block_table.tolist()
        whole = -(-length // size)
        assert len(table) == -(-(length + len(tokens)) // size)
        assert plan.slots.dtype == np.int64
        positions = range(length, length + len(tokens))
        assert plan.slots.tolist() == [table[i // size] * size + i % size for i in positions]
        changed = [(old[i], table[i]) for i in range(whole) if old[i] != table[i]]
        assert [tuple(copy) for copy in plan.copies] == changed
        assert changed or not tokens or not self.must_copy(one, old), "wrote over slots that were reserved before"
        assert not (must_stay_in_place and changed), "copied a block that it could have written in place"
        assert all(length % size and source == old[-1] for source, _ in changed)
        for block in [target for _, target in changed] + table[whole:]:
            self.marks[block] = 0
            self.private.add(block)
        for slot in plan.slots.tolist():
            self.marks[slot // size] = max(self.marks[slot // size], slot % size + 1)
        one.plan, one.planned, one.executed, one.table = plan, tokens, False, table

    def execute(self, some: Sequence[Tracked]) -> None:
        """Run the plans of several sequences in one step."""
        waiting = [one for one in some if one.plan is not None and not one.executed]
        self.pool.execute([Work(one.plan, self.values(one)) for one in waiting if one.plan is not None])
        for one in waiting:
            one.executed = True

    def values(self, one: Tracked) -> npt.NDArray[np.uint64]:
        return kv(one.namespace, one.tokens + one.planned)[len(one.tokens) :]

    def commit(self, one: Tracked, publish: bool = True) -> None:
        self.execute([one])
        if publish and one.unknown >= 0 and one.purpose != "audit":
            self.assert_refused(UnknownToken, one.seq.commit)
            self.resolve(one)
        before = self.cache.stats()
        one.seq.commit(publish)
        one.tokens += one.planned
        one.plan, one.planned, one.executed, one.table = None, [], False, one.seq.block_table.tolist()
        if publish and one.purpose != "audit":
            one.published = len(one.tokens)
            self.texts.setdefault(one.namespace, Texts()).add(one.tokens)
            self.private.difference_update(one.table)
        assert self.cache.stats().evicted_blocks == before.evicted_blocks
        assert self.cache.free_blocks >= before.free_blocks
        assert self.match(one.namespace, one.tokens).length >= one.published
        self.assert_sequence(one)

    def step(self, publish: bool = True) -> None:
        """Run everything that is planned, then commit it, in any order."""
        self.execute(self.live)
        for one in self.rng.sample(self.live, len(self.live)):
            if one.plan is not None:
                self.commit(one, publish)

    def fork(self, one: Tracked) -> Tracked | None:
        if one.plan is not None:
            self.assert_refused(PlanPending, one.seq.fork)
            return None
        before = self.cache.stats()
        twin = Tracked(one.seq.fork(), one.namespace, list(one.tokens), one.published, list(one.table), one.purpose)
        twin.unknown = one.unknown
        self.live.append(twin)
        assert twin.seq.cached_length == one.seq.cached_length
        assert (twin.seq.namespace, twin.seq.purpose) == (one.namespace, one.purpose)
        assert twin.seq.block_table.tolist() == one.table
        assert self.cache.free_blocks == before.free_blocks
        self.assert_sequence(twin)
        return twin

    def cut_length(self, one: Tracked, length: int) -> int:
        """The length of a sequence that was cut at `length`."""
        return length

    def truncate(self, one: Tracked, length: int) -> None:
        if one.plan is not None:
            self.assert_refused(PlanPending, lambda: one.seq.truncate(length))
            return
        before = self.cache.stats()
        one.seq.truncate(length)
        length = self.cut_length(one, length)
        one.tokens, one.published = one.tokens[:length], min(one.published, length)
        one.unknown = one.unknown if one.unknown < length else -1
        whole, table = length // self.block_size, one.seq.block_table.tolist()
        assert len(table) == -(-length // self.block_size)
        assert table[:whole] == one.table[:whole]  # a part-filled last block may become an equal one
        one.table = table
        assert self.cache.free_blocks >= before.free_blocks
        self.assert_sequence(one)

    def close(self, one: Tracked, hint: Hint | None = None) -> None:
        before = self.cache.stats()
        one.seq.close(hint)
        self.live = [other for other in self.live if other is not one]
        assert one.seq.closed
        assert self.cache.free_blocks >= before.free_blocks
        assert self.cache.stats().evicted_blocks == before.evicted_blocks
        one.seq.close(hint)
        for verb in (
            one.seq.commit,
            one.seq.fork,
            one.seq.extend_unknown,
            lambda: one.seq.extend([1]),
            lambda: one.seq.resolve(1),
            lambda: one.seq.publish(0),
            lambda: one.seq.truncate(0),
        ):
            with pytest.raises(SequenceClosed):
                verb()

    def pin(self, namespace: Hashable, prompt: Sequence[int], ttl: float | None = None) -> None:
        self.cache.stats()
        found = self.match(namespace, prompt)
        budget = self.cache.stats().num_blocks * 0.5
        pinned, before = self.cache.stats().pinned_blocks, self.state()
        try:
            pin = self.cache.pin(self.shaped(prompt), namespace, ttl)
        except PinBudgetExceeded:
            assert pinned + len(found.blocks) > budget
            self.assert_unchanged(before)
            return
        assert pin.length == found.length
        assert pin.complete == (found.length == len(prompt))
        assert pin.blocks == len(found.blocks)
        expires = float("inf") if ttl is None else self.now + ttl
        self.pins.append(Pinned(pin, namespace, list(prompt[: found.length]), expires))
        assert pinned <= self.cache.stats().pinned_blocks <= budget

    def release(self, pinned: Pinned) -> None:
        pinned.pin.release()
        self.pins.remove(pinned)

    def demote(self, namespace: Hashable, prompt: Sequence[int], start: int) -> None:
        """Change the order of eviction, and nothing else that is visible."""
        before, hit = self.cache.stats(), self.match(namespace, prompt).length
        self.cache.demote(self.shaped(prompt), namespace, start)
        after = self.cache.stats()
        assert (after.free_blocks, after.cached_blocks) == (before.free_blocks, before.cached_blocks)
        assert self.match(namespace, prompt).length == hit

    def discard(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        """Forget exactly the tokens of a text from `start` on, or return False because they are held."""
        self.cache.stats()
        before, state = self.cache.stats(), self.state()
        wrong = list(prompt[: self.match(namespace, prompt).length])
        found = [(text, self.match(namespace, text)) for text in leaves(self.texts_of(namespace))]
        below = [(text, match) for text, match in found if common(text, wrong) > start]
        blocks = {int(block) for _, match in below for block in match.blocks[start // self.block_size :]}
        try:
            freed = self.cache.discard(self.shaped(prompt), namespace, start)
        except PrefixHeld:
            self.assert_unchanged(state)
            assert self.somebody_has(namespace, wrong, start, blocks)
            return False
        assert not self.somebody_has(namespace, wrong, start, blocks)
        after = self.cache.stats()
        assert freed == after.free_blocks - before.free_blocks
        assert (after.evicted_blocks, after.ghosts) == (before.evicted_blocks, before.ghosts)
        self.texts[namespace] = Texts()
        for text, _ in found:
            self.texts[namespace].add(text[:start] if common(text, wrong) > start else text)
        for text, match in found:
            left = start if common(text, wrong) > start else match.length
            assert self.match(namespace, text[: match.length]).length == left
        return True

    def texts_of(self, namespace: Hashable) -> Texts:
        return self.texts.get(namespace, Texts())

    def somebody_has(self, namespace: Hashable, wrong: Sequence[int], start: int, blocks: set[int]) -> bool:
        """Whether a token of `wrong` from `start` on is protected, or read in these blocks."""
        if self.held_length(namespace, wrong) > start:
            return True
        first = start // self.block_size
        for one in self.live:
            if one.namespace == namespace and len(one.tokens) > start:
                read = one.table[first : -(-len(one.tokens) // self.block_size)]
                read += [source for source, _ in one.plan.copies] if one.plan else []
                if blocks.intersection(read):
                    return True
        return False

    def clear(self, *, pins: bool = False) -> None:
        self.cache.stats()
        self.cache.clear(pins=pins)
        if pins:
            assert not any(pinned.pin.active for pinned in self.pins)
            assert self.cache.stats().pinned_blocks == 0
            self.pins.clear()
        self.forget_what_nobody_holds()
        assert self.cache.evictable_blocks == 0

    def clear_namespace(self, namespace: Hashable) -> None:
        """Forget exactly what nothing holds in one namespace; every other text stays as it is, on the same blocks."""
        self.cache.stats()
        before = self.cache.stats()
        others = [(each, text) for each, texts in self.texts.items() if each != namespace for text in leaves(texts)]
        found = [(self.cached(each, text), self.cache.explain(text, each)) for each, text in others]
        gone = leaves(self.texts_of(namespace))
        freed = self.cache.clear_namespace(namespace)
        after = self.cache.stats()
        assert freed == after.free_blocks - before.free_blocks
        assert after.evicted_blocks == before.evicted_blocks
        for (each, text), (match, explanation) in zip(others, found, strict=True):
            again = self.cached(each, text)
            assert (again.length, again.matched, again.host) == (match.length, match.matched, match.host)
            assert again.blocks.tolist() == match.blocks.tolist()
            assert self.cache.explain(text, each) == explanation
        self.texts[namespace] = self.held_texts().get(namespace, Texts())
        for text in gone:
            left = self.cached(namespace, text)
            assert left.matched <= self.texts[namespace].longest_prefix(text)
            assert left.host == left.idle_blocks == 0
            explanation = self.cache.explain(text, namespace)
            assert "evicted" not in (explanation.reason, explanation.kv_reason), "a ghost of it is left"

    def unpin(self, namespace: Hashable, prompt: Sequence[int]) -> None:
        """Release exactly the pins whose text is this one, and leave those on its parts and continuations."""
        self.cache.stats()
        text = list(prompt)
        here = [each for each in self.pins if (each.namespace, each.tokens) == (namespace, text) and each.tokens]
        assert self.cache.unpin(self.shaped(text), namespace) == len(here)
        assert not any(each.pin.active for each in here)
        self.pins = [each for each in self.pins if each not in here]
        assert all(each.pin.active for each in self.pins if each.tokens)

    def find_nodes(self) -> None:
        """Find each node by its id: its text is cached up to its end; an id that no node has finds nothing."""
        before = self.state()
        tree = self.cache.state.tree
        nodes = list(tree.residents())
        for node in self.rng.sample(nodes, min(len(nodes), 3)):
            found = self.cache.node(node.id)
            assert found is not None
            assert (found.start, len(found.tokens), found.residence) == (node.start, node.end, node.residence)
            assert (found.namespace, found.locks) == (tree.namespace(node), node.locks)
            text = found.tokens.tolist()
            if node.residence == "device":
                assert self.cached(found.namespace, text).matched == node.end
                wider = [each for each in leaves(self.texts_of(found.namespace)) if each[: node.end] == text]
                reaching = {each[node.end] for each in wider if len(each) > node.end}
                followed = {at for at in reaching if self.reach(found.namespace, [*text, at]) > node.end}
                assert found.children >= len(followed)
        assert self.cache.node(0) is None
        assert self.cache.node(max((each.id for each in nodes), default=0) + 1) is None
        self.assert_unchanged(before)

    def evict(self, count: int) -> None:
        """Evict until `count` blocks are free; the result says whether they are, and held texts stay."""
        self.cache.stats()
        before = self.cache.stats()
        enough = self.cache.evict(count)
        after = self.cache.stats()
        assert enough == (after.free_blocks >= count)
        assert enough or not after.leaves, "stopped although there was a leaf to evict"
        self.assert_counted(before, after)
        assert enough or count > before.free_blocks + before.cached_blocks, "evictable_blocks promised more"

    def assert_counted(self, before: CacheStats, after: CacheStats) -> None:
        """Check that an eviction counted the blocks that it freed."""
        assert after.evicted_blocks - before.evicted_blocks == after.free_blocks - before.free_blocks

    def drain(self) -> None:
        """Take exactly the blocks that are reported as free or evictable.

        This evicts all unheld tokens except those inside held blocks: evicting these would free nothing. Examples are
        tails inside such blocks, and tokens that a closed twin has published while the other reads them unpublished.
        """
        flood, taken = self.open("flood", []), 0
        first, nodes = self.available(), self.cache.stats().nodes
        while available := self.available():
            self.commit(flood, publish=False)
            assert not self.extend(flood, [0] * (available * self.block_size + 1))
            assert self.extend(flood, [0] * (available * self.block_size))
            taken += available
        stranded = max(len(self.live) - 1 + len(self.pins), nodes - self.cache.stats().nodes)
        assert first <= taken <= first + stranded
        held, said, self.texts = self.held_texts(), self.texts, self.held_texts()
        for namespace, texts in said.items():
            for text in leaves(texts):
                kept = held.get(namespace, Texts()).longest_prefix(text)
                match = self.cached(namespace, text)
                left = match.length
                assert kept <= left
                assert left <= -(-kept // self.block_size) * self.block_size or match.blocks[-1] in self.read_blocks()
                if left > kept:
                    self.texts[namespace].add(text[:left])
        self.close(flood)
        assert self.cache.free_blocks == taken

    def wait(self, seconds: float) -> None:
        """Let time pass; the next `stats` releases expired pins."""
        self.now += seconds
        self.cache.stats()
        self.pins = [pinned for pinned in self.pins if self.now < pinned.expires]

    def wind_down(self) -> None:
        """Close and release everything, then check that nothing is stranded and all blocks can be taken."""
        self.step()
        self.verify()
        while self.live:
            self.close(self.rng.choice(self.live))
        while self.pins:
            self.release(self.pins[-1])
        self.verify()
        self.assert_little_is_stranded()
        self.drain()
        self.assert_little_is_stranded()
        assert self.cache.free_blocks == self.num_blocks
        self.cache.check()

    # Invariants

    def assert_refused(self, error: type[Exception], verb: Callable[[], object]) -> None:
        self.cache.stats()
        before = self.state()
        with pytest.raises(error):
            verb()
        self.assert_unchanged(before)

    def assert_content(self, namespace: Hashable, tokens: Sequence[int], table: npt.NDArray[np.int32]) -> None:
        assert np.array_equal(self.pool.read(table, len(tokens)), kv(namespace, tokens))

    def assert_sequence(self, one: Tracked) -> None:
        seq = one.seq
        assert not seq.closed
        assert seq.length == len(one.tokens)
        assert seq.tokens.dtype == seq.block_table.dtype == np.int32
        assert seq.tokens.tolist() == one.shown
        assert seq.block_table.tolist() == one.table, "a block table changed under its owner's feet"
        assert seq.unshared_length == len(one.tokens) - self.shared_length(one)
        if one.readable:
            self.assert_content(one.namespace, one.tokens, seq.block_table)

    def assert_gauges(self) -> None:
        stats = self.cache.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.num_blocks == self.num_blocks
        assert stats.free_blocks == self.cache.free_blocks
        assert stats.cached_blocks == self.cache.evictable_blocks
        assert stats.block_size == self.block_size
        assert stats.sequences == len(self.live)
        assert min(getattr(stats, gauge.name) for gauge in fields(CacheStats) if "blocks" in gauge.name) >= 0
        assert all(getattr(self.before, name) <= getattr(stats, name) for name in COUNTERS)
        assert self.known_blocks() <= stats.held_blocks
        assert stats.pinned_blocks <= stats.held_blocks
        self.before = stats

    def known_blocks(self) -> int:
        """Count the blocks that open sequences, their plans' copies and pins visibly hold."""
        seen = self.read_blocks()
        for pinned in self.pins:
            if self.now < pinned.expires:
                seen |= set(self.cached(pinned.namespace, pinned.tokens).blocks.tolist())
        return len(seen)

    def read_blocks(self) -> set[int]:
        """The blocks that open sequences and their plans' copies read."""
        seen = {block for one in self.live for block in one.table}
        return seen | {source for one in self.live if one.plan for source, _ in one.plan.copies}

    def assert_little_is_stranded(self) -> None:
        """Check that cached texts take the fewest blocks, plus at most one per open sequence or pin.

        So nothing is stranded while nothing is held.
        """
        cached = {namespace: self.cached_texts(namespace, texts) for namespace, texts in self.texts.items()}
        own = {block for one in self.live for block in one.table[one.published // self.block_size :]}
        own |= {source for one in self.live if one.plan for source, _ in one.plan.copies}
        stats = self.cache.stats()
        needed = sum(texts.blocks(self.block_size) for texts in cached.values()) + len(own)
        assert stats.cached_blocks + stats.held_blocks <= needed + len(self.live) + len(self.pins)
        if not self.live and not self.pins:
            assert stats.held_blocks == stats.pinned_blocks == 0
            assert stats.cached_blocks == needed
            found = (any(self.reach(each, text) for text in leaves(texts)) for each, texts in self.texts.items())
            assert stats.namespaces == sum(found)

    def cached_texts(self, namespace: Hashable, texts: Texts) -> Texts:
        cached = Texts()
        for text in leaves(texts):
            cached.add(text[: self.match(namespace, text).length])
        return cached

    def verify(self) -> None:
        self.cache.check()
        self.assert_gauges()
        for one in self.live:
            self.assert_sequence(one)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the leading tokens that two texts share."""
    shared = min(len(left), len(right))
    if left[:shared] == right[:shared]:
        return shared
    return next(i for i in range(shared) if left[i] != right[i])


def leaves(texts: Texts) -> list[list[int]]:
    """The texts that are not a prefix of another one."""
    found: list[list[int]] = []
    waiting: list[tuple[list[int], dict]] = [([], texts.root)]  # type: ignore[type-arg]  # recursive
    while waiting:
        text, node = waiting.pop()
        if not node and text:
            found.append(text)
        waiting += [([*text, token], child) for token, child in node.items()]
    return found
