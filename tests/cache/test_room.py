"""`idle_blocks` of a match and `unshared_length` of a sequence, against measurements."""

import random

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import InvalidInput, SequenceClosed
from tests.cache.test_eviction import flood
from tests.cache.verbs import cached, forked, held, prompt, publish


def room(cache: PrefixCache) -> int:
    return cache.free_blocks + cache.evictable_blocks


def falls(cache: PrefixCache, tokens: list[int]) -> int:
    """Measure by how much free + evictable blocks fall when `tokens` are opened."""
    before = room(cache)
    cache.open(tokens)
    cache.check()
    return before - room(cache)


class TestIdleBlocks:
    def test_differ_from_an_unpublished_forks(self) -> None:
        cache, twin = forked()
        assert [cache.match(prompt(1, length)).idle_blocks for length in (1, 4, 5, 10)] == [0, 0, 0, 0]
        assert falls(cache, prompt(1, 5)) == 0
        twin.close()


class TestUnsharedLength:
    def test_is_only_what_is_committed(self) -> None:
        cache = PrefixCache(16, 4)
        one = held(cache, prompt(1, 10))
        one.extend([5, 6, 7])
        assert one.unshared_length == 10

    def test_of_a_closed_sequence_is_refused(self) -> None:
        one = PrefixCache(16, 4).open([])
        assert one.unshared_length == 0
        one.close()
        with pytest.raises(SequenceClosed):
            _ = one.unshared_length

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_is_what_is_lost_when_it_is_closed_and_the_rest_is_evicted(self, size: int) -> None:
        lost = 0
        for seed in range(60):
            rng = random.Random(seed)
            cache = PrefixCache(120, size)
            some = []
            for _ in range(5):
                text = [rng.randrange(2) for _ in range(rng.randrange(4))] + [1] * rng.randrange(12)
                some.append(cache.open(text))
                some[-1].extend(text[some[-1].length :])
                some[-1].commit(publish=rng.random() < 0.8)
                if rng.random() < 0.3:
                    some.append(some[-1].fork())
            cache.pin([1] * rng.randrange(8))
            one = rng.choice(some)
            tokens, unshared = one.tokens, one.unshared_length
            one.close()
            flood(cache, room(cache))
            left = cache.match(tokens).length
            # tokens that share a block with held tokens may stay: evicting them would free nothing
            assert len(tokens) - unshared <= left < len(tokens) - unshared + size
            lost += unshared
        assert lost > 60


class TestEvict:
    def test_frees_the_block_that_a_leaf_shares_with_a_pinned_node_that_has_a_copy(self) -> None:
        """As in life 6283: a pin on two tokens holds two blocks while an unpinned leaf shares the first one."""
        cache = PrefixCache(4, 4)
        publish(cache, [1, 2, 3, 4])
        publish(cache, [1, 5, 6])
        pin = cache.pin([1, 5])
        cache.check()
        assert pin.blocks == 1
        assert room(cache) == 2
        assert cache.evict(3), "the pinned node takes the copy"
        cache.check()
        assert cache.free_blocks == 3
        assert not cache.evict(4), "the pinned block stays"
        assert cached(cache, [1, 5]) == 2

    def test_evicts_what_a_pin_held_whose_time_is_over(self) -> None:
        now = [100.0]
        cache = PrefixCache(4, 4, clock=lambda: now[0])
        publish(cache, prompt(1, 16))
        cache.pin(prompt(1, 8), ttl=10)
        assert not cache.evict(4)
        now[0] += 10.1
        assert cache.evict(4)

    def test_evicts_nothing_if_enough_is_free(self) -> None:
        cache = PrefixCache(4, 4)
        publish(cache, [1, 2, 3])
        assert cache.evict(3)
        assert cached(cache, [1, 2, 3]) == 3
        assert cache.stats().evicted_blocks == 0

    def test_refuses_what_is_no_number(self) -> None:
        with pytest.raises(InvalidInput):
            PrefixCache(4, 4).evict(1.5)  # type: ignore[arg-type]
