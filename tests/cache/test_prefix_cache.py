"""Hits, publishing, branching, forks, truncation, closing and namespaces: the contract, one sentence at a time."""

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
    def test_are_token_granular(self) -> None:
        world = World(1100, Options(16, ample=True))
        text = list(range(8192))
        first = world.open(None, text)
        world.extend(first, text)
        world.step()
        world.close(first)
        second = world.open(None, [*text[:8190], 9, 9])
        assert second.seq.length == 8190
        world.extend(second, [9, 9])
        assert second.plan is not None
        assert len(second.plan.copies) == 1
        world.step()
        world.close(second)
        world.verify()
        assert world.cache.stats().cached_blocks == 513

    @pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 31, 32, 33, 49, 50])
    def test_are_the_longest_common_prefix(self, shared: int) -> None:
        cache = PrefixCache(16)
        text = list(range(50))
        publish(cache, text)
        assert cached(cache, text[:shared] + [99] * 20) == shared
        assert cached(cache, text[:shared]) == shared

    def test_a_full_repeat_after_a_limit_computes_one_token_again(self) -> None:
        world = World(16, Options(16))
        text = list(range(50))
        first = world.open(None, text)
        world.extend(first, text)
        world.step()
        world.close(first)
        again = world.open(None, text, limit=len(text) - 1)
        assert again.seq.length == 49
        world.extend(again, text[49:])
        assert again.plan is not None
        assert len(again.plan.slots) == 1
        world.step()
        world.wind_down()

    def test_an_empty_prompt_hits_nothing(self) -> None:
        cache = PrefixCache(4)
        publish(cache, [1, 2, 3])
        seq = cache.open([])
        assert (seq.length, seq.cached_length, seq.tokens.tolist(), seq.block_table.tolist()) == (0, 0, [], [])
        assert cached(cache, []) == 0

    def test_only_equal_tokens_match(self) -> None:
        cache = PrefixCache(16)
        publish(cache, [0, 1, 2**31 - 1])
        assert cached(cache, [0, 1, 2**31 - 2]) == 2
        assert cached(cache, [0, 1, 2**31 - 1]) == 3
        assert cached(cache, [1, 1]) == 0


class TestPublishing:
    def test_what_is_planned_cannot_be_matched(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend([1, 2, 3, 4, 5])
        assert cached(cache, [1, 2, 3, 4, 5]) == 0
        assert seq.length == 0
        assert len(seq.block_table) == 2
        seq.commit()
        assert cached(cache, [1, 2, 3, 4, 5]) == 5
        assert seq.length == 5

    def test_a_silent_commit_is_published_by_a_later_commit(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend([1, 2, 3, 4, 5])
        seq.commit(publish=False)
        assert seq.length == 5
        assert cached(cache, [1, 2, 3, 4, 5]) == 0
        seq.commit()
        assert cached(cache, [1, 2, 3, 4, 5]) == 5

    def test_a_publishing_commit_publishes_what_silent_ones_left(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend([1, 2, 3])
        seq.commit(publish=False)
        seq.extend([4, 5])
        seq.commit()
        assert cached(cache, [1, 2, 3, 4, 5]) == 5

    def test_close_never_publishes(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend([1, 2, 3])
        seq.commit(publish=False)
        seq.close()
        assert cached(cache, [1, 2, 3]) == 0
        assert lengths(cache) == (8, 0, 0)

    def test_full_blocks_that_the_tree_has_replace_the_sequences_own(self) -> None:
        cache = PrefixCache(16)
        text = list(range(70))
        one, two = cache.open(text), cache.open(text)
        for seq in (one, two):
            seq.extend(text)
        assert lengths(cache) == (6, 0, 10)
        one.commit()
        own = two.block_table.tolist()
        two.commit()
        assert two.block_table.tolist()[:4] == one.block_table.tolist()[:4]
        assert two.block_table.tolist()[4] == own[4]
        assert lengths(cache) == (10, 0, 6)
        one.close()
        two.close()
        assert lengths(cache) == (11, 5, 0)

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


class TestBranching:
    def test_the_first_to_append_after_a_shared_prefix_writes_in_place(self) -> None:
        cache = PrefixCache(16)
        held(cache, list(range(20)))
        one, two = cache.open(list(range(20))), cache.open(list(range(20)))
        assert one.extend([50]).copies == []
        [(source, target)] = two.extend([60]).copies
        assert source == one.block_table[1]
        assert target == two.block_table[1] != source

    def test_a_sequence_that_is_alone_rewrites_in_place(self) -> None:
        cache = PrefixCache(4)
        seq = cache.open([])
        seq.extend([1, 2, 3])
        seq.commit(publish=False)
        seq.truncate(1)
        assert seq.extend([4, 5]).copies == []
        seq.commit()
        assert seq.tokens.tolist() == [1, 4, 5]

    def test_a_prefix_whose_block_lives_on_in_copies_gives_up_its_own(self) -> None:
        """[7]*20 ends inside its second block; when only the copy below it is left, the original is freed."""
        world = World(100, Options(16, ample=True))
        first = world.open(None, [])
        world.extend(first, [7] * 24)
        world.step()
        second = world.open(None, [7] * 20)
        world.extend(second, [8])
        world.step()
        assert world.cache.stats().copied_blocks == 1
        world.close(second)
        world.truncate(first, 20)
        world.close(first)
        world.verify()
        assert world.cache.stats().cached_blocks == 3
        world.wind_down()

    def test_eviction_of_one_branch_leaves_the_other_whole(self) -> None:
        world = World(4, Options(16))
        first = world.open(None, [])
        world.extend(first, [7] * 20 + [1])
        world.step()
        second = world.open(None, [7] * 20 + [2])
        world.extend(second, [2])
        world.step()
        world.close(first)
        world.close(second)
        flood = world.open("other", [])
        assert world.extend(flood, [3] * 32)
        assert world.match(None, [7] * 20 + [2]).length == 21
        assert world.match(None, [7] * 20 + [1]).length == 20
        world.verify()
        world.wind_down()


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


class TestTruncate:
    def test_below_the_published_part_leaves_the_tail_to_others(self) -> None:
        cache = PrefixCache(16, block_size=4)
        seq = held(cache, list(range(30)))
        seq.truncate(10)
        assert seq.tokens.tolist() == list(range(10))
        assert len(seq.block_table) == 3
        assert cached(cache, list(range(30))) == 30
        assert cache.evictable_blocks == 5

    def test_frees_what_was_never_published(self) -> None:
        cache = PrefixCache(16, block_size=4)
        seq = held(cache, list(range(6)))
        seq.extend(list(range(20)))
        seq.commit(publish=False)
        assert cache.free_blocks == 9
        seq.truncate(6)
        assert cache.free_blocks == 14


class TestClosing:
    def test_twice_is_once(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = held(cache, list(range(10)))
        other = held(cache, list(range(10)))
        seq.close()
        before = cache.stats()
        seq.close()
        assert seq.closed
        assert not other.closed
        assert cache.stats() == before

    def test_the_whole_pool_comes_back(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend(list(range(32)))
        assert (cache.free_blocks, cache.evictable_blocks) == (0, 0)
        seq.commit()
        assert (cache.free_blocks, cache.evictable_blocks) == (0, 0)
        seq.close()
        assert (cache.free_blocks, cache.evictable_blocks) == (0, 8)

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
