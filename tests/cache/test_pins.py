"""Pins: budget, ttl, and the facts that a pin reports."""

from contextlib import suppress

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import CacheError, InvalidInput, OutOfBlocks, PinBudgetExceeded
from tests.cache.freeze import freeze
from tests.cache.verbs import cached, prompt, publish


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def squeeze(cache: PrefixCache) -> None:
    """Evict everything that can be evicted."""
    seq = cache.open([], "squeeze")
    seq.extend([0] * (cache.block_size * (cache.free_blocks + cache.evictable_blocks)))
    seq.close()


class TestPinning:
    def test_text_that_is_cached_in_part_pins_that_part_and_says_so(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 10))
        pin = cache.pin([*prompt(1, 8), 99, 99])
        assert (pin.length, pin.complete, pin.blocks) == (8, False, 2)

    def test_text_that_is_not_cached_pins_nothing_and_says_so(self) -> None:
        cache = PrefixCache(8, 4)
        pin = cache.pin([1, 2, 3])
        assert (pin.length, pin.complete, pin.blocks) == (0, False, 0)
        assert cache.stats().pinned_blocks == 0
        pin.release()
        assert cache.stats().namespaces == 0


class TestReleasing:
    def test_twice_does_no_harm_to_another_pin(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 14))
        one, _two = cache.pin(prompt(1, 14)), cache.pin(prompt(1, 14))
        one.release()
        with suppress(CacheError):
            one.release()
        squeeze(cache)
        assert cached(cache, prompt(1, 14)) == 14
        cache.check()


class TestBudget:
    def test_is_half_of_the_pool(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 32))
        cache.stats()
        before = freeze(cache)
        with pytest.raises(PinBudgetExceeded):
            cache.pin(prompt(1, 17))
        assert freeze(cache) == before
        assert cache.pin(prompt(1, 16)).blocks == 4

    def test_may_be_told_otherwise(self) -> None:
        cache = PrefixCache(8, 4, pin_budget=1.0)
        publish(cache, prompt(1, 32))
        assert cache.pin(prompt(1, 32)).blocks == 8
        none = PrefixCache(8, 4, pin_budget=0.0)
        publish(none, prompt(1, 32))
        with pytest.raises(PinBudgetExceeded):
            none.pin(prompt(1, 1))

    def test_counts_all_pins_together(self) -> None:
        cache = PrefixCache(8, 4)
        for name in (1, 2, 3):
            publish(cache, prompt(name, 8))
        first = cache.pin(prompt(1, 8))
        cache.pin(prompt(2, 8))
        with pytest.raises(PinBudgetExceeded):
            cache.pin(prompt(3, 8))
        first.release()
        assert cache.pin(prompt(3, 8)).length == 8

    def test_counts_a_shared_block_once(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 16))
        for length in (16, 16, 8, 12, 4):
            cache.pin(prompt(1, length))
        assert cache.stats().pinned_blocks == 4

    def test_holds_for_the_gauge_too(self) -> None:
        """[0, 0, 0] ends inside a block that the pinned branch has copied: both blocks count against the budget."""
        cache = PrefixCache(2, 16)
        publish(cache, [0, 0, 0, 5])
        publish(cache, [0, 0, 0, 2])
        try:
            cache.pin([0, 0, 0, 2])
        except PinBudgetExceeded:
            assert cache.stats().pinned_blocks == 0
        assert cache.stats().pinned_blocks <= 1

    @pytest.mark.parametrize("budget", [-0.1, 1.1, float("nan"), "half"])
    def test_is_a_share(self, budget: float) -> None:
        with pytest.raises(InvalidInput):
            PrefixCache(8, 4, pin_budget=budget)


class TestTimeToLive:
    def test_is_over_when_room_is_needed(self) -> None:
        clock = Clock()
        cache = PrefixCache(8, 4, clock=clock)
        publish(cache, prompt(1, 16))
        cache.pin(prompt(1, 16), ttl=10)
        seq = cache.open([], "other")
        with pytest.raises(OutOfBlocks):
            seq.extend([0] * 32)
        clock.now += 10.1
        assert len(seq.extend([0] * 32).slots) == 32

    def test_leaves_a_late_release_harmless(self) -> None:
        clock = Clock()
        cache = PrefixCache(8, 4, clock=clock)
        publish(cache, prompt(1, 8))
        pin, _other = cache.pin(prompt(1, 8), ttl=10), cache.pin(prompt(1, 8))
        clock.now += 10.1
        cache.stats()
        with suppress(CacheError):
            pin.release()
        assert cache.stats().pinned_blocks == 2
        cache.check()

    @pytest.mark.parametrize("ttl", [-1, float("nan"), "soon"])
    def test_is_a_number_of_seconds(self, ttl: float) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 8))
        with pytest.raises(InvalidInput):
            cache.pin(prompt(1, 8), ttl=ttl)
        assert cache.stats().pinned_blocks == 0
