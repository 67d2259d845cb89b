"""What the fuzz does not see: contiguous blocks, namespaces that leave nothing, and arrays of callers."""

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from tests.cache.fuzz.options import Options
from tests.cache.fuzz.world import World
from tests.cache.verbs import cached, held, prompt, publish


def lengths(cache: PrefixCache) -> tuple[int, int, int]:
    stats = cache.stats()
    return stats.free_blocks, stats.cached_blocks, stats.held_blocks


class TestHits:
    @pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 31, 32, 33, 49, 50])
    def test_are_the_longest_common_prefix(self, shared: int) -> None:
        cache = PrefixCache(16)
        text = list(range(50))
        publish(cache, text)
        assert cached(cache, text[:shared] + [99] * 20) == shared
        assert cached(cache, text[:shared]) == shared

    def test_an_empty_prompt_hits_nothing(self) -> None:
        cache = PrefixCache(4)
        publish(cache, [1, 2, 3])
        seq = cache.open([])
        assert (seq.length, seq.cached_length, seq.tokens.tolist(), seq.block_table.tolist()) == (0, 0, [], [])
        assert cached(cache, []) == 0


class TestPublishing:
    def test_a_text_that_grows_token_by_token_stays_one_text(self) -> None:
        cache = PrefixCache(64, block_size=4)
        seq = cache.open([])
        for token in range(200):
            seq.extend([token])
            seq.commit()
        assert seq.tokens.tolist() == list(range(200))
        assert cached(cache, list(range(200))) == 200
        assert cache.stats().copied_blocks == 0
        assert cache.stats().nodes <= 2  # the text, and perhaps its namespace's root


class TestForks:
    def test_a_node_that_takes_over_the_blocks_of_forks_lends_its_first_one_to_the_node_above(self) -> None:
        """As in life 19355: a leaf grows in place over the blocks of a fork, and its parent takes the first of them."""
        world = World(4, Options(16))
        for text in ([0, 1, 7], [0, 1, 1]):
            first = world.open(None, text)
            assert world.extend(first, text[len(first.tokens) :])
            world.commit(first)
            world.close(first)
        parent = world.open(None, [0, 1, 1, 2], limit=0)
        assert world.extend(parent, [0, 1, 1, *range(15)])
        world.commit(parent, publish=False)
        twin = world.fork(parent)
        assert twin is not None
        assert world.extend(parent, [3, 3])
        assert world.extend(twin, [3]), "this evicts the leaf that shares the parent's block"
        world.step(publish=False)
        world.commit(parent)
        world.verify()
        world.close(parent)
        world.wind_down()


class TestClosing:
    def test_what_was_contiguous_comes_back_contiguous(self) -> None:
        cache = PrefixCache(64, block_size=4)
        publish(cache, prompt(1, 80))
        for round_ in range(2, 6):
            seq = cache.open([])
            seq.extend(prompt(round_, 160))
            assert set(np.diff(seq.block_table)) == {1}
            seq.close()

    def test_what_was_evicted_comes_back_contiguous(self) -> None:
        cache = PrefixCache(60, block_size=4)
        for name in range(12):
            publish(cache, prompt(name, 80))
        seq = cache.open([])
        seq.extend(prompt(99, 80))
        assert set(np.diff(seq.block_table)) == {1}


class TestNamespaces:
    def test_see_nothing_of_each_other(self) -> None:
        cache = PrefixCache(16)
        publish(cache, list(range(30)), "tenant")
        for other in (None, "", "Tenant", 0, ("tenant",)):
            assert cached(cache, list(range(30)), other) == 0
            assert cache.open(list(range(30)), other).length == 0
        assert cached(cache, list(range(30)), "tenant") == 30

    def test_may_be_anything_hashable(self) -> None:
        cache = PrefixCache(16)
        for namespace in (None, "a", 1, ("a", 1), frozenset({1})):
            seq = held(cache, [1, 2, 3], namespace)
            assert seq.namespace == namespace
            seq.close()
        assert cache.stats().namespaces == 5

    def test_of_no_sequence_leave_nothing(self) -> None:
        cache = PrefixCache(16)
        for salt in range(10_000):
            seq = cache.open([1, 2, 3], f"salt {salt}")
            seq.extend([1, 2, 3])
            seq.close()
        assert cache.stats().namespaces == 0
        assert cache.stats().nodes == 0
        assert lengths(cache) == (16, 0, 0)

    def test_whose_text_is_gone_leave_nothing(self) -> None:
        cache = PrefixCache(16)
        for salt in range(10_000):
            publish(cache, [1, 2, 3], f"salt {salt}")
        assert cache.stats().namespaces == 16
        cache.clear()
        assert cache.stats().namespaces == 0
        assert cache.stats().nodes == 0

    def test_asked_for_in_vain_leave_nothing(self) -> None:
        cache = PrefixCache(16)
        for salt in range(100):
            cache.match([1, 2, 3], f"salt {salt}")
            cache.explain([1, 2, 3], f"salt {salt}")
            cache.pin([1, 2, 3], f"salt {salt}").release()
        assert cache.stats().namespaces == 0


class TestClear:
    def test_of_an_empty_cache_is_nothing(self) -> None:
        cache = PrefixCache(4)
        cache.clear()
        cache.check()
        assert lengths(cache) == (4, 0, 0)


class TestWhatIsReturned:
    def test_belongs_to_the_caller(self) -> None:
        cache = PrefixCache(16, block_size=4)
        publish(cache, list(range(9)))
        seq = cache.open(list(range(9)))
        tokens, table, found = seq.tokens, seq.block_table, cache.match(list(range(9)))
        kept = table.tolist()
        for array in (tokens, table, found.blocks):
            if array.flags.writeable:
                array[:] = 77
        assert seq.tokens.tolist() == list(range(9))
        assert seq.block_table.tolist() == kept
        assert cache.match(list(range(9))).blocks.tolist() == kept
        cache.check()

    def test_does_not_follow_what_the_caller_does_to_its_own_lists(self) -> None:
        cache = PrefixCache(16, block_size=4)
        prompt_ids = np.arange(9, dtype=np.int32)
        seq = cache.open(prompt_ids)
        plan = seq.extend(prompt_ids)
        prompt_ids[:] = 5
        plan.slots[:] = 0
        plan.copies.append((1, 2))
        seq.commit()
        prompt_ids[:] = 6
        assert seq.tokens.tolist() == list(range(9))
        assert cached(cache, list(range(9))) == 9
        cache.check()
