"""Long runs with fixed seeds in small pools, and one short history in pools of every size.

20,000 / 12 operations in each pool of `make test`, 50,000 / 12 in each other one in `make test-all`, and 1,000,000 / 12
in every pool with `RADIXKV_LONG=1`.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.cache import Hint
from radixkv.cache.types import Purpose
from tests.cache.beams import BeamGroup
from tests.cache.world import Tracked, World

QUICK_OPERATIONS, OPERATIONS = (1_000_000,) * 2 if os.environ.get("RADIXKV_LONG") == "1" else (20_000, 50_000)
STRIDE = 50  # operations between two full checks; tables are compared whenever an operation reads them
PURPOSES: tuple[Purpose, ...] = ("request", "request", "request", "request", "resume", "audit")
PROOFS = 0.05  # the share of refusals and reads after which the whole state is compared
POOLS = [
    # block size, blocks, policy, longest suffix, sequences open at a time
    (1, 12, "lru", 4, 4),
    (1, 120, "slru", 12, 8),
    (1, 40, "predictive", 12, 6),
    (2, 9, "lfu", 5, 3),
    (2, 60, "lru", 10, 8),
    (3, 7, "fifo", 6, 3),
    (3, 40, "lru", 14, 10),
    (3, 200, "lfu", 30, 16),
    (16, 5, "lru", 30, 3),
    (16, 12, "slru", 40, 6),
    (16, 12, "predictive", 40, 6),
    (16, 40, "lru", 60, 10),
]
QUICK = (*POOLS[1:4], POOLS[5], POOLS[-1])  # every policy, and four block sizes
RUN = ("block_size", "blocks", "policy", "suffix", "most_open", "operations")


def runs(*quick: tuple[int, int, str, int, int]) -> list[Any]:
    """Parameters of long runs: QUICK_OPERATIONS in the quick pools, and OPERATIONS in the others in `make test-all`."""
    rest = [pool for pool in POOLS if pool not in quick]
    return [(*pool, QUICK_OPERATIONS) for pool in quick] + [
        pytest.param(*pool, OPERATIONS, marks=pytest.mark.long) for pool in rest
    ]


class Story:
    """Random verbs over one world: mostly those of an engine, and some invalid ones."""

    def __init__(self, world: World, suffix: int, most_open: int, seed: int) -> None:
        self.world, self.suffix, self.most_open = world, suffix, most_open
        self.rng = random.Random(seed)
        self.said: list[list[int]] = [[]]
        self.verbs: list[tuple[int, Callable[[], None]]] = [
            (20, self.open),
            (25, self.extend),
            (10, self.execute),
            (20, self.commit),
            (12, self.close),
            (5, self.fork),
            (1, self.beams),
            (5, self.truncate),
            (8, self.extend_unknown),
            (5, self.resolve),
            (5, self.publish),
            (4, self.ask),
            (1, self.pin),
            (2, self.release),
            (2, self.demote),
            (1, self.discard),
            (1, self.look),
            (1, self.evict),
            (1, self.clear),
            (1, self.clear_namespace),
            (1, self.find_nodes),
        ]

    def run(self, operations: int) -> None:
        weights = [weight for weight, _ in self.verbs]
        of_somebody = (self.extend, self.execute, self.commit, self.close, self.fork, self.truncate)
        of_somebody += (self.extend_unknown, self.resolve, self.publish, self.beams)
        for number, (_, verb) in enumerate(self.rng.choices(self.verbs, weights, k=operations), 1):
            if self.world.live or verb not in of_somebody:
                verb()
            if number % STRIDE == 0:
                self.world.verify()
            if number % (20 * STRIDE) == 0:
                self.pause()

    def pause(self) -> None:
        """Close everything: no block may be stranded. Sometimes evict everything too."""
        self.world.step()
        while self.world.live:
            self.world.close(self.world.live[0])
        while self.world.pins:
            self.world.release(self.world.pins[0])
        self.world.assert_little_is_stranded()
        self.world.forget_what_is_gone()
        self.rng.choice((self.world.drain, self.world.clear, lambda: None))()

    def one(self) -> Tracked:
        return self.rng.choice(self.world.live)

    def tokens(self) -> list[int]:
        letters = self.rng.choice((1, 2, 3))
        return [self.rng.randrange(letters) for _ in range(self.rng.randrange(self.suffix))]

    def prompt(self) -> list[int]:
        said = self.rng.choice(self.said)
        said = said[: self.rng.randrange(len(said) + 1)] + self.tokens()
        said = said[: self.world.num_blocks * self.world.block_size]
        self.said = [*self.said[-30:], said]
        return said

    def namespace(self) -> str | None:
        return self.rng.choice((None, None, None, "a", "b"))

    def open(self) -> None:
        if len(self.world.live) >= self.most_open:
            self.world.close(self.one())
        said = self.prompt()
        limit = self.rng.choice((None, None, len(said) - 1, self.rng.randrange(len(said) + 1)))
        limit = limit if limit is None else max(0, limit)
        purpose = self.rng.choice(PURPOSES)
        opened = self.world.open(self.namespace(), said, limit, self.rng.choice((0, 0, 0, 1, -1)), purpose)
        self.world.extend(opened, said[opened.seq.length :])

    def extend(self) -> None:
        one = self.one()
        if one.plan is not None and self.rng.random() < 0.9:
            self.world.commit(one)
        self.world.extend(one, self.tokens())

    def extend_unknown(self) -> None:
        """Decode: plan a token that is not known yet, mostly after the last plan and the last token."""
        one = self.one()
        if one.plan is not None and self.rng.random() < 0.9:
            self.world.commit(one, publish=False)
        if one.unknown >= 0 and self.rng.random() < 0.9:
            self.world.resolve(one)
        self.world.extend_unknown(one, self.rng.randrange(3))

    def resolve(self) -> None:
        self.world.resolve(self.one())

    def publish(self) -> None:
        one = self.one()
        self.world.publish(one, self.rng.randint(0, len(one.tokens) + 1))

    def execute(self) -> None:
        self.world.execute(self.rng.sample(self.world.live, self.rng.randint(1, len(self.world.live))))

    def commit(self) -> None:
        self.world.commit(self.one(), self.rng.random() < 0.8)

    def close(self) -> None:
        self.world.close(self.one(), self.rng.choice((None, None, Hint(done=True), Hint(priority=1))))

    def fork(self) -> None:
        if len(self.world.live) < self.most_open:
            self.world.fork(self.one())

    def beams(self) -> None:
        """Search with beams from a sequence for some steps; the last beams stay, with tails that are unpublished."""
        one = self.one()
        if one.purpose == "audit":
            return
        if one.plan is not None:
            self.world.commit(one, publish=False)
        if one.unknown >= 0:
            self.world.resolve(one)
        BeamGroup(self.world, one, self.rng).run(self.rng.randint(1, 8), self.most_open - len(self.world.live) + 1)

    def truncate(self) -> None:
        one = self.one()
        self.world.truncate(one, self.rng.randint(0, len(one.tokens)))

    def ask(self) -> None:
        if self.rng.random() < 0.2:
            self.world.ask_without_a_trace(self.namespace(), self.rng.choice(self.said) + self.tokens())
        else:
            self.world.match(self.namespace(), self.rng.choice(self.said))

    def pin(self) -> None:
        self.world.pin(self.namespace(), self.rng.choice(self.said), self.rng.choice((None, 0.5, 3.5)))

    def demote(self) -> None:
        said = self.rng.choice(self.said)
        self.world.demote(self.namespace(), said, self.rng.randrange(len(said) + 1))

    def discard(self) -> None:
        said = self.rng.choice(self.said)
        self.world.discard(self.namespace(), said, self.rng.randrange(len(said) + 1))

    def evict(self) -> None:
        self.world.evict(self.rng.randrange(self.world.num_blocks + 2))

    def look(self) -> None:
        self.world.random_run()

    def clear(self) -> None:
        if self.rng.random() < 0.1:  # a full cache is the rule
            self.world.clear(pins=self.rng.random() < 0.5)

    def clear_namespace(self) -> None:
        if self.rng.random() < 0.3:
            self.world.clear_namespace(self.namespace())

    def find_nodes(self) -> None:
        self.world.find_nodes()

    def release(self) -> None:
        self.world.wait(1)
        if self.world.pins and self.rng.random() < 0.3:
            pinned = self.rng.choice(self.world.pins)
            if self.rng.random() < 0.5:
                self.world.release(pinned)
            else:
                self.world.unpin(pinned.namespace, pinned.tokens)


@pytest.mark.parametrize(RUN, runs(*QUICK))
def test_long_runs_under_pressure(
    block_size: int, blocks: int, policy: str, suffix: int, most_open: int, operations: int
) -> None:
    world = World(blocks, block_size, policy, seed=blocks, proofs=PROOFS)
    Story(world, suffix, most_open, seed=block_size * 1000 + blocks).run(operations // len(POOLS))
    assert world.cache.stats().evicted_blocks > 0
    assert world.cache.stats().hit_tokens > 0
    world.wind_down()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_out_of_blocks_at_every_possible_point(block_size: int) -> None:
    """The same history in pools from one block to enough: each of its extends fails in some of them."""
    refusals = []
    for blocks in range(1, 200):
        refused = run_history(World(blocks, block_size, seed=blocks))
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
