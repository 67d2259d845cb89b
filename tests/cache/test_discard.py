"""`discard` forgets exactly the wrong KV, or refuses and changes nothing."""

from typing import Any

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import CacheError, InvalidInput, InvalidTokens, PrefixHeld
from tests.cache.freeze import freeze
from tests.cache.test_eviction import flood
from tests.cache.verbs import cached, forked, prompt, publish


def discard(cache: PrefixCache, tokens: list[int], start: int = 0) -> int:
    free = cache.free_blocks
    freed = cache.discard(tokens, start=start)
    cache.check()
    assert cache.free_blocks == free + freed
    return freed


def assert_refused(cache: PrefixCache, tokens: list[int], start: int = 0) -> None:
    before = freeze(cache)
    with pytest.raises(PrefixHeld, match="held"):
        cache.discard(tokens, start=start)
    assert freeze(cache) == before


def test_is_no_eviction_and_leaves_no_ghosts() -> None:
    cache = PrefixCache(16, 4)
    publish(cache, prompt(1, 10))
    publish(cache, [*prompt(1, 10), 5])
    discard(cache, prompt(1, 10), 6)
    stats = cache.stats()
    assert (stats.evicted_blocks, stats.evicted_tokens, stats.ghosts) == (0, 0, 0)
    assert cache.explain(prompt(1, 10)).reason == "never_seen"
    publish(cache, prompt(1, 10))
    assert cache.stats().regret_tokens == 0


def test_what_was_evicted_after_it_is_not_told_of_either() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 16))
    flood(cache, 6)
    assert cache.explain(prompt(1, 16)).reason == "evicted"
    discard(cache, prompt(1, 16), 4)
    assert cache.explain(prompt(1, 16)).reason == "never_seen"
    publish(cache, prompt(1, 8))
    assert cache.explain(prompt(1, 16)).reason == "never_seen"


class TestHeld:
    def test_by_a_pin_is_refused_until_its_time_is_over(self) -> None:
        now = 0.0
        cache = PrefixCache(16, 4, clock=lambda: now)
        publish(cache, prompt(1, 14))
        pin = cache.pin(prompt(1, 10), ttl=5)
        assert_refused(cache, prompt(1, 14), 9)
        assert discard(cache, prompt(1, 14), 12) == 1
        now = 6.0
        assert discard(cache, prompt(1, 14), 4) == 2
        assert not pin.active

    @pytest.mark.parametrize("start", [0, 3, 7, 9])
    def test_as_a_forks_unpublished_tail_is_refused(self, start: int) -> None:
        """Nothing is locked, but the fork has the same KV and would publish it again."""
        cache, twin = forked()
        assert cache.stats().leaves == 1
        assert_refused(cache, prompt(1, 10), start)
        twin.truncate(start)
        assert discard(cache, prompt(1, 10), start) >= 0
        twin.close()
        cache.check()

    def test_is_not_what_a_fork_wrote_otherwise(self) -> None:
        cache, twin = forked()
        twin.truncate(4)
        twin.extend([99] * 6)
        assert_refused(cache, prompt(1, 10), 3)
        assert discard(cache, prompt(1, 10), 4) == 2
        twin.close()
        assert discard(cache, prompt(1, 10), 3) == 0

    def test_as_the_block_that_a_fork_copies_is_refused(self) -> None:
        cache = PrefixCache(16, 4)
        first = cache.open([])
        first.extend(prompt(1, 3))
        first.commit(publish=False)
        twin = first.fork()
        first.extend([7])
        first.commit()
        first.close()
        assert len(twin.extend([8]).copies) == 1
        assert_refused(cache, [*prompt(1, 3), 7], 2)
        assert discard(cache, [*prompt(1, 3), 7], 3) == 0
        twin.commit()
        assert discard(cache, prompt(1, 3), 3) == 0
        twin.close()
        assert discard(cache, [*prompt(1, 3), 8]) == 1

    def test_is_a_cache_error(self) -> None:
        assert issubclass(PrefixHeld, CacheError)


@pytest.mark.parametrize("start", [-1, 1.0, "1", None, True])
def test_refuses_a_start_that_is_none(start: Any) -> None:
    cache = PrefixCache(16, 4)
    publish(cache, prompt(1, 10))
    with pytest.raises(InvalidInput, match="start="):
        cache.discard(prompt(1, 10), start=start)
    with pytest.raises(InvalidTokens):
        cache.discard([1, -1])
    assert cached(cache, prompt(1, 10)) == 10
