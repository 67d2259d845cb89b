"""Simulated lives in which a third of the requests follow compressed prefixes; `--prefixes --seed N` replays one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.draw import draw, with_drafts, with_host, with_prefixes
from tests.simulation.scenario import Scenario
from tests.simulation.test_lives import live, more

SIGHTS = ("a fault: forward", "accepted_from_tree", "audited_blocks", "beams: finished", "copied", "host_tokens")
SIGHTS += tuple(f"after a prefix: {end}" for end in ("PrefixGone", "finished", "resumed and finished"))


def life(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario = with_host(scenario) if seed % 3 == 2 else scenario
    scenario = with_prefixes(with_drafts(scenario) if seed % 5 == 4 else scenario)
    return replace(scenario, disk=seed % 9 == 8, overlap=seed % 4 == 1)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live([2, *range(4, 11), 13, 17, 24, 38], life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    live(more(0), life)
