"""The cache and its naive model side by side: every verb runs on both, then asserts the promises of the contract.

The model is the set of published texts. Each slot holds a value that derives from the whole history of its token. The
options of the cache have a model each: `HostModel`, `DiskModel`, `StateModel`, `ShareModel` and `Mirror`, which are
None without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

import pytest

from radixkv.cache import Hint, WritePlan
from radixkv.cache.types import Purpose
from radixkv.errors import InvalidInput, InvalidTokens, OutOfBlocks, PlanPending, SequenceClosed, UnknownToken
from tests.cache.freeze import freeze
from tests.cache.fuzz import checks, lookups, plans, upkeep
from tests.cache.fuzz.disk import DiskModel
from tests.cache.fuzz.host import HostModel
from tests.cache.fuzz.mirror import Events, Mirror
from tests.cache.fuzz.options import Options, Sizes, new_cache
from tests.cache.fuzz.states import StateModel
from tests.cache.fuzz.tracked import SHAPES, Announced, Pinned, Tracked, common
from tests.cache.naive import Pool, Texts, Values, Work, kv
from tests.cache.verbs import Ids


class World:
    """One cache, one pool, and all texts that were ever published.

    `proofs` is the share of refusals and reads after which the whole state of the cache is compared.
    """

    def __init__(self, num_blocks: int, options: Options | None = None, *, seed: int = 0, proofs: float = 1.0) -> None:
        self.options = options = Options() if options is None else options
        self.now, self.rng = 0.0, random.Random(seed)
        self.num_blocks, self.block_size, self.proofs = num_blocks, options.block_size, proofs
        self.host = HostModel(self) if options.host else None
        self.states = StateModel(self) if options.states else None
        events = Events() if options.watched else None
        self.cache = new_cache(options, self.sizes(), lambda: self.now, events)
        self.mirror = Mirror(self, events) if events else None
        self.pool = Pool(num_blocks, self.block_size, self.rng)
        self.disk = DiskModel(self) if options.disk and options.host else None
        self.texts: dict[Hashable, Texts] = {}
        self.live: list[Tracked] = []
        self.pins: list[Pinned] = []
        self.waiting: list[Announced] = []
        self.marks: dict[int, int] = {}  # block -> slots reserved since it was last taken
        self.private: set[int] = set()  # blocks that were in no published table since they were last taken
        self.before = self.cache.stats()

    def sizes(self) -> Sizes:
        """The numbers of the cache's blocks, rows and slots."""
        sizes = Sizes(self.num_blocks)
        for part in (self.host, self.states):
            sizes = sizes if part is None else part.sized(sizes)
        return sizes

    @property
    def exact(self) -> bool:
        """Whether the pool of the device has room for all texts, so that hits are exact."""
        return self.options.ample and self.host is None

    # Methods in other files

    match, usable, reach, explain = lookups.match, lookups.usable, lookups.reach, lookups.explain
    ask_without_a_trace, random_run, find_nodes = lookups.ask_without_a_trace, lookups.random_run, lookups.find_nodes
    pin, release, unpin, wait = upkeep.pin, upkeep.release, upkeep.unpin, upkeep.wait
    demote, discard, clear, clear_namespace = upkeep.demote, upkeep.discard, upkeep.clear, upkeep.clear_namespace
    evict, drain, forget_what_is_gone = upkeep.evict, upkeep.drain, upkeep.forget_what_is_gone
    announce, end_an_announcement = upkeep.announce, upkeep.end_an_announcement
    verify, wind_down, assert_sequence = checks.verify, checks.wind_down, checks.assert_sequence
    assert_little_is_stranded, read_blocks = checks.assert_little_is_stranded, checks.read_blocks

    # Reading the model

    def held_texts(self) -> dict[Hashable, Texts]:
        """The texts that open sequences and pins protect from eviction."""
        held: dict[Hashable, Texts] = {}
        for namespace, text in self.protected():
            held.setdefault(namespace, Texts()).add(text)
        return held

    def protected(self) -> list[tuple[Hashable, list[int]]]:
        """The text of each open sequence, as far as it is published, and of each pin."""
        held = [(one.namespace, one.tokens[: one.published]) for one in self.live]
        return held + [(each.namespace, each.tokens) for each in self.pins if self.now < each.expires]

    def held_length(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that open sequences and pins protect from eviction."""
        return max((common(prompt, text) for space, text in self.protected() if space == namespace), default=0)

    def shared_length(self, one: Tracked) -> int:
        """Length of a sequence's text that others protect from eviction."""
        held = self.protected()
        held.remove((one.namespace, one.tokens[: one.published]))
        return max((common(one.shown, text) for space, text in held if space == one.namespace), default=0)

    def bounds(self, namespace: Hashable, prompt: Sequence[int]) -> tuple[int, int]:
        """The least and the most that a prompt can hit."""
        most = self.texts_of(namespace).longest_prefix(prompt)
        return (most if self.exact else self.held_length(namespace, prompt)), most

    def texts_of(self, namespace: Hashable) -> Texts:
        return self.texts.get(namespace, Texts())

    def state(self) -> list[object] | None:
        """The whole state of the cache and its holders; in long runs only for some steps."""
        return self._frozen() if self.rng.random() < self.proofs else None

    def assert_unchanged(self, before: list[object] | None) -> None:
        assert before is None or before == self._frozen(), "the cache has changed"

    def _frozen(self) -> list[object]:
        return freeze(self.cache, [one.seq for one in self.live], [pinned.pin for pinned in self.pins])

    def assert_refused(self, error: type[Exception], verb: Callable[[], object]) -> None:
        self.cache.stats()
        before = self.state()
        with pytest.raises(error):
            verb()
        self.assert_unchanged(before)

    def available(self) -> int:
        """Blocks that an extend can take; `stats` first releases expired pins."""
        self.cache.stats()
        return self.cache.available_blocks

    def shaped(self, tokens: Sequence[int]) -> Ids:
        return self.rng.choice(SHAPES)(tokens)

    # Verbs of sequences

    def open(
        self,
        namespace: Hashable,
        prompt: Sequence[int],
        limit: int | None = None,
        priority: int = 0,
        purpose: Purpose = "request",
    ) -> Tracked:
        if self.states and purpose != "audit":
            self.states.make_a_row_free(namespace, prompt, limit, purpose)
        if self.mirror:
            self.mirror.forget_uncounted()
        before, found = self.cache.stats(), self.match(namespace, prompt)
        hit = found.length if limit is None else min(found.length, limit)
        if purpose != "audit":
            hit = self.usable(namespace, prompt[:hit])
        idle = self.match(namespace, prompt[:hit]).idle_blocks
        seq = self.cache.open(self.shaped(prompt), namespace, limit, priority, purpose=purpose)
        opened = Tracked(seq, namespace, list(prompt[:hit]), hit, seq.block_table.tolist(), purpose)
        self.live.append(opened)
        assert seq.length == seq.cached_length == hit
        assert (seq.namespace, seq.purpose) == (namespace, purpose)
        after, counts = self.cache.stats(), purpose == "request"
        assert after.query_tokens - before.query_tokens == counts * len(prompt)
        assert after.hit_tokens - before.hit_tokens == counts * hit
        asked = len(prompt) if limit is None else min(limit, len(prompt))
        assert 0 <= after.regret_tokens - before.regret_tokens <= counts * max(0, asked - hit)
        assert after.opened_sequences - before.opened_sequences == 1
        assert after.evicted_blocks == before.evicted_blocks
        freed = after.free_blocks - before.free_blocks  # a branch's block became redundant by the new lock
        assert before.cached_blocks - after.cached_blocks == idle
        assert 0 <= freed <= 1
        self.assert_sequence(opened)
        if self.states:
            self.states.opened(opened, prompt, limit, found)
        if self.mirror:
            self.mirror.found(opened, prompt[:hit])
        return opened

    def extend(self, one: Tracked, tokens: Sequence[int]) -> bool:
        """Plan `tokens`; return False if the pool had no room, after checking that it had none.

        If the tokens begin on the host, it is mostly a load of some of them.
        """
        if self.host and tokens:
            count = self.host.loadable(one, tokens)
            if count and self.rng.random() < 0.7:
                return self.host.load(one, tokens[: self.host.load_length(count)])
        return self.plan(one, tokens, one.seq.extend)

    def plan(
        self, one: Tracked, tokens: Sequence[int], verb: Callable[[Ids], WritePlan], holds: int | None = None
    ) -> bool:
        """Plan `tokens` by a verb, which may first hold more of the text, with `holds` evictable blocks."""
        if one.plan is not None:
            self.assert_refused(PlanPending, lambda: verb(tokens))
            return False
        available, least, most = self.available() - (holds or 0), *plans.need(self, one, len(tokens))
        before = self.state() if most > available else None
        stats = self.cache.stats()
        moving = self.host.pending_moves() if self.host else 0
        try:
            plan = verb(self.shaped(tokens))
        except OutOfBlocks:
            assert most > available, "refused, although free and evictable blocks suffice"
            self.assert_unchanged(before)
            return False
        assert least <= available
        plans.note(self, one, plan, list(tokens), must_stay_in_place=least == most)
        taken = plans.taken(self, one, plan)
        left = self.available()
        # Evicting a branch may free a block that was stranded above it.
        stranded = max(len(self.live) + len(self.pins), stats.nodes - self.cache.stats().nodes) + (holds is not None)
        assert 0 <= left - (available - taken) <= stranded, f"{taken} taken of {available}, {left} left"
        if taken <= stats.free_blocks:
            assert self.cache.stats().evicted_blocks == stats.evicted_blocks, "evicted without need"
        if self.host:
            self.host.assert_needed(stats, moving, taken)
        if self.states:
            self.states.planned(one)
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

    def lengthen(self, one: Tracked, tokens: Sequence[int], spare: int) -> None:
        """Add tokens to a pending plan of known tokens, as far as that takes free blocks only."""
        assert one.plan is not None and one.planned and not one.executed and one.unknown < 0
        before, free = self.cache.stats(), self.cache.free_blocks
        plan = one.seq.lengthen(one.plan, self.shaped(tokens), spare)
        plans.lengthen(self, one, plan, list(tokens), spare, free)
        after = self.cache.stats()
        assert (after.evicted_blocks, after.copied_blocks) == (before.evicted_blocks, before.copied_blocks)
        self.assert_refused(InvalidTokens, lambda: one.seq.lengthen(plan, [-1]))

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
        if self.mirror:
            self.mirror.forget_uncounted()
        before = self.cache.stats()
        one.seq.publish(length)
        one.table = one.seq.block_table.tolist()
        if one.purpose != "audit":
            one.forked &= length < len(one.tokens) or one.published == length
            one.published = max(one.published, length)
            self.note_published(one)
            self.private.difference_update(one.table, *(one.plan.copies if one.plan else ()))
            assert self.match(one.namespace, one.tokens).length >= one.published
        assert self.cache.stats().evicted_blocks == before.evicted_blocks
        assert self.cache.free_blocks >= before.free_blocks
        self.assert_sequence(one)

    def note_published(self, one: Tracked) -> None:
        self.texts.setdefault(one.namespace, Texts()).add(one.tokens[: one.published])
        if self.states:
            self.states.published(one)

    def execute(self, some: Sequence[Tracked]) -> None:
        """Run the plans of several sequences in one step: moves, copies of states, copies, loads and writes."""
        waiting = [one for one in some if one.plan is not None and not one.executed]
        if self.host and waiting:
            self.host.run_moves()
        if self.states and waiting:
            self.states.run_copies()
        self.pool.execute([Work(one.plan, self.values(one)) for one in waiting if one.plan is not None])
        for one in waiting:
            one.executed = True
        if self.states:
            for one in self.rng.sample(waiting, len(waiting)):
                self.states.run_chunk(one)

    def values(self, one: Tracked) -> Values:
        """The values to write; those of a load are read from the host."""
        values = kv(one.namespace, one.tokens + one.planned)[len(one.tokens) :]
        if self.host:
            self.host.assert_loads(one, values)
        return values

    def commit(self, one: Tracked, publish: bool = True) -> None:
        self.execute([one])
        if publish and one.unknown >= 0 and one.purpose != "audit":
            self.assert_refused(UnknownToken, one.seq.commit)
            self.resolve(one)
        if self.mirror:  # moves that failed in this step have dropped text before it is published again
            self.mirror.forget_uncounted()
        before = self.cache.stats()
        one.seq.commit(publish)
        one.tokens += one.planned
        one.plan, one.planned, one.executed, one.table = None, [], False, one.seq.block_table.tolist()
        found = self.host.committed(one, before) if self.host else 0
        if self.mirror and found:
            self.mirror.loaded(one, found)
        if publish and one.purpose != "audit":
            one.forked &= one.published == len(one.tokens)
            one.published = len(one.tokens)
            self.note_published(one)
            self.private.difference_update(one.table)
            if self.mirror and found:
                self.mirror.found(one, one.tokens, len(one.tokens) - found)
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
        """Fork a sequence; return None if that is refused."""
        if one.plan is not None:
            self.assert_refused(PlanPending, one.seq.fork)
            return None
        if self.states and self.states.refuses_fork(one):
            return None
        before = self.cache.stats()
        twin = Tracked(one.seq.fork(), one.namespace, list(one.tokens), one.published, list(one.table), one.purpose)
        twin.unknown, twin.forked = one.unknown, one.published < len(one.tokens)
        one.forked |= twin.forked
        self.live.append(twin)
        assert twin.seq.cached_length == one.seq.cached_length
        assert (twin.seq.namespace, twin.seq.purpose) == (one.namespace, one.purpose)
        assert twin.seq.block_table.tolist() == one.table
        assert self.cache.free_blocks == before.free_blocks
        self.assert_sequence(twin)
        if self.states:
            self.states.forked(one, twin)
        return twin

    def truncate(self, one: Tracked, length: int) -> None:
        if one.plan is not None:
            self.assert_refused(PlanPending, lambda: one.seq.truncate(length))
            return
        before = self.cache.stats()
        one.seq.truncate(length)
        plans.cut(self, one, one.seq.length)
        if self.states:
            length = self.states.cut(one, length)
        one.tokens, one.published = one.tokens[:length], min(one.published, length)
        one.unknown = one.unknown if one.unknown < length else -1
        whole, table = length // self.block_size, one.seq.block_table.tolist()
        assert len(table) == -(-length // self.block_size)
        assert table[:whole] == one.table[:whole]  # a part-filled last block may become an equal one
        one.table = table
        assert self.cache.free_blocks >= before.free_blocks
        self.assert_sequence(one)

    def close(self, one: Tracked, hint: Hint | None = None) -> None:
        if self.host and self.options.ample and hint is not None and hint.done:
            hint = None  # text that is done is evicted, although the host has room
        if self.states:
            self.states.closing(one, hint)
        before = self.cache.stats()
        one.seq.close(hint)
        self.live = [other for other in self.live if other is not one]
        assert one.seq.closed
        assert self.cache.free_blocks >= before.free_blocks
        assert self.cache.stats().evicted_blocks == before.evicted_blocks
        if self.host:
            self.host.loads.pop(one.seq.id, None)
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
