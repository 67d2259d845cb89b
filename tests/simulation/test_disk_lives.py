"""Simulated lives of an engine with a disk: 10 in `make test`, more in `make test-all`.

`python -m tests.simulation --disk --seed N --verbose` replays one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.draw import draw, with_host
from tests.simulation.scenario import Scenario
from tests.simulation.test_lives import live, more

SIGHTS = ("disk_tokens", "host_tokens", "cancelled: waiting", "preemptions", "failed_writes")


def life(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario = with_host(scenario)
    return replace(scenario, disk=scenario.reuse, overlap=seed % 3 == 2)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(10)), life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    live(more(10), life)
