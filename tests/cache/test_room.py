"""`idle_blocks` of a match and `unshared_length` of a sequence, against measurements."""

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import InvalidInput, SequenceClosed
from tests.cache.verbs import cached, prompt, publish


def room(cache: PrefixCache) -> int:
    return cache.free_blocks + cache.evictable_blocks


class TestUnsharedLength:
    def test_of_a_closed_sequence_is_refused(self) -> None:
        one = PrefixCache(16, 4).open([])
        assert one.unshared_length == 0
        one.close()
        with pytest.raises(SequenceClosed):
            _ = one.unshared_length


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
