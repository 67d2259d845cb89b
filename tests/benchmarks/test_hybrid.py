"""Check the rules and the workloads of benchmarks/hybrid.py, its bars, and chats on an engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.selection import mostly_long

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hybrid  # in the folder of the benchmarks, not installed
from hybrid_parts import workloads
from hybrid_parts.policies import BOUND, OURS, RULES, by_rule, paths
from hybrid_parts.workloads import Ask

QUICK = {workload.name: workload for workload in workloads.workloads(quick=True)}


def asks(*texts: tuple[Sequence[int], int]) -> list[Ask]:
    """Return requests of these prompts, with replies of this many tokens that no other text has."""
    return [
        Ask(0, np.array(prompt, np.int32), len(prompt), np.arange(count, dtype=np.int32) + 10**6 * (1 + at))
        for at, (prompt, count) in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("every block", [0, 992, 496, 496, 1024]),
        ("align", [0, 528, 0, 0, 528]),
        ("node ends", [0, 0, 0, 0, 1039]),
        ("node ends +", [0, 960, 0, 448, 1024]),
    ],
)
def test_a_rule_hits_where_it_keeps_states(name: str, hits: list[int]) -> None:
    one = list(range(1000))
    requests = asks((one, 40), (one, 40), (one[:500] + [7] * 50, 40), ([*one[:510], 8], 40))
    requests += asks(([*one, *requests[0].reply[:39], 7], 1))
    assert by_rule(paths(requests), 10_000, RULES[name]).hits == hits


def test_the_least_recently_used_state_is_evicted() -> None:
    one, two, three = ([at * 1000 + i for i in range(600)] for at in range(3))
    requests = paths(asks((one, 1), (two, 1), (one, 1), (three, 1), (one, 1), (two, 1)))
    assert by_rule(requests, 2, RULES["align"]).hits == [0, 0, 528, 0, 528, 0]


@pytest.mark.parametrize("name", mostly_long(QUICK, "agents", "repeated prompts"))
def test_the_quick_workloads_meet_the_bars(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = hybrid.caches(QUICK[name])
    assert [row["policy"] for row in rows] == [OURS, *RULES] * (len(hybrid.MEMORY) + 1)
    assert hybrid.missed(rows, []) == []
    assert "hit" in capsys.readouterr().out


def test_a_missed_bar_is_named() -> None:
    row: dict[str, Any] = {"workload": "chats", "states": 4, "strips": True, BOUND: 0.9}
    ours = {**row, "policy": OURS, "hit_rate": 0.8, "of_bound": 0.889, "resumed": 0.5}
    engine = {"model": "lfm2", "template": "plain", "same_hits": False, "resumed": 1}
    found = hybrid.missed([ours, {**row, "policy": "align", "hit_rate": 0.81}], [engine])
    assert found == [
        "chats at 4 states a session: 0.889 of the bound",
        "chats at 4 states a session: 50.0% of the turns hit all but the last message",
        "chats at 4 states a session: 0.8000 hit, and 0.8100 by align",
        "lfm2, plain: the engine and the cache alone hit different tokens",
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5"])
def test_chats_on_an_engine_hit_as_the_cache_alone(kind: str) -> None:
    pytest.importorskip("llguidance")
    row = hybrid.engine_chats(kind, "strips reasoning", sessions=2, turns=3)
    assert row["turns"] == 6
    assert row["copies_per_turn"] > 1
    assert hybrid.missed([], [row]) == []
