"""Several simulated engines: hits, balance and waits by each router, on traces that one can count by hand."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import PrefixCache
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv_traces import simulate_replicas
from radixkv_traces.cli import Capacity, main
from radixkv_traces.records import TraceRequest
from radixkv_traces.simulate import replay
from radixkv_traces.simulate_replicas import ROUTINGS, replay_replicas
from radixkv_traces.workload import Workload, prepare


def workload(*requests: tuple[float, str, list[int]]) -> Workload:
    """(seconds, session, block ids) as requests of 10 tokens a block."""
    return prepare([TraceRequest(1e3 * at, 10 * len(ids), 1, array("q", ids), name) for at, name, ids in requests], 10)


A, B = [1, 2, 3, 4], [5, 6, 7, 8]
TURNS = workload((0, "a", A), (1, "b", B), (2, "b", B), (3, "a", A), (4, "c", A), (5, "d", B))


@pytest.mark.parametrize(
    ("routing", "hit_tokens", "computed"),
    [
        ("random", 120, (40, 80)),  # the seed gives replicas 1, 1, 0, 1, 1, 1
        ("round-robin", 80, (80, 80)),  # a, b at 0, 1; b, a the other way round
        ("sticky", 120, (80, 40)),
        ("prefix", 160, (40, 40)),
        ("expected-ttft", 160, (40, 40)),
    ],
)
def test_hits_and_balance_of_two_replicas(routing: str, hit_tokens: int, computed: tuple[int, ...]) -> None:
    result = replay_replicas(TURNS, 16, "lru", 2, routing, prefill_rate=100)
    assert (result.hit_tokens, result.computed_tokens) == (hit_tokens, computed)
    assert result.imbalance == 2 * max(computed) / sum(computed)


def test_a_busy_replica_is_avoided_only_if_its_wait_is_longer_than_the_prompt() -> None:
    """At 10 tokens a second, the first prompt takes 4 s and its repeat nothing."""
    hot = workload((0, "a", A), (1, "b", A), (2, "c", A))
    held = replay_replicas(hot, 16, "lru", 2, "prefix", prefill_rate=10)
    assert held.computed_tokens == (40, 0)
    assert list(held.ttfts) == [4, 3, 2]
    spread = replay_replicas(workload((0, "a", [1, 2, 3, 4, 9, 9]), (1, "b", [1])), 16, "lru", 2, "expected-ttft", 10)
    assert spread.computed_tokens == (60, 10)
    assert list(spread.ttfts) == [6, 1]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.lists(st.integers(0, 4), max_size=6)), min_size=1),
    st.sampled_from(sorted(ROUTINGS)),
    st.integers(1, 4),
)
def test_every_token_hits_or_is_computed_once(turns: list[Any], routing: str, replicas: int) -> None:
    made = workload(*sorted(turns, key=lambda turn: turn[0]))
    caches: list[PrefixCache] = []

    def cache(*arguments: Any, **named: Any) -> PrefixCache:
        caches.append(PrefixCache(*arguments, **named))
        return caches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate_replicas, "PrefixCache", cache)
        patch.setattr(simulate_replicas, "_STRIDE", 1)
        result = replay_replicas(made, 12, "lru", replicas, routing, progress=lambda *_: [c.check() for c in caches])
    assert [each.num_blocks for each in caches] == [12 // replicas] * replicas
    assert result.hit_tokens + sum(result.computed_tokens) == made.input_tokens
    assert len(result.ttfts) == len(made.requests)
    assert min(result.ttfts) >= 0
    if replicas == 1:
        assert result.hit_tokens == replay(made, 12, "lru").hit_tokens


def test_the_command_compares_with_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["simulate", "sample:cc_agent", "--limit", "60", "--capacity", "10%", "--replicas", "2,3"]
    assert main([*base, "--routing", "sticky,prefix", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["replicas"], row["routing"]) for row in rows] == [
        (1, None), (2, "sticky"), (2, "prefix"), (3, "sticky"), (3, "prefix")
    ]  # fmt: skip
    assert main(base) == 0
    assert "expected-ttft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--replicas", "2,9999999"], "no part for each"),
        (["--replicas", "2", "--decode-rate", "9"], "--decode-rate"),
        (["--replicas", "2", "--order", "fcfs"], "--order"),
        (["--replicas", "2", "--host", "2x"], "--host"),
        (["--replicas", "2", "--policy", "clairvoyant"], "clairvoyant"),
    ],
)
def test_wrong_options_are_refused(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "sample:cc_agent", "--limit", "5", *options]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--routing", "sticky"], "--replicas"),
        (["--replicas", "two"], "--replicas 'two'"),
        (["--replicas", "2,0"], "--replicas '2,0'"),
        (["--replicas", "2", "--routing", "prefix,best"], "expected-ttft"),
    ],
)
def test_wrong_lists_are_refused_before_the_trace_is_read(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "missing.jsonl", *options]) == 2
    assert named in capsys.readouterr().err


def test_sizes_are_refused_before_the_first_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_replicas, "replay_replicas", lambda *_: pytest.fail("a replay began"))
    with pytest.raises(InvalidInput, match="replicas=17"):
        list(simulate_replicas.replica_rows(TURNS, [Capacity("16", 16)], ["lru"], [(1, "prefix"), (17, "sticky")], 9.0))


def test_one_engine_has_one_row() -> None:
    assert simulate_replicas.replica_cases("1,2, 2", "sticky") == [(1, "prefix"), (2, "sticky")]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="routing"):
        replay_replicas(TURNS, 16, "lru", 2, "best")
    with pytest.raises(UnknownPolicy):
        replay_replicas(TURNS, 16, "infinite", 2, "sticky")
    with pytest.raises(InvalidInput, match="replicas=17"):
        replay_replicas(TURNS, 16, "lru", 17, "sticky")
