"""Architectures whose attention cannot be replaced: the same hits, and the answers of the model alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from radixkv import Engine, SamplingParams
from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, selftest
from radixkv.models.hook import own_attention
from radixkv.models.loaded import LoadedModel
from radixkv.models.runner import Chunk, Runner
from radixkv.models.selftest import self_test
from tests.models.conftest import GROUPED, SIZES
from tests.models.mill import Mill, prompts, random_steps

HEADS: dict[str, Any] = {"vocab_size": 97, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
# The second number is how exactly the architecture computes in float64: some keep parts of it in float32.
ARCHITECTURES: dict[str, tuple[Callable[[], Any], float]] = {
    "bloom": (lambda: transformers.BloomConfig(**HEADS, hidden_size=32, n_layer=2, n_head=4), 1e-9),
    "mpt": (lambda: transformers.MptConfig(**HEADS, d_model=32, n_layers=2, n_heads=4), 1e-4),
    "falcon": (lambda: transformers.FalconConfig(**SIZES, alibi=True, new_decoder_architecture=False), 1e-9),
    "gptj": (lambda: transformers.GPTJConfig(**HEADS, n_embd=32, n_layer=2, n_head=4, rotary_dim=4), 1e-4),
    "gpt_neo": (
        lambda: transformers.GPTNeoConfig(
            **HEADS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=21,
            max_position_embeddings=128,
        ),
        1e-4,
    ),
    "doge": (lambda: transformers.DogeConfig(**GROUPED), 1e-9),
}


CONTEXTS = [
    (transformers.MptConfig(**HEADS, d_model=32, n_layers=2, n_heads=4, max_seq_len=70), 70),
    (
        transformers.WhisperConfig(
            **{**HEADS, "pad_token_id": 0}, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_target_positions=60, is_encoder_decoder=False, begin_suppress_tokens=None,
        ),
        60,
    ),
    # Of tokens that are equal it drops any behind so many: which, hangs on how many others are there.
    (transformers.DogeConfig(**GROUPED, keep_window_size=64), 64),
    # Beyond (5 + 2) blocks the answer would depend on whether it has seen a shorter prompt before.
    (transformers.BigBirdConfig(**SIZES, is_decoder=True, block_size=4, num_random_blocks=1), 28),
]  # fmt: skip


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model runs over the pool."""

    def refuse(model: Any) -> None:
        raise UnsupportedModel("told so")

    monkeypatch.setattr(adapter, "probe", refuse)


@torch.inference_mode()
def own_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The model on its own: logits after the last of `tokens`."""
    with own_attention(loaded.model):
        found: torch.Tensor = loaded.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return found


def compare(loaded: LoadedModel, tolerance: float) -> None:
    """Random steps over random branches are the model's own forward, each of them."""
    mill = Mill(loaded, num_blocks=70)
    rows = random_steps(mill, seed=3, steps=9)
    assert len(rows) > 25
    assert mill.hits > 50
    assert mill.copied > 1
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own_logits(loaded, tokens), rtol=0, atol=tolerance)


@pytest.mark.usefixtures("exact_softmax")
def test_logits_equal_the_own_forward(build: Callable[..., Any], architecture: str) -> None:
    config, tolerance = ARCHITECTURES[architecture]
    loaded = adapter.load(build(config(), torch.float64))
    assert loaded.attention == "fallback"
    compare(loaded, tolerance)


@pytest.mark.usefixtures("exact_softmax", "forced")
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_a_sliding_window_drops_nothing(build: Callable[..., Any], family: str) -> None:
    """transformers' own cache keeps a window of 21 tokens, behind which no prefix could be found again."""
    loaded = adapter.load(build(family, torch.float64))
    assert (loaded.attention, loaded.layers[0].window) == ("fallback", 21)
    compare(loaded, 1e-9)


def test_an_engine_answers_as_the_model_generates(
    build: Callable[..., Any], architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = ARCHITECTURES[architecture]
    texts = prompts(random.Random(8), 4)
    expected = [generated(build(config()), text, 6) for text in texts]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with Engine.load(build(config()), num_blocks=120, block_size=4, prefill_chunk=9, monitor=False) as engine:
        assert [one.token_ids for one in engine.generate(texts, params)] == expected
        again = engine.generate([texts[0], texts[0]], replace(params, n=2))
        assert [one.token_ids for one in again] == expected[:1] * 2
        assert [other.token_ids for one in again for other in one.alternatives] == expected[:1] * 2
        assert min(one.usage.cached_tokens for one in again) >= len(texts[0]) - 1
        assert engine.stats().attention == "fallback"
    assert [message.partition(" by the fallback: ")[0] for message in caplog.messages] == [
        f"{type(build(config())).__name__}: each sequence runs by itself,"
    ]


def forwarded(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """The greedy reply by its own forward, which has to see everything anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def generated(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """What transformers' own loop generates greedily."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    reply: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tuple(reply)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_run_and_are_tested(build: Callable[..., Any], dtype: torch.dtype) -> None:
    loaded = adapter.load(build("llama", dtype))
    assert (loaded.attention, Runner(loaded, 2).store.dtype) == ("fallback", dtype)
    assert self_test(loaded) < 0.1


@pytest.mark.usefixtures("forced")
def test_bits_depend_on_the_sequence_alone(build: Callable[..., Any]) -> None:
    """Whatever runs beside it, and wherever its blocks lie: what `deterministic` asks for."""
    runner = Runner(adapter.load(build("llama")), 12, 4)
    tokens = np.arange(3, 12, dtype=np.int32)

    def run(*tables: list[int]) -> torch.Tensor:
        places = np.arange(9)
        blocks = [np.array(table, dtype=np.int32) for table in tables]
        return runner.run(
            [Chunk(tokens, 0, table[places // 4].astype(np.int64) * 4 + places % 4, table) for table in blocks]
        )

    alone = run([0, 1, 2])
    assert torch.equal(run([9, 3, 7], [2, 1, 0]), alone.expand(2, -1))


@pytest.mark.usefixtures("forced")
def test_what_a_fallback_has_cached_can_be_computed_again(build: Callable[..., Any]) -> None:
    runner = Runner(adapter.load(build("llama")), 4, 4, recheck_tokens=8)
    tokens, table = np.arange(3, 15, dtype=np.int32), np.array([2, 0, 1], dtype=np.int32)
    places = np.arange(12)
    runner.run([Chunk(tokens, 0, table[places // 4].astype(np.int64) * 4 + places % 4, table)])
    assert runner.recheck(tokens, 8, table).positions == ()
    runner.store.keys[1][0, 1, 2] += 1.0  # the third token of the third block
    assert runner.recheck(tokens, 8, table).positions == (2,)


@pytest.mark.parametrize(("config", "length"), CONTEXTS, ids=lambda value: type(value).__name__)
def test_a_context_ends_where_positions_do_or_keys_are_dropped(
    build: Callable[..., Any], config: Any, length: int
) -> None:
    assert adapter.load(build(config)).max_length == length


def phimoe() -> Any:
    return transformers.PhimoeConfig(**GROUPED, num_local_experts=2, sliding_window=53)


@pytest.mark.usefixtures("exact_softmax")
def test_a_window_that_attention_is_not_told(build: Callable[..., Any]) -> None:
    """The model's mask has it, the call of its attention has not: only a prompt that is longer shows it."""
    loaded = adapter.load(build(phimoe()))
    assert loaded.attention == "fallback"
    compare(loaded, 1e-3)  # its experts know no float64


def test_a_window_that_attention_is_not_told_and_that_cannot_be_tested(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_TOKEN_WEIGHTS", {"cpu": 0})  # as if the model were large
    with pytest.raises(UnsupportedModel, match="a window of 53 tokens that it does not pass to attention"):
        adapter.load(build(phimoe()), attention="torch")
    assert adapter.load(build(phimoe())).attention == "fallback"


@pytest.mark.usefixtures("forced")
def test_a_foreign_window_is_tested_or_not_believed(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that comes with a model may drop what lies behind its window, as transformers' cache for it does."""

    class Foreign(transformers.MistralForCausalLM):  # type: ignore[misc]  # transformers shows no types
        pass

    config = transformers.MistralConfig(**GROUPED, sliding_window=53)
    assert adapter.load(Foreign(config).eval()).attention == "fallback"
    monkeypatch.setattr(selftest, "_TOKEN_WEIGHTS", {"cpu": 0})  # as if the model were large
    assert adapter.load(build(config)).attention == "fallback"
    with pytest.raises(UnsupportedModel, match="a window of 53 tokens, which is too long to be tested"):
        adapter.load(Foreign(config).eval())


def test_a_window_that_nobody_heeds_is_none(build: Callable[..., Any]) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    config.sliding_window = 53
    assert adapter.load(build(config)).attention == "torch"


def test_the_fallback_has_to_be_allowed(build: Callable[..., Any]) -> None:
    config, _ = ARCHITECTURES["gptj"]
    with pytest.raises(UnsupportedModel, match="0 attention calls for 2 layers"):
        adapter.load(build(config()), attention="torch")


@pytest.mark.usefixtures("forced")
def test_a_compiler_has_nothing_to_compile_around(build: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(adapter.load(build("llama")), 4, 4)
    caplog.clear()
    runner.fuse("eager")
    assert caplog.messages == ["the model runs uncompiled: its attention is not radixkv's to compile around"]


class Keeping(nn.Module):
    """An MLP with a memory of what came before, in the module or in nothing that a pool holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([self.last.expand_as(x[:, :1]), x[:, :-1]], dim=1)
        if 9 <= x.shape[1] < 40:  # as a module that takes long prompts to be new ones
            self.last = x[:, -1:].detach()
        result: torch.Tensor = self.inner(x) + 0.1 * shifted
        return result


@pytest.mark.usefixtures("forced")
def test_state_in_a_module_is_refused(build: Callable[..., Any]) -> None:
    model = build("llama")
    model.model.layers[1].mlp = Keeping(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match=r"nor does its own attention over a cache do: .* own forward by"):
        adapter.load(model)


def test_a_model_that_leaves_out_what_pads_is_refused(build: Callable[..., Any]) -> None:
    """Its positions would hang on tokens that a hit does not compute."""
    config = transformers.TrOCRConfig(
        **{**HEADS, "pad_token_id": 0}, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        is_decoder=True, use_learned_position_embeddings=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="own forward by"):
        adapter.load(build(config))
