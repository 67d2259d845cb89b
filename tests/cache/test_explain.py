"""`explain`: each reason for a hit or miss, and no information across namespaces."""

from dataclasses import FrozenInstanceError

import pytest

from radixkv.cache import PrefixCache
from tests.cache.test_pins import Clock, squeeze
from tests.cache.verbs import cached, prompt, publish


def test_full() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 10))
    explanation = cache.explain(prompt(1, 10))
    assert (explanation.tokens, explanation.matched, explanation.length, explanation.reason) == (10, 10, 10, "full")
    assert (explanation.diverged_at, explanation.evicted_tokens, explanation.evicted_ago, explanation.pressure) == (
        None,
        0,
        None,
        None,
    )
    assert cache.explain(prompt(1, 7)).reason == "full"


def test_never_seen() -> None:
    cache = PrefixCache(8, 4)
    explanation = cache.explain([1, 2, 3])
    assert (explanation.tokens, explanation.matched, explanation.length, explanation.reason) == (3, 0, 0, "never_seen")
    assert explanation.diverged_at is None


def test_diverged_at_a_token() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 10))
    explanation = cache.explain([*prompt(1, 6), 77, 78])
    assert (
        explanation.tokens,
        explanation.matched,
        explanation.length,
        explanation.reason,
        explanation.diverged_at,
    ) == (8, 6, 6, "diverged", 6)
    assert "6" in str(explanation)


def test_diverged_at_a_fork_of_the_road() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, [*prompt(1, 6), 50])
    publish(cache, [*prompt(1, 6), 60])
    explanation = cache.explain([*prompt(1, 6), 70])
    assert (explanation.reason, explanation.diverged_at) == ("diverged", 6)


def test_held_back_by_limit() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 10))
    explanation = cache.explain(prompt(1, 10), limit=9)
    assert (explanation.tokens, explanation.matched, explanation.length, explanation.reason) == (10, 10, 9, "limit")
    assert "limit" in str(explanation)


@pytest.mark.parametrize("limit", [0, 5, 6, 7])
def test_a_limit_is_blamed_only_for_what_it_held_back(limit: int) -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 10))
    explanation = cache.explain([*prompt(1, 6), 77], limit=limit)
    assert explanation.length == min(6, limit)
    assert explanation.reason == ("limit" if limit < 6 else "diverged")
    assert PrefixCache(8).explain([1, 2], limit=0).reason == "never_seen"


def test_evicted_how_long_ago_and_under_which_pressure() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    publish(cache, prompt(1, 12))
    clock.now += 5
    squeeze(cache)
    clock.now += 30
    explanation = cache.explain(prompt(1, 12))
    assert (explanation.matched, explanation.reason, explanation.evicted_tokens) == (0, "evicted", 12)
    assert explanation.evicted_ago == pytest.approx(30)
    assert explanation.pressure
    assert explanation.pressure in str(explanation)
    assert "30" in str(explanation)


def test_evicted_in_part() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 16))
    seq = cache.open([], "other")
    seq.extend([0] * 4 * 6)
    assert cached(cache, prompt(1, 16)) == 8
    explanation = cache.explain(prompt(1, 16))
    assert (explanation.matched, explanation.reason, explanation.evicted_tokens) == (8, "evicted", 8)
    longer = cache.explain([*prompt(1, 16), 5, 5])
    assert (longer.reason, longer.evicted_tokens) == ("evicted", 8)


def test_what_was_evicted_is_compared_too() -> None:
    """An eviction does not explain the miss of a prompt that diverges from the evicted text."""
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 16))
    seq = cache.open([], "other")
    seq.extend([0] * 4 * 6)
    explanation = cache.explain([*prompt(1, 8), 99, 99])
    assert explanation.matched == 8
    assert explanation.reason in {"never_seen", "diverged"}
    assert explanation.evicted_tokens == 0
    partly = cache.explain([*prompt(1, 11), 99])
    assert (partly.reason, partly.evicted_tokens) == ("evicted", 3)


def test_what_came_back_is_evicted_no_more() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 12))
    squeeze(cache)
    assert cache.explain(prompt(1, 12)).reason == "evicted"
    publish(cache, prompt(1, 12))
    assert cache.explain(prompt(1, 12)).reason == "full"
    assert cache.explain([*prompt(1, 12), 1]).evicted_tokens == 0


def test_nothing_leaks_across_namespaces() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    publish(cache, prompt(1, 12), "secret tenant")
    for stranger in (None, "other"):
        assert cache.explain(prompt(1, 12), stranger).reason == "never_seen"
        assert cache.explain([*prompt(1, 6), 9], stranger) == PrefixCache(8, 4).explain([*prompt(1, 6), 9], stranger)
    publish(cache, prompt(2, 32), "flooding tenant")
    assert cached(cache, prompt(1, 12), "secret tenant") == 0
    for stranger in (None, "other", "flooding tenant"):
        explanation = cache.explain(prompt(1, 12), stranger)
        assert (explanation.reason, explanation.evicted_tokens, explanation.evicted_ago) == ("never_seen", 0, None)
    explanation = cache.explain(prompt(1, 12), "secret tenant")
    assert explanation.reason == "evicted"
    assert "flooding" not in str(explanation)
    assert "flooding" not in repr(explanation)


def test_a_namespace_that_went_and_came_keeps_its_memory_to_itself() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 12), "a")
    cache.clear()
    squeeze(cache)
    assert cache.stats().namespaces == 0
    assert cache.explain(prompt(1, 12), "b").reason == "never_seen"
    assert cache.explain(prompt(1, 12), "a").reason in {"evicted", "never_seen"}


def test_clear_forgets_what_was_evicted_too() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 12))
    squeeze(cache)
    assert cache.stats().ghosts > 0
    cache.clear()
    assert cache.stats().ghosts == 0
    assert cache.explain(prompt(1, 12)).reason == "never_seen"
    publish(cache, prompt(1, 12))
    assert cache.stats().regret_tokens == 0


def test_ghosts_are_bounded() -> None:
    """Old ghosts are forgotten: the memory is bounded."""
    cache = PrefixCache(16, 4)
    for name in range(5_000):
        publish(cache, prompt(name, 16))
    assert cache.explain(prompt(0, 16)).reason == "never_seen"
    assert cache.explain(prompt(4_994, 16)).reason == "evicted"
    assert cache.stats().ghosts < 1_000


@pytest.mark.parametrize("length", [0, 5, 9, 10, 13])
def test_is_one_plain_sentence(length: int) -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 10))
    for limit in (None, 3):
        sentence = str(cache.explain([*prompt(1, 13)][:length], limit=limit))
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert str(length) in sentence


def test_is_frozen() -> None:
    explanation = PrefixCache(8, 4).explain([1])
    with pytest.raises(FrozenInstanceError):
        explanation.reason = "full"  # type: ignore[misc]


def publish_all(cache: PrefixCache, tokens: list[int]) -> None:
    with cache.open(tokens) as sequence:
        sequence.extend(tokens[sequence.length :])
        sequence.commit()


def evict_for(cache: PrefixCache, blocks: int) -> None:
    """Evict until `blocks` are free."""
    with cache.open([]) as sequence:
        sequence.extend([99] * (blocks * cache.block_size))


class TestGhostsTellTheTruth:
    """Ghosts that followed an evicted text must not explain another text that took its place."""

    def test_of_a_node_that_grew_another_way(self) -> None:
        cache = PrefixCache(8, 1)
        publish_all(cache, [1, 2, 3, 4, 5, 6])
        evict_for(cache, 3)  # 6 went
        evict_for(cache, 5)  # 4 and 5 went
        with cache.open([1, 2, 3]) as sequence:
            sequence.extend([7, 8])
            sequence.commit()
        assert cache.explain([1, 2, 3, 7, 8, 6]).reason == "never_seen"
        assert cache.explain([1, 2, 3, 4, 5, 6]).evicted_tokens == 3

    def test_of_a_text_that_came_back_in_part(self) -> None:
        cache = PrefixCache(8, 1)
        publish_all(cache, [1, 2, 3, 4, 5, 6])
        evict_for(cache, 8)
        publish_all(cache, [1, 2, 3])
        explanation = cache.explain([1, 2, 3, 4, 5, 6])
        assert (explanation.reason, explanation.evicted_tokens) == ("evicted", 3)

    def test_of_a_text_that_came_back_up_to_where_it_was_trimmed(self) -> None:
        cache = PrefixCache(8, 1)
        publish_all(cache, [1, 2, 3, 4])
        evict_for(cache, 6)
        evict_for(cache, 8)
        publish_all(cache, [1, 2])
        assert cache.explain([1, 2, 3, 4]).evicted_tokens == 2

    def test_each_evicted_token_is_regretted_once(self) -> None:
        cache = PrefixCache(8, 1)
        publish_all(cache, [1, 2, 3, 4, 5, 6])
        evict_for(cache, 8)
        cache.open([1, 9]).close()
        assert cache.stats().regret_tokens == 1
        cache.open([1, 2, 3, 4, 5, 6]).close()
        cache.open([1, 2, 3, 4, 5, 6]).close()
        assert cache.stats().regret_tokens == 6

    def test_the_same_text_evicted_again_and_again_is_remembered_once(self) -> None:
        cache = PrefixCache(8, 1)
        for _ in range(200):
            publish_all(cache, [1, 2, 3, 4, 5, 6])
            evict_for(cache, 8)
        assert cache.stats().ghosts == 1
        publish_all(cache, [7, 8])
        evict_for(cache, 8)
        assert cache.stats().ghosts == 2
        assert cache.explain([1, 2, 3, 4, 5, 6]).evicted_tokens == 6

    def test_after_a_token_that_differs_nothing_was_evicted(self) -> None:
        cache = PrefixCache(8, 1)
        publish_all(cache, [1, 2, 3, 4, 5, 6])
        evict_for(cache, 3)  # 6
        evict_for(cache, 8)  # and the rest
        assert cache.explain([1, 2, 3, 4, 5, 6]).evicted_tokens == 6
        assert cache.explain([1, 2, 9, 6]).evicted_tokens == 2
