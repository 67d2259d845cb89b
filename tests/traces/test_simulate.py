"""The replay, against a cache so plain that it is obviously right."""

from __future__ import annotations

from array import array
from itertools import islice

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay, unique_blocks

CASES = [("conversation", 512, 570, 0.1), ("conversation", 512, 570, 0.2), ("cc_agent", 64, 100, 0.2)]


def naive(requests: list[TraceRequest], capacity: int, block_tokens: int) -> tuple[int, int]:
    """Block by block LRU over leaves: (hit tokens, evicted blocks). A block's id stands for its whole prefix."""
    used: dict[int, None] = {}  # cached blocks, least recently used first
    above: dict[int, int] = {}  # cached block -> the block before it
    children: dict[int, int] = {}  # cached block -> cached blocks right behind it
    hit_tokens = evicted = 0
    for request in requests:
        chain = list(request.blocks)
        hit = next((i for i, block in enumerate(chain) if block not in used), len(chain))
        hit_tokens += min(hit * block_tokens, request.input_length)
        path = set(chain[:hit])
        for before, block in zip([-1, *chain], chain[:capacity], strict=False):
            if block in path and block in used:
                del used[block]
            elif len(used) == capacity:
                victim = next(b for b in used if not children[b] and b not in path)
                del used[victim], children[victim]
                parent = above.pop(victim)
                children[parent] = children.get(parent, 0) - 1
                evicted += 1
            if block not in path:
                above[block] = before
                children[before] = children.get(before, 0) + 1
                children[block] = 0
                path.add(block)
            used[block] = None
    return hit_tokens, evicted


def request(blocks: list[int], input_length: int) -> TraceRequest:
    return TraceRequest(0.0, input_length, 1, array("q", blocks))


@pytest.mark.parametrize(("name", "block_tokens", "count", "share"), CASES)
def test_lru_equals_the_naive_cache_exactly(name: str, block_tokens: int, count: int, share: float) -> None:
    requests = list(islice(read(sample(name)), count))
    capacity = int(unique_blocks(requests) * share)
    result = replay(requests, capacity, "lru", block_tokens)
    assert (result.hit_tokens, result.evicted_blocks) == naive(requests, capacity, block_tokens)
    assert 0 < result.token_hit_rate < 1
    assert result.requests == count and result.input_tokens == sum(r.input_length for r in requests)


@pytest.mark.parametrize(("name", "block_tokens", "count", "share"), CASES[1:])
def test_the_samples_tell_policies_apart(name: str, block_tokens: int, count: int, share: float) -> None:
    requests = list(islice(read(sample(name)), count))
    capacity = int(unique_blocks(requests) * share)
    rates = [
        replay(requests, capacity, policy, block_tokens).token_hit_rate for policy in ("lru", "fifo", "lfu", "slru")
    ]
    assert len(set(rates)) == 4, rates


def test_a_pool_that_holds_everything_evicts_nothing_and_hits_all_that_came_before() -> None:
    requests = list(read(sample("cc_agent")))
    result = replay(requests, unique_blocks(requests), "lru", 64)
    seen: set[int] = set()
    hits = 0
    for each in requests:
        hits += min(64 * sum(1 for block in each.blocks if block in seen), each.input_length)
        seen.update(each.blocks)
    assert (result.evicted_blocks, result.hit_tokens) == (0, hits)


def test_leaves_are_trimmed_from_the_tail_not_evicted_whole() -> None:
    requests = [request([1, 2, 3, 4], 40), request([9], 10), request([1, 2, 3], 30)]
    result = replay(requests, 4, "lru", 10)
    assert (result.hit_tokens, result.evicted_blocks) == (30, 1)


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    requests = [request([1, 2, 3, 4, 5], 50), request([1, 2, 3, 4, 5], 50)]
    result = replay(requests, 3, "lru", 10)
    assert (result.hit_blocks, result.hit_tokens, result.evicted_blocks) == (3, 30, 0)


def test_its_own_path_is_held_while_victims_are_chosen() -> None:
    requests = [request([1, 2], 20), request([7], 10), request([1, 2, 3], 30), request([1, 2, 3], 30)]
    result = replay(requests, 3, "lru", 10)  # [1, 2] is older than [7], but in use when 3 needs room
    assert (result.hit_blocks, result.evicted_blocks) == (5, 1)


def test_hit_tokens_never_exceed_the_input() -> None:
    result = replay([request([1, 2], 15), request([1, 2], 15)], 4, "lru", 10)
    assert (result.hit_blocks, result.hit_tokens, result.token_hit_rate) == (2, 15, 0.5)


def test_64_bit_ids_and_empty_prompts_are_fine() -> None:
    ids = [2**63 - 1, 2**40]
    result = replay([request([], 0), request(ids, 20), request(ids, 20), request([], 5)], 2, "lru", 10)
    assert (result.requests, result.hit_blocks, result.input_tokens) == (4, 2, 45)
    assert replay([], 1).token_hit_rate == 0.0


def test_wrong_sizes_and_policies_are_refused() -> None:
    for capacity, policy, block_tokens in ((0, "lru", 1), (1, "mru", 1), (1, "lru", 0)):
        with pytest.raises(InvalidInput):
            replay([], capacity, policy, block_tokens)
