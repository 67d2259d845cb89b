"""Simulated lives of an engine with a host tier: 25 in `make test`, more in `make test-all`.

`python -m tests.simulation --host --seed N --verbose` replays one.
"""

from __future__ import annotations

import pytest

from tests.simulation.draw import draw, with_host
from tests.simulation.scenario import Scenario
from tests.simulation.test_lives import RARE, live, more

SIGHTS = (  # events that must occur, or the lives are too easy
    "a fault: load",
    "a fault: offload",
    "audited_blocks",
    "beams: resumed and finished",
    "cancelled: preempted",
    "coalesced_tokens",
    "evicted",
    "failed_loads",
    "failed_offloads",
    "host_tokens",
    "pinned",
    "preemptions",
    "shaken",
)


def life(seed: int) -> Scenario:
    scenario = draw(seed)
    return with_host(scenario)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live([*range(23), *RARE], life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    live(more(25), life)
