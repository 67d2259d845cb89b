"""Simulated lives of an engine that speculates, drafted by an adversary: 24 in `make test`, more in long runs.

They have host memory and overlapped steps in turn. `python -m tests.simulation --drafts --seed N
--verbose` replays one without these.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.draw import draw, with_drafts, with_host
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.test_faults import LIFE, failed
from tests.simulation.test_lives import live, more
from tests.simulation.world import World

SIGHTS = (  # events that must occur, or the lives are too easy
    "a fault: forward", "a fault: garbled", "a fault: sampler", "accepted_from_tree", "audited_blocks", "bad_words",
    "beams: finished", "cancelled: decode", "copied", "drafted_from_own", "evicted", "forced_tokens", "hits",
    "host_tokens", "nan", "pinned", "preemptions", "rule", "scored_tokens", "timed_out", "wasted_tokens",
)  # fmt: skip


def life(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario = with_drafts(with_host(scenario) if seed % 3 == 2 else scenario)
    return replace(scenario, disk=scenario.reuse and seed % 9 == 8, overlap=seed % 4 == 1)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(24)), life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_of_every_life_ends_as_it_must(overlap: bool) -> None:
    live(more(24), lambda seed: replace(life(seed), overlap=overlap))


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
