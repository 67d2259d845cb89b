"""A life of an engine that launches each step before it reads the results of the preceding one, with any fault."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.simulation.late import LateSlotModel
from tests.simulation.scenario import Fault, Flaw, Sabotage
from tests.simulation.test_faults import LIFE, failed, tokens_of
from tests.simulation.world import World

OVERLAPPED = replace(LIFE, overlap=True)


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
