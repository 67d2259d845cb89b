"""Groups of beams on the cache: several forks and several closes in one step, content-checked, and recounted."""

from __future__ import annotations

import random

import pytest

from radixkv.cache import POLICIES, Hint
from tests.cache.beams import BeamGroup
from tests.cache.host.world import HostWorld
from tests.cache.recurrent.world import StatefulWorld
from tests.cache.world import World
from tests.selection import mostly_long

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
    world = World(120, block_size)
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", mostly_long([World, StatefulWorld, HostWorld], World))
def test_searches_one_after_the_other_share_and_release_their_blocks(
    kind: type[World], block_size: int, seed: int
) -> None:
    """Searches with prompts that repeat, in a pool too small for two of them at once; other groups stay open."""
    rng = random.Random(seed)
    policy = rng.choice(list(POLICIES))
    world = kind(16 + 90 // block_size, block_size, policy, seed=seed, proofs=0.05)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    widest, groups = 0, list[BeamGroup]()
    for _ in range(25):
        if len(groups) == 2:
            groups.pop(0).close(Hint(done=rng.random() < 0.7))
        prompt = rng.choice(prompts)
        first = world.open(None, prompt)
        if not world.extend(first, prompt[len(first.tokens) :]):
            world.close(first)
            continue
        world.commit(first)
        groups.append(BeamGroup(world, first, rng))
        for group in [group for group in groups if group.beams] * 2:
            group.run(rng.randint(1, 8), WIDTH)
            world.verify()
        widest = max(widest, *(group.most for group in groups))
    assert widest == WIDTH or kind is StatefulWorld  # rows for states may be few
    assert world.cache.stats().copied_blocks or block_size == 1
    world.wind_down()
