"""What runs keep when they move between the tiers: recency, priority, hits, ghosts; and which holds a load has."""

import pytest

from radixkv.cache import Hint, PrefixCache
from radixkv.errors import PrefixHeld
from tests.cache.host.test_host_tier import A, B, load, put, reach, run_moves

C = list(range(300, 332))


def test_the_host_evicts_the_least_recently_used_run_in_any_order_of_offload() -> None:
    cache = PrefixCache(8, 4, "fifo", host_blocks=8)
    put(cache, A[:16])
    put(cache, B[:16])
    cache.open(A[:16]).close()
    put(cache, C)  # offloads the first text before the second one
    run_moves(cache)
    assert reach(cache, A[:16]) == reach(cache, B[:16]) == (0, 16)
    put(cache, range(500, 516))
    run_moves(cache)
    assert (reach(cache, A[:16]), reach(cache, B[:16])) == ((0, 16), (0, 0))


def test_a_voided_load_counts_as_a_use_of_the_run() -> None:
    cache = PrefixCache(8, 4, host_blocks=12)
    for text in (A[:16], B[:16], C):
        put(cache, text)
    run_moves(cache)
    with cache.open(A[:16]) as sequence:
        sequence.load(A[:16])  # offloads a half of the third text
        run_moves(cache)
    assert reach(cache, A[:16]) == reach(cache, B[:16]) == (0, 16)
    put(cache, range(500, 532))
    run_moves(cache)
    assert (reach(cache, A[:16]), reach(cache, B[:16]), reach(cache, C)) == ((0, 16), (0, 0), (0, 32))


def test_a_run_has_its_priority_after_it_was_offloaded_and_loaded() -> None:
    cache = PrefixCache(8, 4, host_blocks=16)
    put(cache, A[:16], hint=Hint(priority=1))
    with cache.open(B, priority=2) as other:
        other.extend(B)
        other.commit()
    run_moves(cache)
    cache.discard(B)
    load(cache, A[:16])
    put(cache, C[:16])
    put(cache, B[:16])
    assert (reach(cache, A[:16]), reach(cache, C[:16])) == ((16, 0), (0, 0)), "offloaded before the first text"


def test_a_joined_run_has_the_priority_of_its_head() -> None:
    cache = PrefixCache(8, 4, host_blocks=12)
    put(cache, A)
    put(cache, B[:16])
    run_moves(cache)
    assert reach(cache, A) == (16, 16)
    cache.open(A[:16], priority=1).close()
    with cache.open(C, priority=2) as other:
        other.extend(C)
        other.commit()
    run_moves(cache)
    assert reach(cache, A) == (0, 32)
    cache.discard(C)
    put(cache, B)
    put(cache, C)
    assert reach(cache, A) == (0, 32), "text of a lower priority evicts none of it"


def test_loads_count_as_hits_of_the_run() -> None:
    cache = PrefixCache(8, 4, "lfu", host_blocks=16)
    put(cache, A[:16])
    for _ in range(3):
        put(cache, C)
        put(cache, B)
        run_moves(cache)
        assert reach(cache, A[:16]) == (0, 16)
        load(cache, A[:16])
        run_moves(cache)
        cache.discard(B)
        cache.discard(C)
    put(cache, B[:16])
    cache.open(B[:16]).close()
    put(cache, C[:16])
    assert (reach(cache, A[:16]), reach(cache, B[:16])) == ((16, 0), (0, 0))


def test_ghosts_are_found_after_a_held_leaf_grows_past_its_host_children() -> None:
    cache = PrefixCache(5, 4, host_blocks=2)
    one, two = [*A[:4], *B[:8]], [*A[:4], *C[:8]]
    put(cache, one)
    put(cache, two)
    put(cache, range(500, 516))
    run_moves(cache)
    assert (reach(cache, one), reach(cache, two)) == ((4, 8), (4, 0))
    put(cache, [*A[:4], 600, 601])
    assert cache.explain(two).reason == "evicted"
    assert (cache.explain(two).matched, cache.explain(two).evicted_tokens) == (4, 8)


def test_text_that_diverges_inside_a_host_run_causes_no_regret() -> None:
    cache = PrefixCache(8, 4, host_blocks=4)
    put(cache, A)
    put(cache, B)
    run_moves(cache)
    assert (reach(cache, A), cache.explain(A).evicted_tokens) == ((0, 16), 16)
    cache.open([*A[:8], *range(900, 908), *A[16:]]).close()
    assert cache.stats().regret_tokens == 0
    cache.open(A).close()
    assert cache.stats().regret_tokens == 16


def test_a_load_holds_tokens_below_text_that_was_published_meanwhile() -> None:
    cache = PrefixCache(16, 4, host_blocks=16)
    put(cache, A)
    cache.evict(16)
    run_moves(cache)
    assert reach(cache, A) == (0, 32)
    with cache.open(A) as sequence:
        sequence.load(A)
        put(cache, A[:16])  # the rest of the host run hangs below this text now
        assert reach(cache, A) == (16, 16)
        with pytest.raises(PrefixHeld, match="tokens from 8 on are being loaded"):
            cache.discard(A, start=8)
        sequence.commit()
        cache.check()
    assert reach(cache, A) == (32, 0)
