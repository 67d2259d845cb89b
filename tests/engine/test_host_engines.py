"""Engines with a host tier: pins, audits, and the answers and bits of the tiny model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv import Engine, SamplingParams
from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.config import EngineConfig
from radixkv.errors import RequestFailed
from radixkv.models import adapter
from radixkv.models.runner import Runner
from tests.engine import test_audit
from tests.engine.fakes import check, make_engine, sized
from tests.engine.worlds import GREEDY, SIZE, World, failing, host_world, tokens, usage
from tests.selection import mostly_long

# ---- pins


def test_pinned_prefixes_stay_on_the_device_and_others_are_loaded_to_be_pinned() -> None:
    engine, _ = make_engine(24, SIZE, host_blocks=100, max_sequences=4, max_batch_tokens=36, prefill_chunk=16)
    prompt = tokens(30)

    def crowd() -> None:
        engine.generate([tokens(30, seed) for seed in range(10, 20)], GREEDY)

    with engine:
        with engine.warm(prompt, pin=True) as warmed:
            assert warmed.pinned_tokens == 30
            crowd()
            assert engine.probe(prompt).length == 30
        crowd()
        assert (engine.probe(prompt).length, engine.probe(prompt).host) == (0, 30)
        with engine.warm(prompt, pin=True) as warmed:
            assert (warmed.pinned_tokens, warmed.usage.host_tokens, warmed.usage.computed_tokens) == (30, 29, 1)
            crowd()
            assert engine.probe(prompt).length == 30
        check(engine)


def test_clearing_the_cache_empties_the_host() -> None:
    engine, _ = make_engine(24, SIZE, host_blocks=100)
    with engine:
        engine.generate([tokens(30, seed) for seed in range(10)], GREEDY)
        assert engine.stats().cache.host_nodes
        engine.clear_cache()
        stats = engine.stats().cache
        assert (stats.host_nodes, stats.host_free_blocks, stats.free_blocks) == (0, 100, 24)


# ---- audits


def audited(num_blocks: int, host_blocks: int = 100, config: EngineConfig | None = None) -> World:
    """Return a world with a host tier whose model computes cached KV again."""
    return host_world(num_blocks, host_blocks, config, runner=test_audit.AuditedRunner)


def spoil(world: World, prompt: Sequence[int], position: int) -> None:
    """Change the value of a host-resident token."""
    tree = world.cache.state.tree
    for node in tree.lower.nodes():
        text = b"".join(bytes(each.key) for each in tree.path(node))
        if node.start <= position < node.end and np.array(prompt, np.int32).tobytes().startswith(text):
            block = node.blocks[position // SIZE - node.start // SIZE]
            world.host.state[block, position % SIZE] ^= np.uint64(1)
            return
    raise AssertionError("it is not on the host")


@pytest.mark.parametrize("position", [0, 17, 39])
def test_an_audit_finds_a_flipped_value_in_host_memory_and_drops_it(position: int) -> None:
    world = audited(30)
    prompt = tokens(45)
    first = world.answer(prompt[:41])
    world.answer(prompt)
    world.offload(prompt)
    spoil(world, prompt, position)
    for _ in range(200):
        report = world.audit(20)
        if report.differ:
            break
    (found,) = report.differences
    assert found.start == position and found.failed_requests == 0 and found.dropped_blocks
    match = world.cache.match(prompt)
    assert match.length + match.host == position // SIZE * SIZE
    again = world.submit(prompt[:41])
    world.finish()
    assert again.channel.wait(0).token_ids == first.channel.wait(0).token_ids
    assert not world.audit(100).differ


def test_an_audit_drops_a_run_that_cannot_be_loaded_and_goes_on() -> None:
    world = audited(30)
    prompt = tokens(45)
    world.answer(prompt)
    world.offload(prompt)
    world.host.fault = failing("load", times=1)
    report = world.audit(200)
    assert report.blocks >= 200 and not report.differ
    assert world.core.counters.failed_loads == 1
    world.host.fault = failing("load")
    report = world.audit(200)  # the host is empty after some failures
    assert report.blocks >= 200 and world.cache.stats().host_nodes == 0


def test_an_audit_fails_a_request_that_loaded_wrong_tokens_without_publishing_them() -> None:
    """A request that runs alone without headroom publishes late: what it loads stays on the host, too."""
    world = audited(18, 60)
    prompt = tokens(33)
    world.answer(prompt, GREEDY.but(max_tokens=1))
    world.offload(prompt)
    spoil(world, prompt, 17)
    request = world.submit(prompt, GREEDY.but(max_tokens=18 * SIZE - 32))
    for _ in range(4):
        world.step()
    assert (
        request.scheduling.publish_late
        and request.streams[0].counts.host_tokens == 32
        and world.cache.match(prompt).host
    )
    while not (report := world.audit(20)).differ:
        pass
    assert [(each.start, each.failed_requests) for each in report.differences] == [(17, 1)]
    with pytest.raises(RequestFailed, match="from token 17 on"):
        request.channel.wait(0)
    assert world.cache.match(prompt).host <= 16


def test_an_audit_fails_a_preempted_request_whose_offloaded_tokens_are_wrong() -> None:
    """It may have read them before: that is not known."""
    world = audited(22, config=sized(2, 36, 16))
    requests = [world.submit(tokens(20, seed), GREEDY.but(max_tokens=40)) for seed in (1, 2)]
    while not any(each.scheduling.preemptions for each in requests):
        world.step()
    away = next(each for each in requests if each.scheduling.preemptions)
    text = away.live[0].tokens.tolist()
    while not world.cache.match(text).host:
        world.step()
    assert not away.live[0].active
    spoil(world, text, world.cache.match(text).length)
    world.core.cancel(next(each for each in requests if each is not away))  # its blocks make room for the audit
    while not away.channel.ended:
        world.audit(20)
    with pytest.raises(RequestFailed, match="an audit found"):
        away.channel.wait(0)


# ---- the real model


def real_engine(num_blocks: int, host_blocks: int, **settings: Any) -> Engine:
    config = EngineConfig(**{"monitor": False, "block_size": SIZE, "num_blocks": num_blocks, **settings})
    loaded = adapter.load("tiny", dtype="float32")
    chunk = config.prefill_chunk if config.deterministic else 4 * SIZE
    runner = Runner(
        loaded, num_blocks, SIZE, deterministic=config.deterministic, recheck_tokens=chunk, host_blocks=host_blocks
    )
    # The costs of a busy machine are no part of these tests.
    runner.host_costs = lambda chunk: HostCosts(1.0, 4.0)  # type: ignore[method-assign]
    cache = PrefixCache(num_blocks, SIZE, host_blocks=host_blocks) if host_blocks else PrefixCache(num_blocks, SIZE)
    return Engine(loaded, runner, cache, config)


def real_prompts(rng: random.Random, vocab: int) -> list[list[int]]:
    """Prompts that branch off each other and repeat each other, in an order in which many come back."""
    made = [rng.choices(range(3, vocab), k=50)]
    while len(made) < 14:
        stem = rng.choice(made)
        made.append([*stem[: rng.randrange(len(stem))], *rng.choices(range(3, vocab), k=rng.randrange(5, 40))][:90])
    return [made[rng.randrange(len(made))] for _ in range(30)]


@pytest.mark.parametrize("chunk", mostly_long([16, 40], 16))
def test_loads_of_a_deterministic_engine_change_no_bit(chunk: int) -> None:
    """Log probabilities are those of an engine without any reuse, bit for bit, for one request at a time."""
    settings: dict[str, Any] = {
        "prefill_chunk": chunk, "max_batch_tokens": 72, "max_sequences": 1, "deterministic": True,
    }  # fmt: skip
    params = SamplingParams(max_tokens=12 if chunk > 16 else 6, temperature=0, ignore_eos=True, logprobs=2)
    prompts = real_prompts(random.Random(chunk), 90)
    with real_engine(600, 0, **settings, prefix_cache=False) as plain:
        once = [list(each) for each in dict.fromkeys(map(tuple, prompts))]
        found = [one.logprobs for one in plain.generate(once, params)]
        expected = [found[once.index(each)] for each in prompts]
    with real_engine(40, 300, **settings) as engine:
        for _ in range(2):
            found = [engine.generate([each], params)[0].logprobs for each in prompts]  # waiting ones keep their text
            assert found == expected
        assert engine.stats().host_tokens >= (10 if chunk > 16 else 100)
        assert engine.audit(100).differ == 0


def test_a_deterministic_hit_that_ends_inside_a_chunk_is_completed_by_a_load() -> None:
    """Eviction cuts block by block, and a chunk has several."""
    world = host_world(24, 100, replace(sized(4, 72, 16), deterministic=True))
    prompt = tokens(50)
    world.answer(prompt)
    world.answer(tokens(50, 1))
    on_device = world.cache.match(prompt).length
    assert on_device % 16 and on_device > 16
    again = world.answer(prompt)
    assert (usage(again).cached_tokens, usage(again).host_tokens) == (48, 48 - on_device)


def test_a_deterministic_hit_inside_a_chunk_is_cut_if_its_load_is_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host-resident rest may be gone by the time that the request is scheduled."""
    world = host_world(24, 100, replace(sized(4, 72, 16), deterministic=True))
    prompt = tokens(50)
    world.answer(prompt)
    world.answer(tokens(50, 1))
    on_device = world.cache.match(prompt).length
    assert on_device % 16 and on_device > 16
    monkeypatch.setattr(CacheSequence, "loadable", lambda sequence, tokens: 0)
    again = world.answer(prompt)
    assert (usage(again).cached_tokens, usage(again).host_tokens) == (on_device // 16 * 16, 0)
    assert usage(again).recomputed_tokens == 0
