"""Plans: reserved, then written, then committed; many at a time, copies in any order, closes in between."""

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks, PlanPending, UnknownToken
from tests.cache.freeze import freeze
from tests.cache.verbs import cached, held, publish


class TestAPlan:
    @pytest.mark.parametrize("block_size", [1, 2, 3, 16])
    def test_names_a_slot_for_each_token(self, block_size: int) -> None:
        cache = PrefixCache(100, block_size)
        seq = cache.open([])
        for count in (1, 5, 16, 17, 2):
            start = seq.length
            plan = seq.extend(list(range(count)))
            where = np.arange(start, start + count)
            table = seq.block_table.astype(np.int64)
            assert plan.slots.tolist() == (table[where // block_size] * block_size + where % block_size).tolist()
            assert plan.slots.dtype == np.int64
            seq.commit()

    def test_is_one_at_a_time(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = held(cache, [1, 2, 3])
        seq.extend([4, 5])
        before = freeze(cache, seq)
        for verb in (lambda: seq.extend([6]), seq.fork, lambda: seq.truncate(1)):
            with pytest.raises(PlanPending):
                verb()
            assert freeze(cache, seq) == before
        seq.commit()
        assert seq.extend([6]).slots.tolist() == [seq.block_table[1] * 4 + 1]


class TestVoidPlans:
    def test_leave_the_fill_mark_where_it_was(self) -> None:
        """Another step may have run the void plan's writes already: the next writer must not rely on those slots."""
        cache = PrefixCache(8, block_size=8)
        publish(cache, [1, 2, 3])
        one, two, three = (cache.open([1, 2, 3]) for _ in range(3))
        assert one.extend([4]).copies == []
        one.close()
        assert len(two.extend([5]).copies) == 1
        two.close()
        assert three.extend([6]).copies == []  # alone again


class TestManyPlans:
    def test_let_go_of_their_sources_when_committed(self) -> None:
        cache = PrefixCache(8, block_size=8)
        publish(cache, [1, 2, 3, 4])
        reader = cache.open([1, 2])
        reader.extend([9])
        reader.commit()
        reader.close()
        cache.clear()
        assert cache.free_blocks == 8

    def test_that_are_void_let_go_of_their_sources(self) -> None:
        cache = PrefixCache(8, block_size=8)
        publish(cache, [1, 2, 3, 4])
        reader = cache.open([1, 2])
        reader.extend([9])
        reader.close()
        cache.clear()
        assert cache.free_blocks == 8


class TestOutOfBlocks:
    def test_counts_the_block_that_a_copy_needs(self) -> None:
        cache = PrefixCache(2, block_size=4)
        other = held(cache, [1, 2, 3])
        reader = cache.open([1, 2])
        blocker = cache.open([])
        blocker.extend([5])
        with pytest.raises(OutOfBlocks):
            reader.extend([9])
        blocker.close()
        assert len(reader.extend([9]).copies) == 1
        other.close()

    def test_says_what_is_there_and_what_was_asked(self) -> None:
        cache = PrefixCache(3, block_size=4)
        seq = cache.open([])
        with pytest.raises(OutOfBlocks, match=r"25"):
            seq.extend([1] * 100)


def test_a_fork_may_share_any_block_of_a_node_also_after_a_merge() -> None:
    cache = PrefixCache(40, 2)
    first = cache.open([])
    first.extend([1, 2])
    first.commit()
    first.extend([3] * 8)
    first.commit(publish=False)
    twin = first.fork()
    first.commit()
    other = cache.open([1, 2] + [3] * 8)
    for sequence in (other, first):
        sequence.extend([5] * 4)
    for sequence in (other, first):
        sequence.commit()
        cache.check()
    for sequence in (first, other, twin):
        sequence.close()
        cache.check()
    assert cache.stats().held_blocks == 0


@pytest.mark.parametrize("branch", [0, 5])
def test_a_node_that_takes_a_forks_block_for_its_own_does_not_free_it(branch: int) -> None:
    """Where two texts part inside a block, the upper node takes the lower one's copy, which a fork owns too.

    With a branch it does so when the branch is evicted, otherwise when the copy is published.
    """
    cache = PrefixCache(12, 4)
    with cache.open([]) as sequence:
        sequence.extend([0, 0, 0] + [1] * branch)
        sequence.commit()
    first = cache.open([])
    first.extend([0, 0, 0] + [2] * 5)
    first.commit(publish=False)
    twin = first.fork()
    with cache.pin([0, 0, 0]):  # the pinned node may not be lengthened
        first.commit()
    first.close()
    cache.check()
    with cache.open([9]) as other:
        other.extend([9] * 4 * (cache.free_blocks + cache.evictable_blocks))
        cache.check()
        other.commit()
        cache.check()
    assert not set(twin.block_table.tolist()) & set(cache.state.pool.free)
    twin.commit()
    cache.check()
    twin.close()
    cache.check()
    assert cache.stats().held_blocks == 0


def test_a_shorter_sequence_has_no_more_cached_tokens_than_tokens() -> None:
    cache = PrefixCache(8, 4)
    with cache.open(range(10)) as sequence:
        sequence.extend(range(10))
        sequence.commit()
    with cache.open(range(10)) as again:
        assert again.cached_length == 10
        again.truncate(3)
        assert (again.length, again.cached_length) == (3, 3)


class TestAnUnknownToken:
    """The next step is planned while the device still samples its input."""

    def test_is_resolved_before_it_is_published(self) -> None:
        cache = PrefixCache(8, block_size=4)
        seq = held(cache, [1, 2, 3])
        assert seq.extend_unknown().slots.tolist() == [3]
        seq.commit(publish=False)
        assert seq.tokens.tolist() == [1, 2, 3, -1]
        before = freeze(cache, seq)
        for verb in (seq.commit, seq.extend_unknown, lambda: seq.publish(4)):
            with pytest.raises(UnknownToken):
                verb()
            assert freeze(cache, seq) == before
        seq.resolve(9)
        seq.publish(4)
        assert cached(cache, [1, 2, 3, 9]) == 4
        with pytest.raises(UnknownToken, match="no unknown token"):
            seq.resolve(9)
        cache.check()


class TestTheFirstTokens:
    @pytest.mark.parametrize("block_size", [1, 2, 3, 16])
    def test_are_published_and_the_others_are_not(self, block_size: int) -> None:
        tokens = list(range(7))
        for length in range(8):
            cache = PrefixCache(20, block_size)
            seq = cache.open([])
            seq.extend(tokens)
            seq.commit(publish=False)
            seq.publish(length)
            cache.check()
            assert cached(cache, tokens) == length
            assert (seq.length, seq.tokens.tolist()) == (7, tokens)
            seq.commit()
            cache.check()
            assert cached(cache, tokens) == 7

    def test_are_published_from_the_block_that_a_pending_plan_copies(self) -> None:
        """The plan may be voided, and its target would then never be written."""
        cache = PrefixCache(8, block_size=4)
        seq = cache.open([])
        seq.extend([1, 2, 3])
        seq.commit(publish=False)
        twin = seq.fork()
        seq.extend([4])  # in place
        source = int(twin.block_table[0])
        ((copied, target),) = twin.extend([5]).copies
        twin.publish(2)
        assert (copied, cache.match([1, 2, 3]).blocks.tolist()) == (source, [source])
        assert twin.block_table.tolist() == [target]
        cache.check()
        twin.close()
        cache.check()
        seq.commit()
        assert cached(cache, [1, 2, 3, 4]) == 4

    def test_leave_a_fork_its_blocks(self) -> None:
        """The rest is published into a node of its own, and the fork still shares the blocks inside it."""
        cache, tokens = PrefixCache(20, 2), list(range(10))
        seq = cache.open([])
        seq.extend(tokens)
        seq.commit(publish=False)
        twin = seq.fork()
        seq.publish(2)
        with cache.open(tokens):
            seq.commit()
        seq.close()
        cache.check()
        cache.clear()
        cache.check()
        assert twin.tokens.tolist() == tokens
        twin.commit()
        cache.check()
        assert cached(cache, tokens) == 10


def test_slots_of_a_cut_draft_are_written_again_unless_a_fork_reads_them() -> None:
    cache = PrefixCache(16, 4)
    one = cache.open([])
    plan = one.lengthen(one.extend([1]), [2, 3])
    one.commit(publish=False)
    one.publish(1)
    other = cache.open([1, 7])
    assert other.extend([7]).copies, "the slot after the first token is a draft's"
    one.truncate(1)
    again = one.extend([5, 6])
    assert not again.copies and again.slots.tolist() == plan.slots.tolist()[1:]
    one.commit(publish=False)
    twin = one.fork()
    one.truncate(2)
    assert one.extend([9]).copies and twin.tokens.tolist() == [1, 5, 6]
    cache.check()
