"""What a prompt takes of the room when it is opened, and what a sequence's end would cost."""

import pytest

from radixkv.cache import PrefixCache
from tests.cache.test_eviction import flood
from tests.cache.verbs import cached, prompt, publish


def room(cache: PrefixCache) -> int:
    return cache.free_blocks + cache.evictable_blocks


def falls(cache: PrefixCache, tokens: list[int]) -> int:
    """By how much the room falls when `tokens` are opened."""
    before = room(cache)
    cache.open(tokens)
    cache.check()
    return before - room(cache)


class TestIdleBlocks:
    def test_are_none_of_what_is_not_cached(self) -> None:
        cache = PrefixCache(16, 4)
        assert cache.match(prompt(1, 10)).idle_blocks == 0
        publish(cache, prompt(1, 10))
        assert cache.match(prompt(2, 10)).idle_blocks == 0
        assert cache.match([]).idle_blocks == 0
        assert cache.match(prompt(1, 10), "elsewhere").idle_blocks == 0

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 10])
    def test_are_all_blocks_of_what_nobody_holds(self, length: int) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, prompt(1, 10))
        found = cache.match(prompt(1, 10)[:length])
        assert found.idle_blocks == len(found.blocks) == -(-length // 4)
        assert falls(cache, prompt(1, 10)[:length]) == found.idle_blocks

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 10])
    def test_are_those_behind_what_somebody_holds(self, length: int) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, prompt(1, 20))
        cache.open(prompt(1, length))
        whole, part = cache.match(prompt(1, 20)), cache.match(prompt(1, length))
        assert part.idle_blocks == 0
        assert whole.idle_blocks == 5 - -(-length // 4)
        assert falls(cache, prompt(1, 20)) == whole.idle_blocks

    def test_are_none_of_what_is_pinned(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, prompt(1, 20))
        pin = cache.pin(prompt(1, 10))
        assert cache.match(prompt(1, 20)).idle_blocks == 2
        assert cache.match(prompt(1, 10)).idle_blocks == 0
        pin.release()
        assert cache.match(prompt(1, 10)).idle_blocks == 3

    def test_are_also_those_that_another_branch_wrote_on_in(self) -> None:
        """The block above the copy belongs to the path, too: nobody can evict it while the path is held."""
        cache = PrefixCache(16, 4)
        publish(cache, [1, 2, 3, 4])
        publish(cache, [1, 2, 3, 9])
        assert cache.evictable_blocks == 2
        branch = cache.match([1, 2, 3, 9])
        assert (len(branch.blocks), branch.idle_blocks) == (1, 2)
        assert falls(cache, [1, 2, 3, 9]) == 2

    def test_are_not_those_of_an_unpublished_fork(self) -> None:
        cache = PrefixCache(16, 4)
        first = cache.open([])
        first.extend(prompt(1, 10))
        first.commit(publish=False)
        twin = first.fork()
        first.commit()
        first.close()
        assert cache.match(prompt(1, 10)).idle_blocks == 0
        assert falls(cache, prompt(1, 10)) == 0
        twin.close()

    def test_may_be_one_more_than_the_room_falls(self) -> None:
        """Where only a copy is left below a pinned block, whoever opens the copy sets the block above free."""
        cache = PrefixCache(8, 4)
        publish(cache, [1, 2, 3, 4])
        cache.pin([1, 2, 3])
        publish(cache, [1, 2, 3, 9, 9, 9, 9, 9])
        flood(cache, 6)
        assert (cached(cache, [1, 2, 3, 4]), cached(cache, [1, 2, 3, 9, 9])) == (3, 4)
        assert cache.match([1, 2, 3, 9]).idle_blocks == 1
        assert falls(cache, [1, 2, 3, 9]) == 0
