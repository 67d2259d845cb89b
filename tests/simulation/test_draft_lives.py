"""A life of an engine that speculates, drafted by an adversary, with a fault or a cancellation at any step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.draw import with_drafts
from tests.simulation.scenario import Fault
from tests.simulation.test_faults import LIFE, failed
from tests.simulation.world import World


@pytest.mark.parametrize(("overlap", "blocks"), [(False, 12), (True, 40)])
def test_a_fault_or_a_cancellation_at_any_step_costs_nothing_else(overlap: bool, blocks: int) -> None:
    """With few blocks a life preempts while drafts are verified; then each third step has a fault, or cancels."""
    drafted = with_drafts(replace(LIFE, seed=2, overlap=overlap, num_blocks=blocks))
    whole = World(drafted).run()
    seen = whole.sights()
    assert not failed(whole) and seen["accepted_from_tree"] and (overlap or seen["preemptions"])
    for step in range(0, whole.step, 3):
        world = World(replace(drafted, faults=(Fault(step, "forward" if step % 2 else "sampler", step % 3),))).run()
        assert len(failed(world)) <= 1, f"step {step}"
        asks = tuple(replace(each, cancel=step) if each.number == step % 8 else each for each in LIFE.asks)
        ends = {number: each.end for number, each in World(replace(drafted, asks=asks)).run().customers.items()}
        assert all("finished" in end for number, end in ends.items() if number != step % 8), f"step {step}"
