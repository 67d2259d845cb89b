"""Requests of an engine with a host tier: evicted tokens come back by a load, and every answer stays the same.

The fake model stores the history of each token in its slot and in host memory, and reads all of it back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from radixkv import SamplingParams
from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.cache.types import Load
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.reuse_policy import NO_LOADS
from radixkv.engine.transfers import load_limits
from tests.engine.fakes import FakeRunner, make_engine, sized
from tests.engine.worlds import GREEDY, SIZE, failing, host_world, is_right, tokens, usage

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


# ---- preemption


# ---- failures


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
