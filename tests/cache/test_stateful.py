"""Every verb in every order, against the naive model, with content-checked slots (Hypothesis).

Plans stay pending over other sequences' verbs and run in batches, copies shuffled. `RADIXKV_LONG=1` tries
75 times as many histories.
"""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.cache import POLICIES, Hint
from radixkv.cache.types import Purpose
from tests.cache.world import Tracked, World

LONG = os.environ.get("RADIXKV_LONG") == "1"
NAMESPACES = (None, "a", "b")
PURPOSES: tuple[Purpose, ...] = ("request", "request", "resume", "audit")

sizes = st.sampled_from((1, 2, 3, 16))
pick = st.integers(0, 15)
suffixes = st.builds(lambda head, run: head + [0] * run, st.lists(st.integers(0, 2), max_size=6), st.integers(0, 20))
hints = st.none() | st.builds(Hint, done=st.booleans(), priority=st.integers(0, 1))


class Verbs(RuleBasedStateMachine):
    """The verbs as rules; subclasses choose the pool."""

    exact = False
    world_class = World

    @initialize(
        block_size=sizes, blocks=st.integers(1, 40), policy=st.sampled_from(list(POLICIES)), seed=st.integers(0, 2**20)
    )
    def start(self, block_size: int, blocks: int, policy: str, seed: int) -> None:
        blocks = 200 + 5000 // block_size if self.exact else blocks
        self.world = self.world_class(blocks, block_size, policy, exact=self.exact, seed=seed)
        self.earlier: list[list[int]] = [[]]

    def prompt(self, which: int, cut: int, suffix: list[int]) -> list[int]:
        """Return the beginning of an earlier text, continued by `suffix`."""
        said = self.earlier[which % len(self.earlier)][:cut] + suffix
        self.earlier.append(said)
        return said

    def one(self, which: int) -> Tracked:
        return self.world.live[which % len(self.world.live)]

    @property
    def some_open(self) -> bool:
        return bool(self.world.live)

    @rule(
        which=pick,
        cut=st.integers(0, 60),
        suffix=suffixes,
        space=st.sampled_from(NAMESPACES),
        back=st.integers(0, 3),
        purpose=st.sampled_from(PURPOSES),
    )
    def open(self, which: int, cut: int, suffix: list[int], space: str | None, back: int, purpose: Purpose) -> None:
        said = self.prompt(which, cut, suffix)
        limit = None if back == 0 else max(0, len(said) - back)
        self.world.open(space, said, limit, purpose=purpose)

    @rule(
        which=pick, cut=st.integers(0, 60), suffix=suffixes, space=st.sampled_from(NAMESPACES), how=st.integers(-1, 2)
    )
    def open_and_plan_the_rest(self, which: int, cut: int, suffix: list[int], space: str | None, how: int) -> None:
        said = self.prompt(which, cut, suffix)
        opened = self.world.open(space, said, priority=how)
        self.world.extend(opened, said[opened.seq.length :])

    @precondition(lambda self: self.some_open)
    @rule(which=pick, tokens=suffixes)
    def extend(self, which: int, tokens: list[int]) -> None:
        one = self.one(which)
        if self.world.extend(one, tokens):
            self.earlier.append(one.tokens + tokens)

    @precondition(lambda self: self.some_open)
    @rule(which=pick)
    def extend_by_nothing(self, which: int) -> None:
        self.world.extend(self.one(which), [])

    @precondition(lambda self: self.some_open)
    @rule(which=pick, token=st.integers(0, 2))
    def extend_unknown(self, which: int, token: int) -> None:
        one = self.one(which)
        if self.world.extend_unknown(one, token):
            self.earlier.append([*one.tokens, token])

    @precondition(lambda self: self.some_open)
    @rule(which=pick)
    def resolve(self, which: int) -> None:
        self.world.resolve(self.one(which))

    @precondition(lambda self: self.some_open)
    @rule(which=pick, back=st.integers(-1, 6))
    def publish(self, which: int, back: int) -> None:
        one = self.one(which)
        self.world.publish(one, max(0, len(one.tokens) - back))

    @precondition(lambda self: self.some_open)
    @rule(chosen=st.integers(1, 255))
    def execute(self, chosen: int) -> None:
        self.world.execute([one for i, one in enumerate(self.world.live) if chosen >> i % 8 & 1])

    @precondition(lambda self: self.some_open)
    @rule(which=pick, publish=st.booleans())
    def commit(self, which: int, publish: bool) -> None:
        self.world.commit(self.one(which), publish)

    @rule(publish=st.booleans())
    def step(self, publish: bool) -> None:
        self.world.step(publish)

    @precondition(lambda self: self.some_open)
    @rule(which=pick)
    def fork(self, which: int) -> None:
        self.world.fork(self.one(which))

    @precondition(lambda self: self.some_open)
    @rule(which=pick, back=st.integers(0, 40))
    def truncate(self, which: int, back: int) -> None:
        one = self.one(which)
        self.world.truncate(one, max(0, len(one.tokens) - back))

    @precondition(lambda self: self.some_open)
    @rule(which=pick, hint=hints)
    def close(self, which: int, hint: Hint | None) -> None:
        self.world.close(self.one(which), hint)

    @rule()
    def close_all(self) -> None:
        self.world.step()
        while self.world.live:
            self.world.close(self.world.live[-1])
        self.world.assert_little_is_stranded()

    @rule(
        which=pick, cut=st.integers(0, 60), suffix=suffixes, space=st.sampled_from(NAMESPACES), back=st.integers(0, 2)
    )
    def ask(self, which: int, cut: int, suffix: list[int], space: str | None, back: int) -> None:
        said = self.earlier[which % len(self.earlier)][:cut] + suffix
        self.world.ask_without_a_trace(space, said, None if back == 0 else max(0, len(said) - back))

    @rule(which=pick, cut=st.integers(0, 60), space=st.sampled_from(NAMESPACES), ttl=st.sampled_from((None, 0.5, 3.5)))
    def pin(self, which: int, cut: int, space: str | None, ttl: float | None) -> None:
        self.world.pin(space, self.earlier[which % len(self.earlier)][:cut], ttl)

    @precondition(lambda self: self.world.pins)
    @rule(which=pick)
    def release(self, which: int) -> None:
        self.world.release(self.world.pins[which % len(self.world.pins)])

    @rule(which=pick, cut=st.integers(0, 60), space=st.sampled_from(NAMESPACES), start=st.integers(0, 40))
    def demote(self, which: int, cut: int, space: str | None, start: int) -> None:
        self.world.demote(space, self.earlier[which % len(self.earlier)][:cut], start)

    @rule(which=pick, cut=st.integers(0, 60), space=st.sampled_from(NAMESPACES), start=st.integers(0, 40))
    def discard(self, which: int, cut: int, space: str | None, start: int) -> None:
        self.world.discard(space, self.earlier[which % len(self.earlier)][:cut], start)

    @rule()
    def look_at_something(self) -> None:
        self.world.random_run()

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.world.wait(seconds)

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @rule(space=st.sampled_from(NAMESPACES))
    def clear_namespace(self, space: str | None) -> None:
        self.world.clear_namespace(space)

    @precondition(lambda self: self.world.pins)
    @rule(which=pick, other=st.booleans())
    def unpin(self, which: int, other: bool) -> None:
        pinned = self.world.pins[which % len(self.world.pins)]
        self.world.unpin(pinned.namespace, pinned.tokens[:-1] if other else pinned.tokens)

    @rule()
    def find_nodes(self) -> None:
        self.world.find_nodes()

    @rule()
    def drain(self) -> None:
        self.world.drain()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()


class RoomyVerbs(Verbs):
    """A pool that never evicts: hits are exact."""

    exact = True


def how_long(examples: int) -> settings:
    return settings(
        max_examples=examples * (75 if LONG else 1),
        stateful_step_count=50,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


class MoreVerbs(Verbs):
    """The same, for `make test-all`."""


class MoreRoomyVerbs(RoomyVerbs):
    """The same, for `make test-all`."""


TestUnderPressure = Verbs.TestCase
TestUnderPressure.settings = how_long(25)
TestExact = RoomyVerbs.TestCase
TestExact.settings = how_long(15)
TestMoreUnderPressure = pytest.mark.long(MoreVerbs.TestCase)
TestMoreUnderPressure.settings = how_long(115)
TestMoreExact = pytest.mark.long(MoreRoomyVerbs.TestCase)
TestMoreExact.settings = how_long(45)
