"""Numbers of prefixes, sizes of blocks, and turns of sessions."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.workload import block_tokens_of, by_time, prepare

BLOCKS = st.lists(st.lists(st.sampled_from([0, 1, 7, 2**63 - 1]), max_size=4), max_size=10)


def request(blocks: list[int], namespace: str | None = None, **more: object) -> TraceRequest:
    made = TraceRequest(0.0, 10 * len(blocks), 1, array("q", blocks), namespace=namespace)
    return replace(made, **more)  # type: ignore[arg-type]


@given(BLOCKS, st.lists(st.sampled_from([None, "a", "b"]), min_size=10, max_size=10))
def test_two_blocks_have_one_number_exactly_if_all_before_them_and_their_namespaces_agree(
    chains: list[list[int]], namespaces: list[str | None]
) -> None:
    workload = prepare(map(request, chains, namespaces), 10)
    texts: dict[int, tuple[object, ...]] = {}
    for chain, namespace, made in zip(chains, namespaces, workload.requests, strict=False):
        for end, number in enumerate(made.blocks, 1):
            text = (namespace, *chain[:end])
            assert texts.setdefault(number, text) == text
            assert workload.parents[number] == (made.blocks[end - 2] if end > 1 else -1)
    assert len(set(texts.values())) == len(texts) == workload.unique_blocks
    assert sorted(texts) == list(range(len(texts)))


@given(BLOCKS)
def test_what_is_known_is_what_a_cache_that_holds_everything_hits(chains: list[list[int]]) -> None:
    workload = prepare(map(request, chains), 10)
    assert replay(workload, max(1, workload.unique_blocks), "lru").hits == workload.known


def test_namespaces_share_nothing_in_the_real_cache_either() -> None:
    workload = prepare([request([1, 2], "a"), request([1, 2], "b"), request([1, 2], "a")], 10)
    assert list(replay(workload, 4, "lru").hits) == [0, 0, 2]


def test_times_never_go_back_and_count_requests_where_there_are_none() -> None:
    timed = [request([1], timestamp=each) for each in (1000.0, 5000.0, 2000.0)]
    assert list(prepare(timed, 10).times) == [1.0, 5.0, 5.0]
    assert list(prepare([request([1])] * 3, 10).times) == [0.0, 1.0, 2.0]


@given(BLOCKS, st.lists(st.integers(0, 3), min_size=10, max_size=10))
def test_by_time_is_as_if_they_had_come_in_that_order(chains: list[list[int]], times: list[int]) -> None:
    requests = [request(chain, timestamp=float(time)) for chain, time in zip(chains, times, strict=False)]
    turned = by_time(prepare(requests, 10))
    assert turned == prepare(sorted(requests, key=lambda each: each.timestamp), 10)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_a_block_without_tokens_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidInput, match="block_tokens"):
        prepare([], wrong)


@pytest.mark.parametrize(("name", "tokens"), [("conversation", 512), ("cc_agent", 64), ("recording", 16)])
def test_the_size_of_a_block_follows_from_the_lengths(name: str, tokens: int) -> None:
    assert block_tokens_of(list(read(sample(name)))) == tokens


def test_lines_that_state_a_size_are_believed_if_they_agree() -> None:
    assert block_tokens_of([request([1], block_tokens=48), request([2])]) == 48
    with pytest.raises(InvalidInput, match="differs"):
        block_tokens_of([request([1], block_tokens=48), request([2], block_tokens=16)])


def test_lengths_that_leave_it_open_or_fit_nothing_ask() -> None:
    assert block_tokens_of([]) == 512
    assert block_tokens_of([request([1], input_length=700)]) == 512
    for lengths in ([300, 300], [10, 1000]):
        with pytest.raises(InvalidInput, match="--block-tokens"):
            block_tokens_of([request([1, 2], input_length=each) for each in lengths])
