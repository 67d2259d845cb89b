"""Simulated lives with limits of namespaces: 15 in `make test`, more in `make test-all`.

`python -m tests.simulation --limits --seed N --verbose` replays one.
"""

from __future__ import annotations

import pytest

from tests.simulation.draw import draw, with_limits, with_states
from tests.simulation.test_lives import FRESH, LIVES, live

SIGHTS = (  # events that must occur, or the lives are too easy
    "cancelled: preempted",
    "preemptions",
    "recomputed_tokens",
    "coalesced_tokens",
    "evicted",
    "hits",
    "pinned",
    "refused",
    "audited_blocks",
    "a fault: forward",
    "order: a group was passed over",
)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(15)), lambda seed: with_limits(draw(seed)))
    assert seen["hits"] and seen["evicted"]


def test_every_request_of_some_lives_with_states_ends_as_it_must() -> None:
    assert live(list(range(15, 21)), lambda seed: with_states(with_limits(draw(seed))))["hits"]


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    fresh = range(FRESH, FRESH + 100) if FRESH else ()
    seen = live([*range(15, max(LIVES, 150)), *fresh], lambda seed: with_limits(draw(seed)))
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"
