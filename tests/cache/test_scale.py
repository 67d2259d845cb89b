"""Deep chains and large pools: nothing recurses, nothing scans."""

import sys
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from radixkv.cache import Hint, PrefixCache
from tests.cache.verbs import cached, prompt, publish

DEEP = 20_000


@pytest.fixture(scope="module")
def deep() -> PrefixCache:
    """Make a chain of 20,000 nodes: each reader added one token and a branch."""
    cache = PrefixCache(3 * DEEP, block_size=1)
    seq = cache.open([])
    seq.extend(np.arange(DEEP, dtype=np.int32))
    seq.commit()
    text = np.arange(DEEP, dtype=np.int32)
    for length in range(DEEP - 1, 0, -1):
        reader = cache.open(text[:length])
        reader.extend([DEEP + 1])
        reader.commit()
        reader.close()
    seq.close()
    return cache


def test_a_deep_chain_can_be_matched_held_forked_and_left(deep: PrefixCache) -> None:
    assert deep.stats().nodes >= 2 * DEEP - 2 > sys.getrecursionlimit()
    text = np.arange(DEEP, dtype=np.int32)
    assert deep.explain(np.append(text, 7)).matched == DEEP
    seq = deep.open(text)
    assert deep.match(text).blocks.tolist() == seq.block_table.tolist()
    twin = seq.fork()
    assert deep.stats().held_blocks == DEEP
    seq.truncate(DEEP // 2)
    pin = deep.pin(text)
    for one in (seq, twin):
        one.close()
    pin.release()
    deep.check()


def test_a_deep_chain_can_be_evicted(deep: PrefixCache) -> None:
    seq = deep.open([], "flood")
    seq.extend(np.zeros(3 * DEEP, dtype=np.int32))
    seq.close()
    assert deep.free_blocks == 3 * DEEP
    deep.check()


def test_a_deep_chain_can_be_done_with_and_trimmed() -> None:
    """Each turn is its own node; the hint is passed up the chain, and the eviction goes down it."""
    turns = 1_500
    cache = PrefixCache(turns + 1, block_size=1)
    text = np.arange(turns, dtype=np.int32)
    holders = []
    for length in range(1, turns + 1):
        seq = cache.open(text[:length])
        seq.extend(text[seq.length : length])
        seq.commit()
        holders.append(seq)
    for seq in holders:
        seq.close(Hint(done=True))
    assert cached(cache, text) == turns
    flood = cache.open([], "flood")
    flood.extend(np.zeros(turns + 1, dtype=np.int32))
    assert cached(cache, text) == 0
    flood.close()
    cache.check()


@pytest.mark.long
def test_a_million_blocks_and_a_hundred_thousand_leaves() -> None:
    blocks, leaves, length = 1_000_000, 100_000, 9 * 16
    cache = PrefixCache(blocks, 16)
    body = np.arange(length, dtype=np.int32)
    for name in range(leaves):
        body[0] = name
        seq = cache.open(body)
        seq.extend(body)
        seq.commit()
        seq.close()
    stats = cache.stats()
    assert (stats.cached_blocks, stats.free_blocks) == (900_000, 100_000)
    assert stats.nodes >= leaves
    for name in (0, 50_000, 99_999):
        body[0] = name
        assert cached(cache, body) == length
    flood = cache.open([], "flood")
    for _ in range(10):
        flood.extend(np.zeros(16 * 50_000, dtype=np.int32))
        flood.commit(publish=False)
    assert cache.stats().evicted_blocks == 400_000
    assert [cached(cache, prompt_of(body, name)) > 0 for name in (0, 44_000, 45_000, 99_999)] == [
        False,
        False,
        True,
        True,
    ]


def prompt_of(body: npt.NDArray[np.int32], name: int) -> npt.NDArray[np.int32]:
    body[0] = name
    return body


def test_a_long_text_is_one_plan() -> None:
    cache = PrefixCache(1 << 14, 16)
    text = np.random.default_rng(0).integers(0, 2**31 - 1, size=1 << 18, dtype=np.int32)
    assert publish(cache, text) == 0
    assert publish(cache, text) == len(text)
    changed = text.copy()
    changed[200_001] ^= 1
    assert cached(cache, changed) == 200_001


def test_many_namespaces_at_once() -> None:
    cache = PrefixCache(20_000, 4)
    for name in range(10_000):
        publish(cache, prompt(1, 8), name)
    assert cache.stats().namespaces == 10_000
    assert [publish(cache, prompt(1, 8), name) for name in (0, 5_000, 9_999)] == [8, 8, 8]
    cache.check()


def test_a_long_decode_does_not_slow_down() -> None:
    """Ten thousand one-token commits: copying the whole text each time would move 200 MB."""
    cache = PrefixCache(1 << 12, 16)
    seq = cache.open([])
    for token in range(10_000):
        seq.extend([token])
        seq.commit()
    assert seq.length == 10_000
    assert all(below < above for below, above in pairwise(seq.tokens.tolist()))
