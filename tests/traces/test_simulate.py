"""The replay, compared with a cache that is simple enough to be obviously right."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from itertools import islice
from typing import Any

import pytest

from radixkv.cache import POLICIES, Hint, PrefixCache, Sequence
from radixkv.errors import InvalidInput
from radixkv_traces import simulate
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay, unique_blocks
from radixkv_traces.simulate_detail import by_group, over_time
from radixkv_traces.workload import prepare

CASES = [("conversation", 512, 570, 0.1), ("conversation", 512, 570, 0.2), ("cc_agent", 64, 100, 0.2)]


def naive(requests: list[TraceRequest], capacity: int, block_tokens: int) -> tuple[int, int]:
    """Block by block LRU over leaves: (hit tokens, evicted blocks). A block's id stands for its whole prefix."""
    used: dict[int, None] = {}  # cached blocks, least recently used first
    parents: dict[int, int] = {}  # cached block -> the block before it
    children: dict[int, int] = {}  # cached block -> cached blocks right after it
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
                parent = parents.pop(victim)
                children[parent] = children.get(parent, 0) - 1
                evicted += 1
            if block not in path:
                parents[block] = before
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


def test_wrong_sizes_and_policies_are_refused() -> None:
    for capacity, policy, block_tokens in ((0, "lru", 1), (1, "unheard-of", 1), (1, "lru", 0)):
        with pytest.raises(InvalidInput):
            replay([], capacity, policy, block_tokens)


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Hashable, Hint | None]]:
    """The time, namespace and hint of each closed sequence; the cache checks itself after each of them."""
    given: list[tuple[float, Hashable, Hint | None]] = []
    caches: list[PrefixCache] = []
    close = Sequence.close

    class Checked(PrefixCache):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            caches.append(self)

    def note(sequence: Sequence, hint: Hint | None = None) -> None:
        if not sequence.closed:
            close(sequence, hint)
            given.append((caches[-1].clock(), sequence.namespace, hint))
            caches[-1].check()

    monkeypatch.setattr(Sequence, "close", note)
    monkeypatch.setattr(simulate, "PrefixCache", Checked)
    return given


def test_the_cache_gets_the_hints_of_a_live_engine(hints: list[tuple[float, Hashable, Hint | None]]) -> None:
    told = [
        TraceRequest(500.0, 20, 7, array("q", [1, 2]), stop="tool_use", namespace="a"),
        TraceRequest(2000.0, 20, 9, array("q", [1, 2]), stop=""),
        TraceRequest(1000.0, 20, 0, array("q", [1, 3])),
    ]
    replay(told, 3, "lru", 10)
    assert hints == [
        (0.5, "a", Hint(kind="tool_use", output_length=7)),
        (2.0, None, Hint(output_length=9)),
        (2.0, None, Hint(output_length=0)),  # a clock never goes back
    ]


def turn(at: float, session: str | None, stop: str = "tool_use", blocks: tuple[int, ...] = (1,)) -> TraceRequest:
    return TraceRequest(1000.0 * at, len(blocks), 1, array("q", blocks), session=session, stop=stop)


def test_the_median_gap_after_tool_calls_is_announced_from_five_on(hints: list[tuple[float, Hashable, Hint]]) -> None:
    turns = [turn(at, "a") for at in (0, 9, 10, 13, 17, 19, 49)]  # gaps 9, 1, 3, 4, 2, 30
    replay([*turns, turn(50, "a", "end_turn"), turn(149, "a"), turn(150, None)], 9, "predictive+returns", 1)
    # The answer after the last call took one second; the user's next message is no gap of a tool.
    assert [hint.returns_in for _, _, hint in hints] == [*[None] * 5, 3.0, 3.5, None, 3.0, None]


def test_the_last_text_of_a_session_is_evicted_first() -> None:
    trace = [
        turn(0, "old", blocks=(1, 2)), turn(1, "ends", blocks=(3, 4)), turn(2, "ends", blocks=(3, 4, 5)),
        turn(3, "new", blocks=(6, 7)), turn(4, "old", blocks=(1, 2)), turn(5, "new", blocks=(6, 7)),
    ]  # fmt: skip
    assert list(replay(trace, 5, "lru", 1).hits) == [0, 0, 2, 0, 0, 2]
    assert list(replay(trace, 5, "lru+end", 1).hits) == [0, 0, 2, 0, 2, 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_of_the_cache_keeps_its_books(policy: str, hints: list[Any]) -> None:
    requests = list(islice(read(sample("conversation")), 60))
    result = replay(requests, unique_blocks(requests) // 10, policy)
    assert len(hints) == 60 and result.evicted_blocks > 0
    assert result.regret_tokens == replay(requests, 1, "infinite").hit_tokens - result.hit_tokens > 0


def test_ctrl_c_leaves_whole_requests_only() -> None:
    served: list[int] = []

    def interrupted(done: int, total: int) -> None:
        served.append(done)
        if len(served) == 3:
            raise KeyboardInterrupt

    trace = prepare(read(sample("conversation")), 512)
    part = replay(trace, 838, "lru", progress=interrupted)
    first = prepare(islice(read(sample("conversation")), part.requests), 512)
    whole = replay(first, 838, "lru")
    assert not part.finished and whole.finished and 0 < part.requests < 570
    assert (part.hit_tokens, part.input_tokens, part.regret_tokens) == (
        whole.hit_tokens, whole.input_tokens, whole.regret_tokens,
    )  # fmt: skip
    assert part.hits == whole.hits and part.cached == whole.cached
    assert over_time(trace, part) == over_time(first, whole)


def test_moments_and_groups_are_sums_over_requests() -> None:
    requests = list(read(sample("cc_agent")))
    trace = prepare(requests, 64)
    result = replay(trace, 1000, "lru")
    moments = over_time(trace, result, most=7)
    assert [moment.cached_blocks for moment in moments] == [result.cached[400 * i // 7 - 1] for i in range(1, 8)]
    assert moments[-1].seconds == requests[-1].timestamp / 1000
    first = range(400 // 7)
    asked = sum(requests[i].input_length for i in first)
    hit = sum(min(result.hits[i] * 64, requests[i].input_length) for i in first)
    assert moments[0].token_hit_rate == hit / asked
    groups = by_group(trace, result, "stop")
    assert {group.name for group in groups} == {each.stop for each in requests}
    assert sum(group.hit_tokens for group in groups) == result.hit_tokens
    assert [group.input_tokens for group in groups] == sorted((group.input_tokens for group in groups), reverse=True)
    with pytest.raises(InvalidInput, match="tenant"):
        by_group(trace, result, "colour")
