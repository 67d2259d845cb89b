"""Every verb in every order on a cache with recurrent state, whose states derive from the whole history of tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from tests.cache.recurrent.world import StatefulWorld
from tests.cache.test_fuzz import POOLS, PROOFS, Story
from tests.cache.test_stateful import Verbs, how_long, pick
from tests.selection import mostly_long, sampled


class StatefulVerbs(Verbs):
    """The verbs as rules."""

    world_class = StatefulWorld
    world: StatefulWorld

    @precondition(lambda self: self.some_open)
    @rule(which=pick, position=st.integers(0, 80))
    def take_a_snapshot(self, which: int, position: int) -> None:
        self.world.snapshot_at(self.one(which), position)

    @rule()
    def run_the_copies(self) -> None:
        self.world.run_copies()


class RoomyStatefulVerbs(StatefulVerbs):
    """A pool and slots that never evict: hits are exact."""

    exact = True


class MoreStatefulVerbs(StatefulVerbs):
    """The same, for `make test-all`."""


class MoreRoomyStatefulVerbs(RoomyStatefulVerbs):
    """The same, for `make test-all`."""


TestUnderPressure = StatefulVerbs.TestCase
TestUnderPressure.settings = how_long(10)
TestExact = RoomyStatefulVerbs.TestCase
TestExact.settings = how_long(6)
TestMoreUnderPressure = pytest.mark.long(MoreStatefulVerbs.TestCase)
TestMoreUnderPressure.settings = how_long(60)
TestMoreExact = pytest.mark.long(MoreRoomyStatefulVerbs.TestCase)
TestMoreExact.settings = how_long(25)


class StatefulStory(Story):
    """Random verbs over a world with recurrent state."""

    world: StatefulWorld

    def extend(self) -> None:
        if self.rng.random() < 0.2:
            one = self.one()
            self.world.snapshot_at(one, len(one.tokens) + self.rng.randrange(20))
        super().extend()


@pytest.mark.parametrize("seed", mostly_long(sampled(range(4), 0, 1), 0))
@pytest.mark.parametrize(("block_size", "blocks", "policy", "suffix", "most_open"), mostly_long(POOLS, *POOLS[3:9:5]))
def test_long_runs_under_pressure(
    block_size: int, blocks: int, policy: str, suffix: int, most_open: int, seed: int
) -> None:
    world = StatefulWorld(blocks, block_size, policy, seed=100 * seed + blocks, proofs=PROOFS)
    StatefulStory(world, suffix, most_open, seed=block_size * 1000 + blocks + seed).run(1500)
    assert world.cache.stats().evicted_blocks > 0
    world.wind_down()
