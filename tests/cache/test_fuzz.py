"""The fuzz of the cache with fixed examples: a few runs in which each pair of options occurs.

`make test-all` adds runs, more of them with fresh seeds; `python -m tests.cache.fuzz` makes any number of them.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.cache.fuzz.machine import VERBS, Machine, shrink
from tests.cache.fuzz.options import CHOICES, EXCLUSIVE, Options, all_pairs, covering, draw, pairs
from tests.cache.fuzz.tracked import Tracked
from tests.cache.fuzz.world import World

STEPS = 500
FRESH = 1000 * int(os.environ.get("RADIXKV_SEED") or 0)
KEPT: tuple[int, ...] = ()
"""Seeds that `python -m tests.cache.fuzz` found: each failed once."""
EXAMPLES = [pytest.param(options, seed + FRESH, id=f"{seed}") for seed, options in enumerate(covering())]
EXAMPLES += [pytest.param(draw(random.Random(seed)), seed, id=f"kept-{seed}") for seed in KEPT]
MORE = [
    pytest.param(options, 100 * turn + seed + FRESH, id=f"{100 * turn + seed}", marks=pytest.mark.long)
    for turn in range(1, 6 if FRESH else 3)
    for seed, options in enumerate(covering())
]


@pytest.mark.parametrize(("options", "seed"), EXAMPLES + MORE)
def test_all_verbs_with_each_pair_of_options(options: Options, seed: int) -> None:
    machine = Machine(options, seed)
    try:
        machine.run(range(STEPS))
    except Exception as error:
        error.add_note(f"at step {machine.done[-1]} of seed {seed} with {options}")
        raise


def test_each_pair_of_options_that_combine_has_an_example() -> None:
    found = set().union(*(pairs(options) for options in covering()))
    assert found == all_pairs()
    refused = {((one, True), (other, True)) for one, other in EXCLUSIVE}
    assert found | refused == {
        ((one, a), (other, b))
        for at, one in enumerate(CHOICES)
        for other in list(CHOICES)[at + 1 :]
        for a in CHOICES[one]
        for b in CHOICES[other]
    }


def test_runs_reach_each_verb_and_each_kind_of_event() -> None:
    """Over a few runs in small pools, with all verbs."""
    run, least = (
        set(),
        dict.fromkeys(
            ("hit_tokens", "evicted_blocks", "copied_blocks", "regret_tokens", "offloaded_blocks", "loaded_tokens"), 0
        ),
    )
    runs: tuple[dict[str, Any], ...] = (
        {"host": True},
        {"states": True},
        {"watched": True},
        {"host": True, "states": True, "ample": True},
        {"host": True, "disk": True},
        {"host": True, "disk": True, "block_size": 2},
    )
    arrived = 0
    for seed, choices in zip((0, 1, 3, 4, 5, 8), runs, strict=True):
        machine = Machine(Options(**choices), seed)
        for number in range(STEPS):
            machine.step(number)
        run |= {each.split()[1] for each in machine.done}
        arrived += machine.world.disk.arrived if machine.world.disk else 0
        stats = machine.world.cache.stats()
        least = {name: count + getattr(stats, name) for name, count in least.items()}
    assert run == {verb.run.__name__ for verb in VERBS}
    assert arrived, "no text came from the disk"
    assert min(least.values()) > 0, least


def test_a_failure_shrinks_to_the_steps_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the third fork fails."""
    forks, fork = [], World.fork

    def failing(world: World, one: Tracked) -> Tracked | None:
        if world not in forks:
            forks.clear()
        forks.append(world)
        assert len(forks) < 3
        return fork(world, one)

    monkeypatch.setattr(World, "fork", failing)
    steps, machine = shrink(Options(), 3, 200)
    assert [each.split()[1] for each in machine.done][-1] in {"fork", "beams"}
    assert len(steps) < 12


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_out_of_blocks_at_every_possible_point(block_size: int) -> None:
    """The same history in pools from one block to enough: each of its extends fails in some of them."""
    refusals = []
    for blocks in range(1, 200):
        refused = run_history(World(blocks, Options(block_size), seed=blocks))
        refusals.append(refused)
        if not any(refused):
            break
    else:
        raise AssertionError("no pool was large enough")
    dry = [any(refused[i] for refused in refusals) for i in range(len(refusals[-1]))]
    assert all(dry), f"never ran dry at extend {dry.index(False)}"


def run_history(world: World) -> list[bool]:
    """Run two sequences with one prefix, a fork, a truncation and a void plan; return the refused extends."""
    size = world.block_size
    prefix = [1] * (2 * size + 1)
    refused = []

    def extend(one: Tracked, tokens: list[int]) -> None:
        refused.append(not world.extend(one, tokens))
        world.verify()

    first = world.open(None, prefix)
    extend(first, prefix)
    world.step()
    second = world.open(None, prefix)
    third = world.open(None, prefix, limit=size)
    extend(first, [2] * (size + 1))
    extend(second, [3] * (2 * size))
    extend(third, [1] * (size + 1))
    world.execute([second, third])
    world.close(third)
    world.step()
    twin = world.fork(second)
    assert twin is not None
    extend(second, [4] * size)
    extend(twin, [5] * (size + 1))
    world.step(publish=False)
    world.truncate(first, min(len(first.tokens), size))
    extend(first, [6] * (3 * size))
    world.close(second)
    world.step()
    extend(twin, [7] * (4 * size))
    extend(first, [8] * size)
    world.wind_down()
    return refused
