"""Lives of an engine whose model has recurrent state: faults, and the hits of what snapshots keep."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.request import Request
from radixkv.engine.request_facts import PromptParts
from radixkv.sampling.params import SamplingParams
from tests.simulation.late import LateSampler, LateSlotModel
from tests.simulation.model import VOCAB, SlotModel
from tests.simulation.oracle import replies
from tests.simulation.scenario import Ask, Fault, Flaw, Scenario, States
from tests.simulation.stateful import StatefulSlotModel
from tests.simulation.test_faults import EVERY_THIRD, LIFE, failed, in_step
from tests.simulation.world import World

STATES = States(snapshots=20, prompt=4, long=1000, least=1)
WITH_STATES = replace(LIFE, states=STATES)
GREEDY = SamplingParams(max_tokens=3, temperature=0)
CONFIG = EngineConfig(max_sequences=6, max_batch_tokens=64, prefill_chunk=16)


@EVERY_THIRD
def test_a_forward_that_raises_once_ends_only_a_request_that_was_alone_in_it(first: int) -> None:
    whole = World(WITH_STATES).run()
    assert whole.sights()["preemptions"] and not failed(whole)
    for step in range(first, whole.step, 3):
        world = World(replace(WITH_STATES, faults=(Fault(step, "forward", step % 3),))).run()
        requests = list(dict.fromkeys(in_step(whole, step)))
        assert failed(world) == (requests if len(requests) == 1 else []), f"step {step}"
        assert world.sights()["shaken"] == (len(requests) if len(requests) > 1 else 0), f"step {step}"


@EVERY_THIRD
@pytest.mark.parametrize("kind", ["forward", "memory", "nan", "put"])
def test_a_request_that_breaks_breaks_alone(kind: str, first: int) -> None:
    for broken in LIFE.asks[first::3]:
        for at in (0, broken.max_tokens // 2, broken.max_tokens - 1):
            at += len(broken.prompt) - 1 if kind in ("forward", "memory") and at else 0
            asks = tuple(replace(each, flaw=Flaw(kind, at)) if each is broken else each for each in LIFE.asks)
            world = World(replace(WITH_STATES, asks=asks)).run()
            assert failed(world) == [broken.number], f"request {broken.number}, token {at}"


def run(
    *asks: Ask, blocks: int = 200, config: EngineConfig = CONFIG, states: States = STATES, overlap: bool = False
) -> World:
    world = World(Scenario(0, blocks, 4, config, asks, states=states, overlap=overlap)).run()
    assert not failed(world)
    return world


def hits(world: World) -> list[int]:
    done = [customer.channel.completion for customer in world.customers.values()]
    return [each.usage.cached_tokens for each in done if each is not None]


def test_followers_of_a_prompt_resume_where_they_part_from_it() -> None:
    """All arrive at once: the leader computes the shared prefix, and leaves a snapshot at its end."""
    shared = tuple(index % 16 for index in range(50))
    world = run(*(Ask(number, 0, (*shared, number, number + 1, number), GREEDY, 3) for number in range(5)))
    assert hits(world) == [0, 50, 50, 50, 50]


def test_equal_prompts_compute_one_token_each() -> None:
    prompt = tuple(index % 16 for index in range(50))
    assert hits(run(*(Ask(number, 0, prompt, GREEDY, 3) for number in range(4)))) == [0, 49, 49, 49]


def test_the_next_turn_resumes_from_the_end_of_the_last_message() -> None:
    """The template adds three tokens before the reply, and the next prompt drops the reasoning in it."""
    message, opening = tuple(index % 16 for index in range(40)), (1, 2, 3)
    long = replace(GREEDY, max_tokens=30)
    first = Ask(0, 0, (*message, *opening), long, 30, reply_start=len(message))
    after = Ask(1, 50, (*message, *opening, 9, 9, 9, 9), GREEDY, 3)
    assert hits(run(first, after, states=replace(STATES, least=16, prompt=64))) == [0, 40]


@pytest.mark.parametrize("deterministic", [False, True])
def test_streams_of_a_request_start_from_copies_of_one_state(deterministic: bool) -> None:
    sampled = SamplingParams(max_tokens=9, temperature=1, n=4)
    config = replace(CONFIG, deterministic=deterministic)
    world = run(Ask(0, 0, tuple(range(16)) * 3, sampled, 9), Ask(1, 3, (1,) * 20, sampled.but(n=2), 9), config=config)
    assert len(world.customers[0].channel.completion.alternatives) == 3


def test_a_preempted_request_goes_on_from_the_state_that_it_left() -> None:
    """Its reader leaves, and another request takes its blocks; it computes nothing again."""
    long = replace(GREEDY, max_tokens=20)
    asks = (Ask(0, 0, tuple(range(16)), long, 20, lags=((6, 14),)), Ask(1, 8, (5,) * 40, GREEDY, 2))
    config = replace(CONFIG, max_sequences=1, max_batch_tokens=17)
    world = run(*asks, config=config)
    done = world.customers[0].channel.completion
    assert done is not None and (done.usage.preemptions, done.usage.recomputed_tokens) == (1, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_hits_the_reply(overlap: bool) -> None:
    """With overlap the row has run the stop token before the host reads it, so the state after it is kept."""
    message = tuple(index % 16 for index in range(40))
    reply = replies(message, replace(GREEDY, max_tokens=30), 30, frozenset(), 0)[0].tokens
    at = next(at for at in range(12, 30) if reply[at] not in reply[:at])
    stop, long = frozenset({reply[at]}), replace(GREEDY, max_tokens=30)
    first = Ask(0, 0, message, long, 30, stop_ids=stop)
    after = [Ask(turn, 60 * turn, (*message, *reply[: at + 1], 1, 1, turn), GREEDY, 3) for turn in (1, 2)]
    assert hits(run(first, *after, states=replace(STATES, prompt=64), overlap=overlap))[1] == 40 + at + overlap


def test_deterministic_requests_resume_on_the_grid_of_chunks() -> None:
    prompt = tuple(index % 16 for index in range(60))
    config = replace(CONFIG, deterministic=True)
    asks = (Ask(number, 10 * number, (*prompt, number), GREEDY, 3, reply_start=59) for number in range(3))
    assert hits(run(*asks, config=config)) == [0, 48, 48]


def chats(depth: int, snapshots: int) -> tuple[int, int]:
    """Run eight turns of twelve chats, whose replies end with a stop token; returns prompt tokens and cached ones."""
    cache = PrefixCache(4000, 4, state_rows=4, state_snapshots=snapshots)
    parts = (StatefulSlotModel, LateSlotModel if depth else SlotModel)
    model: Any = type("Model", parts, {})(cache, 0)
    sampler: Any = LateSampler(model) if depth else None
    config = EngineConfig(max_sequences=4, max_batch_tokens=128, prefill_chunk=32)
    core = Core(cache, model, config, sampler=sampler, depth=depth)
    rng, params, stops = random.Random(0), SamplingParams(max_tokens=60, temperature=0), frozenset(range(5))
    texts = [[9] * 30 for _ in range(12)]
    asked = cached = 0
    for text in rng.choices(texts, k=96):
        text += [rng.randrange(5, VOCAB) for _ in range(rng.randrange(8, 30))]
        start = len(text)
        text += [7, 8, 9]  # the beginning of the reply, as a template writes it
        request = Request(np.array(text, np.int32), params, 60, stops, 0, parts=PromptParts(start))
        core.add(request)
        while core.idle_for() is not None:
            core.step()
            cache.check()
        done = request.channel.wait(0)
        assert done.finish_reason == "stop"
        text += done.token_ids
        asked, cached = asked + done.usage.prompt_tokens, cached + done.usage.cached_tokens
    return asked, cached


@pytest.mark.parametrize("snapshots", [24, pytest.param(400, marks=pytest.mark.long)])
def test_chats_hit_as_much_where_steps_overlap(snapshots: int) -> None:
    """At depth 1 the row of an ended stream has run its stop token, so that a later state is kept."""
    (asked, cached), (same, overlapped) = (chats(depth, snapshots) for depth in (0, 1))
    assert asked == same
    assert cached > 0.75 * asked
    assert abs(cached - overlapped) < 0.01 * asked
