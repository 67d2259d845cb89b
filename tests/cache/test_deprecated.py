"""The names of two former classes are functions for one release: they warn, and return a PrefixCache."""

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.host import HostPrefixCache
from radixkv.cache.recurrent import Spacing, StatefulPrefixCache
from radixkv.errors import InvalidInput
from tests.cache.verbs import publish


def test_host_prefix_cache_warns_and_returns_a_cache_with_a_host_tier() -> None:
    with pytest.warns(DeprecationWarning, match=r"PrefixCache\(host_blocks=") as warned:
        cache = HostPrefixCache(2, 4, host_blocks=8)
    assert [each.filename for each in warned] == [__file__]
    assert type(cache) is PrefixCache
    publish(cache, range(8))
    with cache.open([9]) as other:
        other.extend([9])
        assert cache.moves() == [(1, 0)]
        cache.moves_done()
    assert (cache.match(range(8)).length, cache.match(range(8)).host) == (4, 4)
    cache.check()


def test_stateful_prefix_cache_warns_and_returns_a_cache_with_rows_and_snapshots() -> None:
    with pytest.warns(DeprecationWarning, match=r"PrefixCache\(state_rows=") as warned:
        cache = StatefulPrefixCache(64, 16, rows=2, snapshots=4, spacing=Spacing(prompt=32))
    assert [each.filename for each in warned] == [__file__]
    assert type(cache) is PrefixCache
    with cache.open(range(100)) as first:
        plan = first.extend(range(100))
        assert [each.tokens for each in plan.state.snapshots] == [96]  # by default it would be 64
        assert cache.copies.drain() == [(-1, 0)]
        first.commit()
    assert (cache.stats().state_rows, cache.stats().state_slots) == (2, 4)
    assert cache.match([*range(98), 7]).length == 96
    cache.check()


def test_stateful_prefix_cache_refuses_to_have_no_rows() -> None:
    with pytest.raises(InvalidInput, match="rows=0"):
        StatefulPrefixCache(64, 16, rows=0, snapshots=4)
