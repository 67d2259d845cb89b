"""Plans: refusals, void plans, unknown tokens and drafts; the fuzz runs many plans at a time."""

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks, PlanPending, UnknownToken
from tests.cache.freeze import freeze
from tests.cache.verbs import cached, held


class TestAPlan:
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


class TestOutOfBlocks:
    def test_says_what_is_there_and_what_was_asked(self) -> None:
        cache = PrefixCache(3, block_size=4)
        seq = cache.open([])
        with pytest.raises(OutOfBlocks, match=r"25"):
            seq.extend([1] * 100)


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
