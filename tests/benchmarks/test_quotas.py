"""The benchmark of shares: the quiet namespace keeps the hit rate that it has alone, whatever the other one sends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.selection import mostly_long

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import quotas  # in the folder of the benchmarks, not installed

BLOCKS = 400


@pytest.mark.parametrize(("flood", "policy"), mostly_long([(4, "lru"), (4, "predictive"), (16, "slru")], (4, "lru")))
def test_a_flood_does_not_lower_the_hit_rate_of_a_share(flood: int, policy: str) -> None:
    requests = quotas.workload(flood)
    alone = quotas.hit_rates([pair for pair in requests if pair[0] == "quiet"], BLOCKS // 2, policy)["quiet"]
    without = quotas.hit_rates(requests, BLOCKS, policy)["quiet"]
    shared = quotas.hit_rates(requests, BLOCKS, policy, {"quiet": 0.5, "loud": 0.5})["quiet"]
    assert abs(shared - alone) < 0.01
    assert without < alone - 0.1, "the flood is too small to show anything"
