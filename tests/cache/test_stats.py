"""Counters that only grow, gauges that add up, regret, and the events of an observer."""

from collections.abc import Callable, Hashable
from dataclasses import FrozenInstanceError

import pytest

from radixkv.cache import CacheStats, Observer, PrefixCache
from radixkv.cache.types import Purpose
from radixkv.errors import OutOfBlocks
from tests.cache.test_pins import squeeze
from tests.cache.verbs import cached, held, prompt, publish


class TestCounters:
    def test_count_what_opens_asked_and_hit(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, prompt(1, 10))
        publish(cache, prompt(1, 10))
        cache.open([*prompt(1, 6), 9, 9]).close()
        stats = cache.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (28, 16)
        assert stats.hit_rate == pytest.approx(16 / 28)

    def test_count_no_questions(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, prompt(1, 10))
        before = cache.stats()
        cache.match(prompt(1, 10))
        cache.explain(prompt(1, 10))
        cache.pin(prompt(1, 10)).release()
        assert cache.stats() == before

    def test_of_an_unused_cache_are_zero(self) -> None:
        stats = PrefixCache(16, 4).stats()
        assert (stats.query_tokens, stats.hit_tokens, stats.evicted_blocks, stats.regret_tokens) == (0, 0, 0, 0)
        assert (stats.num_blocks, stats.block_size, stats.free_blocks) == (16, 4, 16)
        assert stats.hit_rate == 0

    def test_count_evictions(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 10))
        squeeze(cache)
        stats = cache.stats()
        assert (stats.evicted_blocks, stats.evicted_tokens) == (3, 10)

    def test_count_copies(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 10))
        for token in (50, 60, 70):
            publish(cache, [*prompt(1, 9), token])
        assert cache.stats().copied_blocks == 3

    def test_do_not_shrink_at_clear(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 10))
        publish(cache, prompt(1, 10))
        before = cache.stats()
        cache.clear()
        after = cache.stats()
        assert (after.query_tokens, after.hit_tokens) == (before.query_tokens, before.hit_tokens)


TEXT = prompt(1, 12)


def open_thrice(cache: PrefixCache) -> None:
    for _ in range(3):
        cache.open(TEXT).close()


REGRETS: list[tuple[Callable[[PrefixCache], object], int]] = [  # requests for evicted text, and the regret
    (lambda cache: cache.match(TEXT), 0),
    (lambda cache: publish(cache, TEXT), 12),
    (lambda cache: [publish(cache, TEXT) for _ in range(3)], 12),
    (open_thrice, 12),
    (lambda cache: cache.open(TEXT, limit=5).close(), 5),
    (lambda cache: publish(cache, [*TEXT[:7], 99, 99]), 7),
    (lambda cache: publish(cache, TEXT, "b"), 0),
]


@pytest.mark.parametrize(("request_it", "tokens"), REGRETS)
def test_regret_is_what_was_evicted_and_is_requested(request_it: Callable[[PrefixCache], object], tokens: int) -> None:
    cache = PrefixCache(8, 4)
    publish(cache, TEXT)
    squeeze(cache)
    request_it(cache)
    assert cache.stats().regret_tokens == tokens


def test_regret_is_only_what_is_missing() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 16))
    seq = cache.open([], "other")
    seq.extend([0] * 4 * 6)
    seq.close()
    assert publish(cache, prompt(1, 16)) == 8
    assert cache.stats().regret_tokens == 8


class TestGauges:
    def test_add_up(self) -> None:
        cache = PrefixCache(32, 4)
        publish(cache, prompt(1, 16))
        publish(cache, prompt(2, 12), "a")
        cache.pin(prompt(1, 8))
        seq = held(cache, prompt(3, 10))
        seq.extend([5] * 4)
        stats = cache.stats()
        assert (stats.free_blocks, stats.cached_blocks, stats.held_blocks) == (32 - 4 - 3 - 4, 2 + 3, 2 + 4)
        assert stats.pinned_blocks == 2
        assert (stats.sequences, stats.namespaces) == (1, 2)
        assert (cache.free_blocks, cache.evictable_blocks) == (21, 5)

    def test_are_a_frozen_moment(self) -> None:
        cache = PrefixCache(32, 4)
        before = cache.stats()
        publish(cache, prompt(1, 16))
        assert before.free_blocks == 32
        assert isinstance(before, CacheStats)
        with pytest.raises(FrozenInstanceError):
            before.free_blocks = 3  # type: ignore[misc]


EVENTS = sorted(name for name in vars(Observer) if not name.startswith("_"))


class Listener:
    """Keeps the events of a cache."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        self.events.append(("opened", namespace, asked, hit, purpose))

    def closed(self, sequence: int, length: int) -> None:
        self.events.append(("closed", length))

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        self.events.append(("inserted", start, tokens))

    def grown(self, node: int, tokens: int) -> None:
        self.events.append(("grown", tokens))

    def split(self, node: int, upper: int, tokens: int) -> None:
        self.events.append(("split", tokens))

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        self.events.append(("trimmed", tokens, blocks, gone))

    def copied(self, sequence: int, source: int, target: int) -> None:
        self.events.append(("copied", source, target))

    def __getattr__(self, event: str) -> Callable[..., None]:
        return lambda *facts: None

    def names(self) -> list[object]:
        return [event[0] for event in self.events]


class Clumsy:
    """Accepts all events except one kind, at which it raises."""

    def __init__(self, fatal: str) -> None:
        self.fatal = fatal
        self.events: list[str] = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self.events.append(event)
            if event == self.fatal:
                raise ZeroDivisionError

        return note


class TestObserver:
    def test_hears_what_happens(self) -> None:
        observer = Listener()
        cache = PrefixCache(16, 4, observer=observer)
        publish(cache, prompt(1, 10), "a")
        assert observer.events == [("opened", "a", 10, 0, "request"), ("inserted", 0, 10), ("closed", 10)]
        observer.events.clear()
        publish(cache, [*prompt(1, 6), 50], "a")
        assert set(observer.names()[:2]) == {"opened", "split"}
        assert observer.names()[2:] == ["copied", "inserted", "closed"]
        assert {("opened", "a", 7, 6, "request"), ("split", 6), ("inserted", 6, 1)} < set(observer.events)
        observer.events.clear()
        squeeze(cache)
        assert sum(int(str(event[1])) for event in observer.events if event[0] == "trimmed") == 11

    def test_hears_what_a_sequence_is_for(self) -> None:
        observer = Listener()
        cache = PrefixCache(16, 4, observer=observer)
        cache.open([1], purpose="resume").close()
        cache.open([1, 2], purpose="audit").fork()
        told = [event for event in observer.events if event[0] == "opened"]
        assert told == [("opened", None, 1, 0, "resume"), ("opened", None, 2, 0, "audit")]

    def test_hears_a_leaf_grow(self) -> None:
        observer = Listener()
        cache = PrefixCache(16, 4, observer=observer)
        seq = held(cache, prompt(1, 10))
        seq.extend([1, 2])
        seq.commit()
        assert observer.events[-1] == ("grown", 2)

    def test_hears_nothing_of_questions_and_refusals(self) -> None:
        observer = Listener()
        cache = PrefixCache(4, 4, observer=observer)
        seq = held(cache, prompt(1, 10))
        observer.events.clear()
        cache.match(prompt(1, 5))
        cache.explain(prompt(1, 5))
        cache.stats()
        with pytest.raises(OutOfBlocks):
            seq.extend([1] * 100)
        assert observer.events == []

    @pytest.mark.parametrize("event", EVENTS)
    def test_that_raises_harms_nothing(self, event: str, caplog: pytest.LogCaptureFixture) -> None:
        """Any event may fail: the cache goes on as one without an observer, and one line is logged."""
        clumsy = Clumsy(event)
        loud, quiet = PrefixCache(9, 4, observer=clumsy), PrefixCache(9, 4)
        for number in range(12):
            text = prompt(number % 3, 6) + [number % 5] * (number * 7 % 11)
            for cache in (loud, quiet):
                seq = held(cache, text, number % 2)
                twin = seq.fork()
                for token, each in ((1, seq), (1, twin), (2, twin), (3, seq)):
                    each.extend([token])
                    each.commit()
                    cache.check()
                twin.close()
                cache.check()
                seq.extend([4])
                seq.commit()
                seq.close()
                cache.open(text[:3], number % 2).close()
                cache.open([], "empty").close()
                cache.check()
            assert loud.stats() == quiet.stats()
        for name in (5, 6, 5):
            for cache in (loud, quiet):
                publish(cache, prompt(name, 36))  # all of the pool: the evicted text is requested again
                cache.check()
        assert loud.stats() == quiet.stats()
        assert clumsy.events.index(event) == len(clumsy.events) - 1, "it was told of more"
        (record,) = caplog.records
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ZeroDivisionError)
        assert record.name == "radixkv.cache.observer"

    def test_that_lacks_an_ear_harms_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        cache = PrefixCache(6, 4, observer=object())  # type: ignore[arg-type]
        publish(cache, prompt(1, 10))
        cache.check()
        assert cached(cache, prompt(1, 10)) == 10
        assert len(caplog.records) == 1
