"""Break one life once at any step in every way: affected requests end with that error, all others finish.

One of three steps is tried, and another one in `make test-all`.

The affected requests are:
  forward, once     none, unless the run had one chunk only: then its request
  forward, always   the request of the chunk
  memory            none, unless one chunk alone is too much: then its request
  sampler, once     none, unless there was one row only: then its request
  put, finish       the request of the channel
  planning          all running requests (else the first waiting one), because the cause is not known
  garbled logits    all requests with a chunk in the step, for the same reason
The life has chunked prompts, shared ones, forks, evictions and preemptions, and `World` checks every step of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixkv.config import EngineConfig
from radixkv.errors import RequestFailed
from radixkv.sampling.params import SamplingParams
from tests.selection import mostly_long
from tests.simulation.scenario import Ask, Fault, Flaw, Scenario
from tests.simulation.world import World

EVERY_THIRD = pytest.mark.parametrize("first", mostly_long(range(2), 0))
"""Steps, or requests, from `first` on in steps of three."""

SHARED = tuple(range(9))


def ask(number: int, at: int, prompt: tuple[int, ...], new: int, n: int = 1, temperature: float = 0) -> Ask:
    params = SamplingParams(max_tokens=new, temperature=temperature, n=n)
    return Ask(number, at, prompt, params, new, seed=number)


LIFE = Scenario(
    seed=0,
    num_blocks=12,
    block_size=3,
    config=EngineConfig(max_sequences=6, max_batch_tokens=9, prefill_chunk=5),
    asks=(
        ask(0, 0, (*SHARED, 1), 9),
        ask(1, 0, (*SHARED, 2), 7, temperature=1),
        ask(2, 1, (3, 3, 3), 6, n=3, temperature=1),
        ask(3, 2, (*SHARED, 1, 5, 5, 5), 3),
        ask(4, 2, (7,) * 12, 14),
        ask(5, 9, (*SHARED, 2, 8, 8), 8),
        ask(6, 9, (8,), 12),
        ask(7, 10, (*SHARED, 1), 5, n=2),
    ),
)


@pytest.fixture(scope="module")
def whole() -> World:
    """Return the life without a fault."""
    return World(LIFE).run()


def failed(world: World) -> list[int]:
    for customer in world.customers.values():
        error = customer.channel.error
        assert error is None or (isinstance(error, RequestFailed) and error.__cause__ is not None)
        assert error is None or str(error.__cause__) in str(error)
    return [number for number, customer in world.customers.items() if customer.channel.error is not None]


def in_step(world: World, step: int) -> list[int]:
    """Return the requests of a step's chunks."""
    return [number for at, number, *_ in world.trace if at == step]


def test_the_life_has_all_that_can_break(whole: World) -> None:
    seen = whole.sights()
    assert not failed(whole)
    for sight in ("preemptions", "recomputed_tokens", "evicted", "copied", "coalesced_tokens", "hits"):
        assert seen[sight], f"no {sight}: {seen}"
    assert {len(in_step(whole, step)) for step in range(whole.step)} >= {1, 2, 3, 4}


@EVERY_THIRD
def test_a_forward_that_raises_once_at_any_step(whole: World, first: int) -> None:
    for step in range(first, whole.step, 3):
        world = World(replace(LIFE, faults=(Fault(step, "forward", step % 3),))).run()
        chunks = in_step(whole, step)
        assert failed(world) == (chunks if len(chunks) == 1 else []), f"step {step}"


@EVERY_THIRD
def test_memory_that_runs_out_at_any_step(whole: World, first: int) -> None:
    """Only `size` tokens fit a forward, for three steps. A request with a longer chunk fails, and no other."""
    for step in range(first, whole.step, 3):
        size = (1, 4)[step % 2]
        world = World(replace(LIFE, faults=(Fault(step, "memory", size=size),))).run()
        too_large = {number for at, number, _, _, count in world.trace if step <= at < step + 3 and count > size}
        assert set(failed(world)) == too_large, f"step {step}, {size} tokens"


@EVERY_THIRD
def test_a_sampler_that_raises_once_at_any_step(whole: World, first: int) -> None:
    for step in range(first, whole.step, 3):
        world = World(replace(LIFE, faults=(Fault(step, "sampler"),))).run()
        assert len(failed(world)) <= 1, f"step {step}"
        assert bool(failed(world)) == any(len(asks) == 1 for _, asks in world.faults.blamed.values()), f"step {step}"


@EVERY_THIRD
@pytest.mark.parametrize("kind", ["schedule", "garbled"])
def test_a_fault_of_no_single_request_at_any_step(whole: World, kind: str, first: int) -> None:
    for step in range(first, whole.step, 3):
        world = World(replace(LIFE, faults=(Fault(step, kind, part=step % 2),))).run()
        (swept,) = world.faults.swept.values()
        assert swept and set(failed(world)) == swept, f"step {step}"


@EVERY_THIRD
@pytest.mark.parametrize("kind", ["forward", "memory", "nan", "put", "finish"])
def test_a_request_that_breaks_at_any_of_its_tokens_breaks_alone(kind: str, first: int) -> None:
    for broken in LIFE.asks[first::3]:
        for at in tokens_of(broken, kind):
            asks = tuple(replace(each, flaw=Flaw(kind, at)) if each is broken else each for each in LIFE.asks)
            world = World(replace(LIFE, asks=asks)).run()
            assert failed(world) == [broken.number], f"request {broken.number}, token {at}"


def tokens_of(broken: Ask, kind: str) -> list[int]:
    """Return the tokens or chunks at which to break a request: the ends and the middle."""
    if kind == "finish":
        return [0]
    last = len(broken.prompt) + broken.max_tokens - 2 if kind in ("forward", "memory") else broken.max_tokens - 1
    return sorted({0, last // 2, last})
