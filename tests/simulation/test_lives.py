"""Hundreds of simulated lives of the engine; `RADIXKV_LONG=1` lives thousands. See `tests/simulation/__main__.py`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from radixkv.engine.limits import Limits
from radixkv.models.sampler import SamplingParams
from tests.simulation.draw import draw
from tests.simulation.scenario import Ask, Fault, Scenario
from tests.simulation.shrink import shrink
from tests.simulation.world import World

LIVES = 6000 if os.environ.get("RADIXKV_LONG") == "1" else 250
SIGHTS = (  # what must have been met, or the lives are too easy
    "cancelled: waiting",
    "cancelled: prefill",
    "cancelled: decode",
    "cancelled: preempted",
    "timed_out",
    "preemptions",
    "recomputed_tokens",
    "coalesced_tokens",
    "overtaken",
    "evicted",
    "copied",
    "hits",
    "pinned",
    "audited_blocks",
    "refused",
    "forward",
    "memory",
    "nan",
    "put",
    "finish",
    "namespace",
    "a fault: forward",
    "a fault: memory",
    "a fault: sampler",
    "a fault: schedule",
    "a fault: garbled",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of ten numbers are no work for two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_request_of_every_life_ends_as_it_must() -> None:
    failures, seen = [], Counter[str]()
    for seed in range(LIVES):
        try:
            seen += World(draw(seed)).run().sights()
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(
        [
            f"{len(failures)} of {LIVES} lives failed",
            *failures[:5],
            "replay: python -m tests.simulation --seed N --verbose",
        ]
    )
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


def test_the_same_seed_is_the_same_life() -> None:
    for seed in (3, 17, 40):
        assert draw(seed) == draw(seed) or any(ask.flaw and ask.flaw.kind == "namespace" for ask in draw(seed).asks)
        assert World(draw(seed)).run().trace == World(draw(seed)).run().trace


def test_what_a_failure_does_not_need_is_dropped() -> None:
    def failure(scenario: Scenario) -> str | None:
        many = any(ask.params.n > 1 and len(ask.prompt) > 2 for ask in scenario.asks)
        return "fails" if many and any(fault.kind == "sampler" for fault in scenario.faults) else None

    seed = next(seed for seed in range(100) if any(ask.params.n > 1 for ask in draw(seed).asks))
    scenario = replace(draw(seed), faults=tuple(Fault(at, "sampler") for at in range(5)))
    least = shrink(scenario, failure)
    assert failure(least)
    assert (len(least.asks), len(least.faults), len(least.pinnings), len(least.forgettings)) == (1, 1, 0, 0)
    assert least.asks[0].params.n > 1 and len(least.asks[0].prompt) == 3


def test_who_waited_for_a_neighbour_ages_once_that_is_over() -> None:
    """The second asks what the first is computing, so it waits; then hits keep coming in before it, once too often."""
    greedy = SamplingParams(max_tokens=20, temperature=0)
    cold, hot = (0, 0, 1, 1), (2,) * 6
    asks = [Ask(0, 0, cold, greedy, 1), Ask(1, 0, cold, greedy, 1), Ask(2, 0, hot, greedy, 20)]
    asks += [Ask(3 + number, 1 + number, (*hot, number), greedy, 1) for number in range(8)]
    limits = Limits(max_sequences=2, max_batch_tokens=16, prefill_chunk=8, order="longest-prefix", max_overtakes=3)
    world = World(Scenario(0, 64, 1, limits, tuple(asks))).run()
    assert world.customers[1].overtaken == 3
