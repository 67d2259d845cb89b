"""What the fuzz does not see: contiguous blocks, namespaces that leave nothing, and arrays of callers."""

import numpy as np

from radixkv.cache import PrefixCache
from tests.cache.verbs import cached, held, prompt, publish


def lengths(cache: PrefixCache) -> tuple[int, int, int]:
    stats = cache.stats()
    return stats.free_blocks, stats.cached_blocks, stats.held_blocks


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
    def test_may_be_anything_hashable(self) -> None:
        cache = PrefixCache(16)
        for namespace in (None, "a", 1, ("a", 1), frozenset({1})):
            seq = held(cache, [1, 2, 3], namespace)
            assert seq.namespace == namespace
            seq.close()
        assert cache.stats().namespaces == 5


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
