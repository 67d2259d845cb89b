"""Eviction that learns: its gains, its losses against LRU, its memory, and its parts."""

import math
import random
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import Hint, PrefixCache
from radixkv.cache.ghosts import Ghost, Ghosts, Pressure
from radixkv.cache.predictive.access_records import KINDS, MOST_USES, AccessRecord, next_bounds, size_class
from radixkv.cache.predictive.hazard_model import BUCKETS, EDGES, HazardModel, Traits, _best_rates
from radixkv.cache.predictive.index import MOVES, PredictiveIndex
from radixkv.cache.predictive.lru_baseline import HEADROOM, LruBaseline
from tests.cache.verbs import publish
from tests.cache.workloads import WORKLOADS, Fresh, Request, hits, replay

PLAIN = Traits(0, 1, 0, 0, 0, False)


def learner(cache: PrefixCache) -> PredictiveIndex:
    index = cache.state.index
    assert isinstance(index, PredictiveIndex)
    return index


class TestHits:
    @pytest.mark.parametrize(
        ("workload", "blocks", "gain"), [("scan", 150, 0.10), ("documents", 120, 0.04), ("kinds", 150, 0.03)]
    )
    def test_beats_lru_where_there_is_something_to_learn(self, workload: str, blocks: int, gain: float) -> None:
        requests = WORKLOADS[workload](random.Random(1), 1500)
        asked = sum(len(request.chain) for request in requests)
        lru, learnt = hits(requests, blocks, "lru")[0], hits(requests, blocks, "predictive")[0]
        assert learnt - lru > gain * asked

    @pytest.mark.parametrize("workload", ["walk", "stack", "turns"])
    @pytest.mark.parametrize("blocks", [20, 120])
    def test_loses_next_to_nothing_where_lru_is_right(self, workload: str, blocks: int) -> None:
        requests = WORKLOADS[workload](random.Random(2), 1200)
        asked = sum(len(request.chain) for request in requests)
        lru, learnt = hits(requests, blocks, "lru")[0], hits(requests, blocks, "predictive")[0]
        assert learnt - lru > -0.003 * asked

    @pytest.mark.parametrize("workload", sorted(WORKLOADS))
    def test_keeps_its_books(self, workload: str) -> None:
        now = [0.0]
        cache = PrefixCache(25, 1, "predictive", clock=lambda: now[0])
        for _ in replay(cache, WORKLOADS[workload](random.Random(3), 300), now):
            cache.check()
        assert cache.stats().evicted_blocks > 100

    def test_is_the_same_every_time(self) -> None:
        requests = WORKLOADS["documents"](random.Random(4), 400)
        assert hits(requests, 80, "predictive")[0] == hits(requests, 80, "predictive")[0]

    def test_lru_decides_while_it_leads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LruBaseline, "leads", property(lambda baseline: True))
        requests = WORKLOADS["scan"](random.Random(5), 800)
        assert hits(requests, 60, "predictive")[0] == hits(requests, 60, "lru")[0]


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
@pytest.mark.parametrize("blocks", [30, 150])
def test_the_shadow_hits_exactly_what_lru_hits(workload: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's evictions do not matter as long as its ghosts suffice; in a tiny pool they may not."""
    followed: list[int] = []
    monkeypatch.setattr(LruBaseline, "compare", lambda baseline, asked, hit, lru_hit, known: followed.append(lru_hit))
    requests = WORKLOADS[workload](random.Random(6), 800)
    now = [0.0]
    lru = PrefixCache(blocks, 1, "lru", clock=lambda: now[0])
    expected = list(replay(lru, requests, now))
    now[0] = 0.0
    cache = PrefixCache(blocks, 1, "predictive", clock=lambda: now[0])
    own = list(replay(cache, requests, now))
    assert followed == expected or blocks == 30
    assert all(hits <= lru_hits for hits, lru_hits in zip(followed, expected, strict=True))
    assert sum(followed) >= 0.99 * sum(expected)
    assert own != expected or sum(own) == 0


class TestWhoDecides:
    def settled(self, baseline: LruBaseline, length: int) -> AccessRecord:
        record = AccessRecord(0.0)
        record.settle(0.0, length, 1, 0, 0, HazardModel().classed)
        baseline.insert(record)
        return record

    def test_lru_unless_it_misses_what_is_remembered(self) -> None:
        baseline = LruBaseline(1000)
        assert not baseline.leads  # nothing was asked for, and nothing can be lost
        baseline.compare(1000, 500, 500, 500 + int(1000 * HEADROOM) - 1)
        assert baseline.leads
        baseline.compare(1000, 500, 500, 600)
        assert not baseline.leads

    def test_lru_while_it_is_ahead(self) -> None:
        baseline = LruBaseline(1000)
        baseline.compare(1000, 490, 500, 700)
        assert baseline.leads
        baseline.compare(1000, 600, 500, 700)
        assert not baseline.leads

    def test_lru_while_too_much_is_gone_that_it_would_hold(self) -> None:
        baseline = LruBaseline(1000)
        record = self.settled(baseline, 900)
        baseline.compare(1000, 0, 0, 500)
        assert not baseline.leads
        baseline.evicted(record, 500)
        assert baseline.leads
        self.settled(baseline, 600)  # LRU evicts it too
        assert record.kept_to == 400
        assert not baseline.leads

    @pytest.mark.parametrize("workload", ["scan", "documents", "turns"])
    def test_a_pool_in_which_next_to_nothing_is_missed_is_left_to_lru(self, workload: str) -> None:
        requests = WORKLOADS[workload](random.Random(9), 600)
        blocks = len({block for request in requests for block in request.chain}) * 9 // 10
        lru, learnt = hits(requests, blocks, "lru"), hits(requests, blocks, "predictive")
        assert learnt[0] == lru[0]
        assert learnt[1].stats().evicted_blocks > 0


class TestHints:
    def test_an_announced_return_keeps_its_text(self) -> None:
        now = [0.0]
        cache = PrefixCache(40, 1, "predictive", clock=lambda: now[0])
        new, soon = Fresh(), list(range(10**6, 10**6 + 5))
        for _ in replay(cache, [Request(float(i), new.run(4)) for i in range(100)], now):
            pass
        for text, hint in ((soon, Hint(returns_in=8.0)), *((new.run(4), None) for _ in range(20))):
            now[0] += 0.25
            with cache.open(text) as sequence:
                sequence.extend(text[sequence.length :])
                sequence.commit()
                sequence.close(hint)
            cache.check()
        assert cache.match(soon).length == 5

    def test_done_goes_first(self) -> None:
        cache = PrefixCache(8, 1, "predictive")
        for text, done in (([1, 2], False), ([3, 4], True), ([5, 6], False)):
            with cache.open(text) as sequence:
                sequence.extend(text)
                sequence.commit()
                sequence.close(Hint(done=done))
        with cache.open([], "other") as flood:
            flood.extend([0] * 4)
        assert [cache.match(text).length for text in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]

    def test_kinds_without_end_are_told_apart_up_to_a_number(self) -> None:
        requests = [Request(float(i), [i], f"kind {i}") for i in range(200)]
        _, cache = hits(requests, 10, "predictive")
        assert len(learner(cache)._kinds) == KINDS
        assert len(learner(cache).hazard_model) < 60


class TestMemory:
    def test_is_bounded_by_the_pool(self) -> None:
        new = Fresh()
        now = [0.0]
        cache = PrefixCache(30, 1, "predictive", clock=lambda: now[0])
        requests = [Request(float(i), new.run(1 + i % 3), output=i) for i in range(600)]
        for _ in replay(cache, requests, now):
            assert len(cache.state.ghosts) <= 30
            assert cache.state.ghosts.tokens <= 30
            assert learner(cache).records <= 60
            assert len(learner(cache).baseline) <= 30
            claimed = sum(record.end - record.start for ages in learner(cache)._ages for record in ages)
            ghosts = [*cache.state.ghosts._runs.values(), *cache.state.ghosts._faded.values()]
            assert claimed == cache.evictable_blocks + sum(ghost.size for ghost in ghosts) // 4
        cache.clear()
        cache.check()
        assert learner(cache).records == len(learner(cache).baseline) == len(cache.state.ghosts) == 0

    def test_is_bounded_even_if_nothing_is_ever_told_as_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PredictiveIndex, "forget", lambda index, record, start: None)
        new = Fresh()
        _, cache = hits([Request(float(i), new.run(2)) for i in range(300)], 30, "predictive")
        assert learner(cache).records == 60

    @pytest.mark.parametrize("blocks", [50, 800])
    def test_worths_looked_at_for_each_request_do_not_grow_with_the_pool(
        self, blocks: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = [0]
        look = PredictiveIndex._worth

        def counted(index: PredictiveIndex, node: object) -> float:
            looks[0] += 1
            return look(index, node)  # type: ignore[arg-type]

        monkeypatch.setattr(PredictiveIndex, "_worth", counted)
        _, cache = hits(WORKLOADS["documents"](random.Random(7), 1000), blocks, "predictive")
        assert cache.stats().evicted_blocks > 500
        assert looks[0] < 1000 * 2 * BUCKETS


@st.composite
def histories(draw: st.DrawFn) -> list[int]:
    """The lengths of several requests, in order, along one path."""
    return draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))


class TestUse:
    @given(histories())
    def test_claims_and_bounds_match_a_walk_token_by_token(self, lengths: list[int]) -> None:
        times, last = [0] * 31, [-1] * 31
        records: list[AccessRecord] = []
        hazard_model = HazardModel()
        for number, length in enumerate(lengths):
            parts = sorted(
                ((each.start, min(length, each.end), each) for each in records if each.start < min(length, each.end)),
                key=lambda part: -part[0],
            )
            bounds = next_bounds(parts)
            expected = [
                max((at for at in range(1, length + 1) if times[at] >= uses_before), default=0)
                for uses_before in range(1, MOST_USES + 1)
            ]
            assert list(bounds) == expected
            for _, end, record in parts:
                record.start = end
            record = AccessRecord(float(number), bounds)
            record.settle(float(number), length, 4, 0, 0, hazard_model.classed)
            records.append(record)
            for at in range(1, length + 1):
                tail = record.tail(at)
                assert tail is not None
                assert tail[1].traits.uses == min(MOST_USES, times[at])
                assert tail[1].traits.last == ((at - 1) // 4 == (length - 1) // 4)
                assert tail[0] < at
                times[at], last[at] = times[at] + 1, number
            for known, claim in enumerate(records):
                assert [at for at in range(1, 31) if last[at] == known] == list(range(claim.start + 1, claim.end + 1))
                assert sum(tokens for _, tokens in claim.split(0, 99)) == claim.end - claim.start

    def test_size_classes_are_powers(self) -> None:
        assert [size_class(x) for x in (-1, 0, 0.2, 1, 2, 3, 4, 1e9)] == [0, 0, 1, 1, 2, 2, 3, 12]
        assert [size_class(x, 2, 3) for x in (1, 3.9, 4, 16, 1e9)] == [1, 1, 2, 3, 3]


class TestHazards:
    def test_a_worth_is_the_best_rate_over_all_ends(self) -> None:
        hazard_model = HazardModel()
        reuse_class = hazard_model.classed(PLAIN)
        rng = random.Random(8)
        for bucket in range(BUCKETS):
            hazard_model.reach(reuse_class, bucket, 100.0)
            hazard_model.reuse(reuse_class, bucket, rng.uniform(0, 60))
        hazard_model.refresh()
        chances = hazard_model._hazards(PLAIN).tolist()
        for bucket in range(BUCKETS):
            alive, wanted, time, best = 1.0, 0.0, 0.0, 0.0
            for later in range(bucket, BUCKETS):
                width = (EDGES[later + 1] if later + 1 < BUCKETS else 2 * EDGES[later]) - EDGES[later]
                time += width * alive * (1 - chances[later] / 2)
                wanted += alive * chances[later]
                alive *= 1 - chances[later]
                best = max(best, wanted / time)
            assert math.isclose(hazard_model.worth(reuse_class, bucket), best, rel_tol=1e-9)

    def test_a_rate_is_finite_where_nothing_is_left_to_wait_for(self) -> None:
        rates = _best_rates([0.99] * BUCKETS)
        assert all(math.isfinite(rate) and rate >= 0.0 for rate in rates)
        assert _best_rates([0.0] * BUCKETS) == [0.0] * BUCKETS

    def test_what_was_wanted_more_often_is_worth_more(self) -> None:
        hazard_model = HazardModel()
        dear, cheap = hazard_model.classed(PLAIN), hazard_model.classed(PLAIN._replace(kind=1))
        for reuse_class, wanted in ((dear, 50.0), (cheap, 1.0)):
            hazard_model.reach(reuse_class, 3, 100.0)
            hazard_model.reuse(reuse_class, 3, wanted)
        hazard_model.refresh()
        assert hazard_model.worth(dear, 3) > 3 * hazard_model.worth(cheap, 3)

    def test_what_is_unknown_is_worth_what_all_are(self) -> None:
        hazard_model = HazardModel()
        known = hazard_model.classed(PLAIN)
        hazard_model.reach(known, 0, 1000.0)
        hazard_model.reuse(known, 0, 100.0)
        hazard_model.refresh()
        other = hazard_model.classed(Traits(1, 2, 3, 4, 5, True))
        of_all = (100.0 + 0.5) / (1000.0 + 5.0)
        assert math.isclose(hazard_model._hazards(other.traits)[0], of_all)


class TestFading:
    def ghost(self, tokens: bytes, number: int) -> Ghost:
        return Ghost(bytearray(tokens), number, 0.0, Pressure(1, 0), number, AccessRecord(0.0))

    def test_a_faded_run_is_followed_whole_or_not_at_all_and_only_on_demand(self) -> None:
        gone: list[int] = []
        ghosts = Ghosts(4, 3, lambda record, position: gone.append(position))
        first, second = b"aaaabbbbcccc", b"ddddeeee"
        ghosts.add("root", 0, self.ghost(first, 1))
        ghosts.add(1, 3, self.ghost(second, 2))
        assert (len(ghosts), ghosts.tokens, gone) == (2, 2, [])  # the first has faded
        asked = first + second
        assert [tokens for _, tokens in ghosts.follow("root", 0, asked, faded=True)] == [3, 2]
        assert ghosts.follow("root", 0, asked) == []
        assert ghosts.follow("root", 0, first[:8], faded=True) == []
        assert ghosts.follow("root", 0, b"aaaabbbbxxxx", faded=True) == []
        assert ghosts.adopt("root", 0, first, 99) == 1
        assert ghosts.adopt("root", 0, first[:8], 99) == 99

    def test_the_oldest_goes_when_there_are_too_many(self) -> None:
        gone: list[int] = []
        ghosts = Ghosts(4, 3, lambda record, position: gone.append(position))
        for number in range(6):
            ghosts.add("root", number, self.ghost(b"aaaabbbb", number))
        assert gone == [0, 1, 2]
        assert (len(ghosts), ghosts.tokens) == (3, 4)

    def test_without_a_reader_nothing_fades(self) -> None:
        ghosts = Ghosts(2, 9)
        for number in range(3):
            ghosts.add("root", number, self.ghost(b"aaaabbbb", number))
        assert (len(ghosts), ghosts.tokens) == (1, 2)


def served(cache: PrefixCache, tokens: list[int]) -> None:
    """One request from arrival to end."""
    with cache.open(tokens) as sequence:
        if sequence.length < len(tokens):
            sequence.extend(tokens[sequence.length :])
            sequence.commit()


def test_requests_that_come_of_age_together_delay_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now, entered = [0.0], []
    cache = PrefixCache(1200, 1, "predictive", clock=lambda: now[0])
    for text in range(1000):
        served(cache, [text])
    enter = PredictiveIndex._enter

    def counted(index: PredictiveIndex, record: AccessRecord, bucket: int, first: int | None = None) -> None:
        entered.append(record)
        enter(index, record, bucket, first)

    monkeypatch.setattr(PredictiveIndex, "_enter", counted)
    now[0] = 3600.0  # an idle hour
    served(cache, [5000])
    assert MOVES <= len(entered) <= 2 * MOVES + 4  # once at its open, once at its close
    for text in range(5001, 5006):
        served(cache, [text])
    cache.check()
    youngest = sum(map(len, learner(cache)._ages[: bisect_right(EDGES, 3000.0) - 1]))
    assert youngest == 6  # all old records have reached the bucket of their age


def test_an_age_that_was_passed_over_counts_as_reached() -> None:
    now = [0.0]
    cache = PrefixCache(8, 1, "predictive", clock=lambda: now[0])
    served(cache, [1])
    (record,) = learner(cache)._ages[0]
    now[0] = 100.0
    served(cache, [2])
    ((_, reuse_class),) = record.runs
    at = bisect_right(EDGES, 100.0) - 1
    assert record.bucket == at
    assert reuse_class.reached[: at + 2] == [2.0, *[1.0] * at, 0.0]  # the second access is of the same class, and young


def test_a_clock_that_goes_back_stands_still() -> None:
    now = [50.0]
    cache = PrefixCache(6, 1, "predictive", clock=lambda: now[0])
    for step, time in enumerate([50.0, 10.0, 60.0, -5.0, 61.0, 0.0, 300.0]):
        now[0] = time
        served(cache, [step, step + 1])
        cache.check()


def test_a_close_counts_the_tokens_after_the_prompt_as_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Traits] = []
    classed = HazardModel.classed
    monkeypatch.setattr(HazardModel, "classed", lambda model, traits: seen.append(traits) or classed(model, traits))
    cache = PrefixCache(8, 1, "predictive")
    with cache.open([1, 2, 3, 4]) as sequence:
        sequence.extend([1, 2, 3, 4, 5, 6])
        sequence.commit()
        seen.clear()
    assert {traits.output for traits in seen} == {size_class(2)} != {size_class(6)}


def test_discarded_text_is_claimed_by_no_access() -> None:
    cache = PrefixCache(8, 1, "predictive")
    publish(cache, [1, 2, 3, 4])
    record = learner(cache).victim().policy_data
    assert (record.start, record.end) == (0, 4)
    cache.discard([1, 2, 3, 4], start=2)
    cache.check()
    assert (record.start, record.end) == (0, 2)


def test_the_path_that_a_cut_sequence_left_has_a_record_of_its_own() -> None:
    cache = PrefixCache(5, 4, "predictive")
    publish(cache, [1] * 8 + [2] * 4)
    with cache.open([1] * 8) as cut:
        cut.truncate(4)
        cut.extend([3] * 8)
        cut.commit()
    for length in (4, 8, 12):  # evicts the ends of both branches, one after the other
        with cache.open([length] * 20) as other:
            other.extend([length] * length)
            cache.check()
