"""Simulated lives of an engine that launches each step before it reads the results of the preceding one.

30 lives, and more in `make test-all`. `python -m tests.simulation --overlap --seed N --verbose` replays
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from tests.selection import mostly_long
from tests.simulation.draw import draw, with_drafts, with_host, with_states
from tests.simulation.late import LateSlotModel
from tests.simulation.scenario import Fault, Flaw, Sabotage, Scenario
from tests.simulation.test_faults import LIFE, failed, tokens_of
from tests.simulation.test_lives import live, more
from tests.simulation.world import World

SIGHTS = (  # events that must occur, or the lives are too easy
    "a fault: forward",
    "a fault: garbled",
    "a fault: memory",
    "a fault: sampler",
    "a fault: schedule",
    "audited_blocks",
    "beams: finished",
    "cancelled: decode",
    "coalesced_tokens",
    "evicted",
    "hits",
    "host_bound_rows",
    "nan",
    "pinned",
    "preemptions",
    "scored_tokens",
    "timed_out",
    "wasted_tokens",
)
OVERLAPPED = replace(LIFE, overlap=True)


OPTION_SIGHTS = {  # of lives with an option
    "host": ("a fault: offload", "audited_blocks", "host_tokens", "preemptions", "wasted_tokens"),
    "host and states": ("evicted_states", "host_tokens", "hits", "preemptions", "wasted_tokens"),
    "states": ("evicted_states", "hits", "preemptions", "shaken", "wasted_tokens"),
}


def life(seed: int) -> Scenario:
    scenario = draw(seed)
    return replace(scenario, overlap=True)


def life_with(option: str) -> Callable[[int], Scenario]:
    """Return a function that draws a life with drafts, host memory, recurrent state, or several."""

    def drawn(seed: int) -> Scenario:
        found = with_host(life(seed)) if "host" in option else life(seed)
        found = with_drafts(found) if "drafts" in option else found
        return with_states(found) if "states" in option else found

    return drawn


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(30)), life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.parametrize("option", mostly_long(sorted(OPTION_SIGHTS)))
def test_every_request_of_some_lives_with_an_option_ends_as_it_must(option: str) -> None:
    seen = live(list(range(16)), life_with(option))
    assert not [sight for sight in OPTION_SIGHTS[option] if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    live(more(30), life)


@pytest.fixture(scope="module")
def whole() -> World:
    """Return the life without a fault."""
    return World(OVERLAPPED).run()


def test_the_life_without_a_fault_preempts_and_wastes_nothing(whole: World) -> None:
    """All its streams end by max_tokens, which is known in advance."""
    seen = whole.sights()
    assert not failed(whole)
    assert seen["preemptions"] and seen["coalesced_tokens"] and seen["copied"]
    assert not seen["wasted_tokens"]


@pytest.mark.parametrize("kind", ["forward", "sampler"])
def test_a_launch_that_raises_once_at_any_step_ends_no_request(whole: World, kind: str) -> None:
    """The preceding step is finished first, and then the step is tried again."""
    for step in range(0, whole.step, 8):
        world = World(replace(OVERLAPPED, faults=(Fault(step, kind, step % 3),))).run()
        assert not failed(world), f"step {step}"


def test_scores_that_raise_once_at_any_step_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, calls, broken = LateSlotModel.begin_scores, count(), 0

    def raising(model: LateSlotModel, *arguments: object) -> object:
        if next(calls) == broken:
            raise Sabotage("scores cannot be launched")
        return begin(model, *arguments)

    monkeypatch.setattr(LateSlotModel, "begin_scores", raising)
    asks = tuple(replace(each, score_from=1, most_rows=4, last_targets=(3,)) for each in LIFE.asks)
    while True:
        calls = count()
        world = World(replace(OVERLAPPED, asks=asks)).run()
        assert not failed(world), f"call {broken}"
        broken += 4
        if broken >= next(calls):
            break
    assert broken > 10


@pytest.mark.parametrize("kind", ["schedule", "garbled"])
def test_a_fault_of_a_whole_step_ends_only_requests_of_that_step(whole: World, kind: str) -> None:
    for step in range(0, whole.step, 8):
        world = World(replace(OVERLAPPED, faults=(Fault(step, kind, part=step % 2),))).run()
        swept = set().union(*world.faults.swept.values())
        assert set(failed(world)) <= swept, f"step {step}"


@pytest.mark.parametrize("kind", ["forward", "memory", "nan", "put", "finish"])
def test_a_request_that_breaks_breaks_alone(kind: str) -> None:
    for broken in LIFE.asks[::3]:
        for at in tokens_of(broken, kind):
            asks = tuple(replace(each, flaw=Flaw(kind, at)) if each is broken else each for each in LIFE.asks)
            world = World(replace(OVERLAPPED, asks=asks)).run()
            assert failed(world) == [broken.number], f"request {broken.number}, token {at}"
