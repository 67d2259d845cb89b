"""Engines of hybrid models: their answers, their memory, and the settings that they refuse or leave off."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixkv import Engine, SamplingParams
from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.errors import InvalidInput
from radixkv.models import adapter
from radixkv.models.attention_interface import own_attention
from radixkv.models.runner import Runner
from radixkv.sizing.memory import pool_size, state_slots
from tests.models.recurrent.hybrids import hybrid
from tests.selection import mostly_long
from tests.telemetry.served import runtime_folder

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {
    "num_blocks": 200, "block_size": 4, "prefill_chunk": 17, "max_batch_tokens": 60, "max_sequences": 6,
    "monitor": False,
}  # fmt: skip


def texts(count: int) -> list[list[int]]:
    """Draw prompts of which each second one continues another."""
    rng = random.Random(3)
    made = [[rng.randrange(3, 97) for _ in range(70)]]
    while len(made) < count:
        stem = rng.choice(made)[: rng.randrange(20, 70)] if len(made) % 2 else []
        made.append(stem + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 25))])
    return made


@torch.inference_mode()
def own_reply(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """Return the greedy reply by the model's own forward over all tokens."""
    tokens = list(prompt)
    with own_attention(model):
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("kind", mostly_long(["qwen3_5", "lfm2", "falcon_h1", "mamba2"], "lfm2"))
def test_answers_are_the_models_own(kind: str) -> None:
    own, prompts = hybrid(kind), texts(8)
    expected = [own_reply(own, prompt, 6) for prompt in prompts]
    with Engine.load(hybrid(kind), **SMALL) as engine:
        for _ in range(3):  # of texts in common, the second user takes a snapshot, and the third finds it
            assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == expected
            engine.core.cache.check()
        forked = engine.generate([prompts[0]], replace(GREEDY, n=3))[0]
        assert {each.token_ids for each in (forked, *forked.alternatives)} == {expected[0]}
        stats = engine.stats()
    assert stats.cached_tokens > 100
    assert stats.cache.state_rows == 6
    assert stats.state_copied_bytes == stats.state_copies * engine.model.state_bytes > 0
    assert stats.state_bytes == (stats.cache.state_rows + stats.cache.state_slots) * engine.model.state_bytes


@pytest.mark.parametrize("kind", mostly_long(["qwen3_5", "lfm2", "falcon_h1"], "lfm2"))
@pytest.mark.parametrize("deterministic", [False, True])
def test_host_memory_gives_back_kv_with_the_state_after_it(
    kind: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool holds one prompt, and the rows' snapshots on the device one state."""
    monkeypatch.setattr(Runner, "host_costs", lambda runner, chunk: HostCosts(1e-6, 1e-3))
    rng = random.Random(5)
    own, prompts = hybrid(kind), [[rng.randrange(3, 97) for _ in range(90)] for _ in range(4)]
    expected = [own_reply(own, prompt, 6) for prompt in prompts]
    state = adapter.load(hybrid(kind)).state_bytes
    memory: dict[str, Any] = {"num_blocks": 30, "max_sequences": 1, "state_memory": 2 * state, "kv_memory": 4 * state}
    memory |= {"host_memory": 400 * state, "deterministic": deterministic, "prefill_chunk": 16}
    with Engine.load(hybrid(kind), **{**SMALL, **memory}) as engine:
        for _ in range(4):
            assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == expected
            engine.core.cache.check()
        stats = engine.stats()
    assert stats.host_tokens > 0 and stats.cache.host_state_slots_used > 0
    assert stats.cache.offloaded_blocks > 0 and stats.failed_loads == 0


def test_a_model_without_kv_refuses_host_memory() -> None:
    with pytest.raises(InvalidInput, match="this model has no KV that could be offloaded"):
        Engine.load(hybrid("mamba2"), **SMALL, host_memory="1MB")


def test_telemetry_sends_the_memory_and_copies_of_states() -> None:
    with runtime_folder(), Engine.load(hybrid("lfm2"), **{**SMALL, "monitor": True}) as engine:
        engine.generate(texts(3), GREEDY)
        assert engine.monitoring is not None
        sent, stats = engine.client.thread.ask(engine.monitoring.recorder.collect).stats, engine.stats()
    assert sent["state_bytes"] == stats.state_bytes > 0
    assert sent["state_copies"] == stats.state_copies > 0
    assert sent["state_copied_bytes"] == stats.state_copied_bytes > 0
    assert sent["cache.evicted_states"] == stats.cache.evicted_states


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_5", "lfm2"])
def test_preemption_and_eviction_of_states_change_no_answer(kind: str) -> None:
    own, prompts = hybrid(kind), [text[:30] for text in texts(9)]
    expected = [own_reply(own, prompt, 30) for prompt in prompts]
    memory = 7 * adapter.load(own).state_bytes  # five rows and two snapshots
    options = {**SMALL, "num_blocks": 36, "max_sequences": 5, "state_memory": memory}
    with Engine.load(hybrid(kind), **options) as engine:
        for _ in range(3):
            replies = engine.generate(prompts, replace(GREEDY, max_tokens=30))
            assert [one.token_ids for one in replies] == expected
            engine.core.cache.check()
        stats = engine.stats()
    assert stats.preemptions > 3
    assert stats.cache.evicted_states > 3
    assert stats.cached_tokens > 100


def test_without_a_prefix_cache_each_prompt_is_computed_in_full() -> None:
    prompt = texts(1)[0]
    with Engine.load(hybrid("lfm2"), prefix_cache=False, **SMALL) as engine:
        replies = {engine.generate([prompt], GREEDY)[0].token_ids for _ in range(3)}
        assert len(replies) == 1
        stats = engine.stats()
        assert stats.cached_tokens == 0
        assert stats.state_bytes == 6 * engine.model.state_bytes  # a row for each sequence, and no snapshots


def test_a_deterministic_engine_repeats_its_bits_after_hits() -> None:
    options = {**SMALL, "prefill_chunk": 16, "deterministic": True}
    params = replace(GREEDY, logprobs=3)
    with Engine.load(hybrid("qwen3_5"), **options) as engine:
        found = [engine.generate(texts(1), params)[0] for _ in range(3)]
    assert [each.usage.cached_tokens for each in found][-1] in (48, 64)
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs


def test_as_many_sequences_run_as_have_rows(caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid("bamba")
    with Engine.load(model, kv_memory=12 * 9984, monitor=False) as engine:
        cache = engine.core.cache
        assert isinstance(cache, PrefixCache)
        assert (engine.config.max_sequences, cache.stats().state_rows, cache.stats().state_slots) == (2, 2, 2)
        assert cache.num_blocks == (12 * 9984 - 4 * 9984) // (16 * 128)
        replies = engine.generate(texts(4), GREEDY)
        assert [one.token_ids for one in replies] == [own_reply(model, text, 6) for text in texts(4)]
    assert "2 sequences run at once instead of 64: each takes a recurrent state of 9.75 KiB" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_memory": 5 * 9984}, "a third of the kv_memory of 48.75 KiB holds 1 states, and two are needed"),
        ({"state_memory": 6 * 9984, "max_sequences": 6}, "holds 6 states, and max_sequences=6 needs .* give 68.25 KiB"),
        ({"state_memory": "1MB", "kv_memory": "900KB"}, "leaves nothing of the kv_memory of 878.9 KiB for KV"),
        ({"state_memory": "much"}, 'state_memory must be "auto", bytes'),
        ({"host_memory": 2 * 9984}, "a third of the host_memory of 19.5 KiB holds no recurrent state of this model"),
    ],
)
def test_memory_that_a_hybrid_model_cannot_use_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Engine.load(hybrid("bamba"), monitor=False, **options)


def test_a_given_state_memory_is_used_in_full() -> None:
    assert state_slots(10**9, 1000, max_sequences=4, state_memory=20_500) == (4, 16)
    options: dict[str, Any] = {"num_blocks": 10, "max_sequences": 4, "bytes_per_block": 100}
    assert pool_size("1MB", "cpu", bytes_per_state=1000, **options) == (10, (4, 60), 65_000, 0, 0)
    assert pool_size("1MB", "cpu", **options).slots == (0, 0)


def test_a_model_without_states_leaves_their_memory_to_kv(caplog: pytest.LogCaptureFixture) -> None:
    with Engine.load("tiny", state_memory="1MB", num_blocks=8, monitor=False) as engine:
        assert engine.stats().state_bytes == 0
    assert "state_memory has no effect: the model has no recurrent state" in caplog.text


def test_audits_say_why_they_cannot_run() -> None:
    with (
        Engine.load(hybrid("lfm2"), **SMALL) as engine,
        pytest.raises(InvalidInput, match="this model has recurrent state"),
    ):
        engine.audit()
