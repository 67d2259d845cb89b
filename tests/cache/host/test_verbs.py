"""Every verb in every order on a cache with a host tier, whose blocks derive from the whole history of tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from tests.cache.host.world import HostQuotaWorld, HostWorld, RoomyHostWorld
from tests.cache.test_fuzz import POOLS, PROOFS, QUICK, RUN, Story, runs
from tests.cache.test_stateful import Verbs, how_long, pick


class HostVerbs(Verbs):
    """The verbs as rules."""

    world_class = HostWorld
    world: HostWorld

    @precondition(lambda self: self.some_open)
    @rule(which=pick, text=pick, count=st.integers(1, 60))
    def load(self, which: int, text: int, count: int) -> None:
        """Load the next tokens of an earlier text, as far as they are on the host, or one more."""
        one, said = self.one(which), self.earlier[text % len(self.earlier)]
        if said[: len(one.tokens)] == one.tokens:
            self.world.load(one, said[len(one.tokens) :][:count])

    @rule()
    def run_the_moves(self) -> None:
        self.world.run_moves()

    @rule()
    def confirm_the_moves(self) -> None:
        self.world.confirm_moves()

    @rule()
    def look_at_the_host(self) -> None:
        self.world.random_host_run()


class RoomyHostVerbs(HostVerbs):
    """A host that never evicts: hits in both tiers together are exact."""

    world_class = RoomyHostWorld


class HostQuotaVerbs(HostVerbs):
    """Limits of namespaces too."""

    world_class = HostQuotaWorld


class MoreHostVerbs(HostVerbs):
    """The same, for `make test-all`."""


class MoreRoomyHostVerbs(RoomyHostVerbs):
    """The same, for `make test-all`."""


class MoreHostQuotaVerbs(HostQuotaVerbs):
    """The same, for `make test-all`."""


TestUnderPressure = HostVerbs.TestCase
TestUnderPressure.settings = how_long(8)
TestRoomy = RoomyHostVerbs.TestCase
TestRoomy.settings = how_long(8)
TestQuotas = HostQuotaVerbs.TestCase
TestQuotas.settings = how_long(4)
TestMoreUnderPressure = pytest.mark.long(MoreHostVerbs.TestCase)
TestMoreUnderPressure.settings = how_long(40)
TestMoreRoomy = pytest.mark.long(MoreRoomyHostVerbs.TestCase)
TestMoreRoomy.settings = how_long(30)
TestMoreQuotas = pytest.mark.long(MoreHostQuotaVerbs.TestCase)
TestMoreQuotas.settings = how_long(25)


class HostStory(Story):
    """Random verbs over a world with a host tier."""

    world: HostWorld

    def __init__(self, world: HostWorld, suffix: int, most_open: int, seed: int) -> None:
        super().__init__(world, suffix, most_open, seed)
        self.verbs += [(10, self.load), (2, world.run_moves), (2, world.confirm_moves), (1, world.random_host_run)]

    def pause(self) -> None:
        super().pause()
        stats = self.world.cache.stats()
        if self.world.roomy and stats.host_free_blocks < stats.host_blocks // 2:
            self.world.clear()

    def load(self) -> None:
        """Continue a sequence along an earlier text by a load of what the host has, or sometimes of one token more."""
        if self.world.live:
            one = self.one()
            if one.plan is not None and self.rng.random() < 0.8:
                self.world.commit(one)
            length = len(one.tokens)
            rests = [said[length:] for said in self.said if len(said) > length and said[:length] == one.tokens]
            if rests:
                rest = self.rng.choice(rests)
                count = self.world.loadable(one, rest) + (self.rng.random() < 0.1)
                self.world.load(one, rest[: max(1, count)])


@pytest.mark.parametrize("world_class", [HostWorld, RoomyHostWorld, HostQuotaWorld])
@pytest.mark.parametrize(RUN, runs(*QUICK[1:4]))
def test_long_runs_under_pressure(
    block_size: int,
    blocks: int,
    policy: str,
    suffix: int,
    most_open: int,
    operations: int,
    world_class: type[HostWorld],
) -> None:
    world = world_class(blocks, block_size, policy, seed=blocks, proofs=PROOFS)
    HostStory(world, suffix, most_open, seed=block_size * 1000 + blocks).run(operations // (3 * len(POOLS)))
    stats = world.cache.stats()
    assert min(stats.offloaded_blocks, stats.hit_tokens) > 0
    assert stats.loaded_tokens or world.host_blocks == 1, "only a host of one block may never have the next tokens"
    world.wind_down()
