"""Requests of an engine with a host tier: evicted tokens come back by a load, and every answer stays the same.

The fake model stores the history of each token in its slot and in host memory, and reads all of it back.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from radixkv import SamplingParams
from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.cache.types import Load
from radixkv.config import EngineConfig
from radixkv.engine import core, steps
from radixkv.engine.core import Core
from radixkv.engine.request import Request
from radixkv.engine.reuse_policy import NO_LOADS
from radixkv.engine.transfers import load_limits
from radixkv.errors import RequestFailed
from tests.engine.fakes import FakeRunner, greedy_reply, make_engine, sized
from tests.engine.worlds import GREEDY, SIZE, World, failing, host_world, is_right, tokens, usage

# ---- loads


def test_evicted_tokens_come_back_by_a_load() -> None:
    world = host_world()
    prompt = tokens(41)
    first = world.answer(prompt)
    world.offload(prompt)
    computed = world.core.counters.computed_tokens
    again = world.answer(prompt)
    assert (usage(first).cached_tokens, usage(first).host_tokens) == (0, 0)
    assert (usage(again).cached_tokens, usage(again).host_tokens) == (40, 40)
    assert usage(again).computed_tokens == world.core.counters.computed_tokens - computed == 1 + 5
    assert world.core.counters.host_tokens == world.cache.stats().loaded_tokens == 40
    assert world.core.counters.cached_tokens == 40
    counters = world.core.counters
    assert world.core.step_tokens == counters.computed_tokens, "a step's tokens for telemetry are those it computed"


def test_a_prefix_on_the_device_is_hit_and_the_rest_is_loaded() -> None:
    world = host_world()
    prompt = tokens(41)
    world.answer(prompt)
    for seed in range(1000, 1050):
        if world.cache.match(prompt).length < 30:
            break
        world.answer(tokens(SIZE, seed), GREEDY.but(max_tokens=1))
    on_device = world.cache.match(prompt).length
    assert 0 < on_device < 30
    again = world.answer(prompt)
    assert (usage(again).cached_tokens, usage(again).host_tokens) == (40, 40 - on_device)


def test_less_than_two_blocks_are_computed() -> None:
    world = host_world()
    prompt = tokens(2 * SIZE)  # the last token is always computed
    world.answer(prompt, GREEDY.but(max_tokens=1))
    world.offload(prompt)
    assert not usage(world.answer(prompt)).host_tokens
    world.offload(prompt)
    assert usage(world.answer([*prompt, 1])).host_tokens == 2 * SIZE


def test_nothing_is_loaded_where_computing_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "radixkv"):
        world = host_world(speed=0.9)
    assert "the host tier has no effect" in caplog.text
    prompt = tokens(41)
    world.answer(prompt)
    world.offload(prompt)
    assert world.cache.match(prompt).host == 41
    assert usage(world.answer(prompt)).cached_tokens == 0
    assert not world.host.loads


def test_limits_follow_from_the_costs() -> None:
    config = sized(4, 36, 16)
    assert load_limits(HostCosts(1e-6, 1e-4), config, 16)[:2] == (32, 1600)
    assert load_limits(HostCosts(1e-4, 1.1e-4), config, 16)[:2] == (32, 48)  # a chunk and the least load fit at least
    assert load_limits(HostCosts(1e-4, 1e-4), config, 16) is NO_LOADS
    assert load_limits(HostCosts(0.0, 1e-4), config, 16).most > 1_000_000


def test_a_core_loads_if_its_cache_has_a_tier() -> None:
    assert host_world().core.host is not None
    plain = Core(PrefixCache(8, SIZE), FakeRunner(8, SIZE), EngineConfig())
    assert plain.host is None and plain.token_costs() == {}


# ---- steps


def test_a_large_load_stalls_no_other_stream() -> None:
    """Each step loads at most what takes as long as a chunk, besides all decodes and the chunk of another prompt."""
    world = host_world(100, 200, sized(8, 40, 16), speed=2.0)
    large = tokens(161)
    world.answer(large)
    world.offload(large)
    deciding = [world.submit(tokens(5, seed), GREEDY.but(max_tokens=40)) for seed in (1, 2)]
    world.step()
    loading, computing = world.submit(large), world.submit(tokens(60, 3))
    steps = []
    while not loading.channel.ended:
        world.step()
        steps.append(sum(world.loads()))
        assert steps[-1] <= 32
        if steps[-1]:
            decodes = [each for each in world.work if each.stream.request in deciding]
            assert [len(each.tokens) for each in decodes] == [1, 1]
            assert sum(len(each.tokens) for each in world.work if each.sources is None) <= 40
        if len(steps) == 2:
            assert any(each.stream.request is computing for each in world.work)
    assert steps[:5] == [32] * 5 and not any(steps[5:])
    world.finish()
    assert all(map(is_right, [*deciding, loading, computing]))


def test_loads_of_several_requests_share_a_step() -> None:
    """The first takes what it can, and the second waits until the next step; it computes nothing meanwhile."""
    world = host_world(64, 200, sized(8, 40, 16), speed=2.0)
    prompts = [tokens(49, seed) for seed in (1, 2)]
    for prompt in prompts:
        world.answer(prompt)
    for prompt in prompts:
        world.offload(prompt)
    requests = [world.submit(prompt) for prompt in prompts]
    steps, seen = world.core.counters.steps, []
    while world.core.busy:
        world.step()
        seen.append(
            [
                (each.stream.request.scheduling.number - requests[0].scheduling.number, len(each.tokens))
                for each in world.work
            ]
        )
    assert seen[:3] == [[(0, 32)], [(0, 16), (1, 16)], [(0, 1), (1, 32)]]
    assert world.core.counters.steps - steps == sum(map(bool, seen)), "a step of loads only is a step"
    assert all(map(is_right, requests))
    assert world.core.counters.host_tokens == 96


def test_a_load_needs_nothing_of_the_token_budget() -> None:
    """A request of a higher priority computes whole budgets, and the loads of another one go on."""
    world = host_world(100, 200, sized(8, 16, 16), speed=2.0)
    large = tokens(161)
    world.answer(large)
    world.offload(large)
    loading = world.submit(large)
    world.step()
    computing = world.submit(tokens(60, 3), priority=1)
    seen = []
    for _ in range(3):
        world.step()
        seen.append([(each.stream.request is loading, len(each.tokens)) for each in world.work])
    assert seen == [[(True, 32), (False, 16)], [(False, 16), (True, 32)], [(False, 16), (True, 32)]]
    world.finish()
    assert is_right(loading) and is_right(computing)


def test_followers_wait_for_a_loading_leader_and_hit() -> None:
    world = host_world(64, 200, sized(8, 40, 16), speed=2.0)
    shared = tokens(81)
    world.answer(shared)
    world.offload(shared)
    requests = [world.submit([*shared, *tokens(3, seed)]) for seed in (1, 2, 3)]
    world.finish()
    assert all(map(is_right, requests))
    assert [usage(each).host_tokens for each in requests] == [81, 0, 0]
    assert all(usage(each).cached_tokens >= 81 for each in requests)
    assert world.core.counters.coalesced_requests == 2


# ---- preemption


def test_a_preempted_request_returns_by_a_load() -> None:
    """Both grow until the pool is full: the later one leaves, and goes on where it was."""
    world = host_world(22, 100, sized(2, 36, 16))
    requests = [world.submit(tokens(20, seed), GREEDY.but(max_tokens=40)) for seed in (1, 2)]
    world.finish()
    assert all(map(is_right, requests))
    counters = world.core.counters
    assert counters.preemptions == 1
    assert counters.host_tokens >= 2 * SIZE and counters.recomputed_tokens <= 1
    swapped = next(each for each in requests if each.scheduling.preemptions)
    assert usage(swapped).host_tokens == counters.host_tokens
    assert usage(swapped).cached_tokens == 0  # it computed all of them itself


def test_streams_of_a_preempted_request_load_what_each_had() -> None:
    world = host_world(36, 100, sized(6, 36, 16))
    drawn = SamplingParams(max_tokens=24, temperature=1, ignore_eos=True, seed=1, n=3)
    expected = host_world(200, 1, sized(6, 36, 16))
    prompts = [tokens(24, seed) for seed in (1, 2)]
    roomy = [expected.submit(prompt, drawn) for prompt in prompts]
    expected.finish()
    small = [world.submit(prompt, drawn) for prompt in prompts]
    world.finish()
    for one, other in zip(roomy, small, strict=True):
        done, again = one.channel.wait(0), other.channel.wait(0)
        assert [each.token_ids for each in (done, *done.alternatives)] == [
            each.token_ids for each in (again, *again.alternatives)
        ]
    assert world.core.counters.preemptions and world.core.counters.host_tokens


# ---- failures


def traffic(world: World, seed: int, count: int = 40) -> list[Request]:
    """Run turns of six conversations that branch off each other now and then, a few at a time."""
    rng = random.Random(seed)
    texts = [tokens(20, number) for number in range(6)]
    requests = []
    for _ in range(count):
        number = rng.randrange(6)
        stem = texts[number]
        if len(stem) > 60 or rng.random() < 0.1:
            other = rng.choice(texts)
            stem = other[: rng.randrange(20, len(other) + 1)][:40]
        prompt = [*stem, *rng.choices(range(49), k=rng.randrange(1, 8))]
        requests.append(world.submit(prompt, GREEDY.but(max_tokens=rng.randrange(1, 12))))
        texts[number] = [*prompt, *greedy_reply(prompt, requests[-1].max_tokens)]
        for _ in range(rng.choice((0, 1, 5, 30))):
            world.step()
    world.finish()
    return requests


@pytest.mark.parametrize("kind", ["none", "offload", "load", "both"])
@pytest.mark.parametrize(("blocks", "host_blocks"), [(24, 100), (24, 10), (40, 1), (30, 60)])
def test_answers_are_right_with_any_failures(kind: str, blocks: int, host_blocks: int) -> None:
    world = host_world(blocks, host_blocks)
    flaky = random.Random(7)

    def fault(done: str) -> None:
        if kind in (done, "both") and flaky.random() < 0.5:
            raise RuntimeError(f"no {done}")

    world.host.fault = fault
    requests = traffic(world, 5)
    assert all(map(is_right, requests))
    counters, stats = world.core.counters, world.cache.stats()
    assert (counters.failed_offloads > 0) == (kind in ("offload", "both"))
    assert stats.offloaded_blocks
    if kind != "both":
        assert (counters.host_tokens > 0) == (host_blocks > 1)
        assert (counters.failed_loads > 0) == (kind == "load" and host_blocks > 1)
    assert sum(usage(each).cached_tokens for each in requests) == counters.cached_tokens
    assert sum(usage(each).host_tokens for each in requests) == counters.host_tokens


def test_a_failed_load_is_computed_and_tried_no_more() -> None:
    world = host_world()
    prompt = tokens(41)
    world.answer(prompt)
    world.offload(prompt)
    world.host.fault = failing("load")
    again = world.answer(prompt)
    assert world.core.counters.failed_loads == len(world.host.loads) == 1
    assert (usage(again).cached_tokens, usage(again).preemptions) == (0, 1)
    assert usage(again).recomputed_tokens == 0
    world.offload(prompt)
    world.host.fault = lambda kind: None
    assert usage(world.answer(prompt)).host_tokens == 40


def test_one_failed_load_spoils_no_other() -> None:
    world = host_world(64, 200)
    prompts = [tokens(33, seed) for seed in (1, 2, 3)]
    for prompt in prompts:
        world.answer(prompt)
    for prompt in prompts:
        world.offload(prompt)
    world.host.fault = failing("load", times=2)  # all together, and the first alone
    requests = [world.submit(prompt) for prompt in prompts]
    world.finish()
    assert all(map(is_right, requests))
    assert [usage(each).host_tokens for each in requests] == [0, 32, 32]
    assert [each.scheduling.preemptions for each in requests] == [1, 0, 0]


@pytest.mark.parametrize(("times", "loaded"), [(2, 32), (1 << 30, 0)])
def test_two_loads_of_one_run_may_fail_together(times: int, loaded: int) -> None:
    world = host_world(64, 200)
    prompt = tokens(33)
    world.answer(prompt)
    world.offload(prompt)
    requests = [world.submit(prompt) for _ in range(2)]
    for each in requests:
        each.queued.waited_enough = True  # neither waits for the other one
    world.host.fault = failing("load", times)
    world.step()
    assert world.loads() == [32, 32]
    world.finish()
    assert all(map(is_right, requests))
    assert {usage(each).host_tokens for each in requests} <= {0, loaded}


def test_a_failed_offload_loses_its_blocks_only() -> None:
    world = host_world()
    prompt = tokens(41)
    world.answer(prompt)
    world.host.fault = failing("offload")
    world.offload(prompt)
    assert world.cache.stats().host_nodes == 0 or world.cache.match(prompt).host == 0
    world.host.fault = lambda kind: None
    assert usage(world.answer(prompt)).host_tokens == 0
    world.offload(prompt)
    assert usage(world.answer(prompt)).host_tokens == 40


def test_a_step_that_raises_after_its_loads_ends_no_request_that_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = host_world(64, 200)
    prompt = tokens(41)
    world.answer(prompt)
    world.offload(prompt)
    loading, computing = world.submit(prompt), world.submit(tokens(12, 3))

    def broken(*given: object) -> None:
        raise RuntimeError("no step")

    with monkeypatch.context() as patch:
        patch.setattr(core.Core, "_forward", broken)
        patch.setattr(steps, "release_tensors", broken)
        world.step()
    with pytest.raises(RequestFailed, match="no step"):
        computing.channel.wait(0)
    world.finish()
    assert is_right(loading) and usage(loading).host_tokens == 40


def test_a_failed_load_up_to_a_state_drops_the_run_on_the_host_only() -> None:
    """The load begins before the end of the KV on the device, which stays."""
    engine, runner = make_engine(num_blocks=32, host_blocks=64, snapshots=8)
    text, one, raised = tokens(90), SamplingParams(max_tokens=1), list[int]()
    host = runner.host
    assert host is not None
    load = host.load

    def fails_once(loads: Sequence[Load]) -> None:
        raised.append(len(loads))
        if len(raised) == 1:
            raise RuntimeError("no memory for the copy")
        load(loads)

    host.load = fails_once  # type: ignore[method-assign]
    with engine:
        engine.generate([text], one)
        engine.generate([tokens(80, 1)], one)
        before = engine.probe(text)
        engine.generate([[*text[:80], 49, 48]], one)
        stats = engine.stats()
    assert 0 < before.matched < 80 and before.host
    assert (raised, stats.failed_loads, stats.host_tokens) == ([1], 1, 0)
