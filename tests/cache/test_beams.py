"""Groups of beams on the cache: several forks and several closes in one step, content-checked, and recounted."""

from __future__ import annotations

import random

import pytest

from radixkv.cache import Hint
from tests.cache.fuzz.beams import BeamGroup
from tests.cache.fuzz.options import Options
from tests.cache.fuzz.world import World

WIDTH = 4


def group_of(world: World, prompt: list[int], seed: int) -> BeamGroup:
    """Return one beam with a published prompt."""
    first = world.open(None, prompt)
    assert world.extend(first, prompt[len(first.tokens) :])
    world.commit(first)
    return BeamGroup(world, first, random.Random(seed))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_take_the_prompt_once_and_private_blocks_after_their_last_common_ancestor(block_size: int) -> None:
    """The prompt ends inside a block: one beam writes there in place, and each other one has a copy of that block."""
    world = World(120, Options(block_size))
    prompt = [1] * (5 * block_size + block_size // 2)
    group = group_of(world, prompt, seed=0)
    first = group.beams[0].one
    held = len(first.table)
    twins = [world.fork(first) for _ in range(WIDTH - 1)]
    beams = [first, *(twin for twin in twins if twin is not None)]
    for letter, beam in enumerate(beams):
        assert world.extend(beam, [letter])
    world.step(publish=False)
    copies = WIDTH - 1 if block_size > 1 else 0
    stats = world.cache.stats()
    assert stats.copied_blocks == copies
    assert stats.held_blocks == held + (copies or WIDTH)
    for beam in beams[1:]:
        world.close(beam, Hint(done=True))
    assert world.cache.stats().held_blocks == held + (not copies)
    world.wind_down()
