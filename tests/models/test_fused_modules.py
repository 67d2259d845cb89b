"""Fused projections and MLPs give a model's own numbers, and modules that compute something else stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from radixkv.models import adapter, attention_interface
from radixkv.models.attention_interface import AttentionCall
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.quantized import build, kernels
from radixkv.models.quantized.layers import quantize
from radixkv.models.quantized.modules import FusedAttention, FusedMLP, fuse_modules, restore_modules
from radixkv.models.quantized.norms import fuse_norms
from radixkv.models.rounding import relative_error
from radixkv.models.runner import Runner
from tests.models.gguf_files import CONFIGS, SIZES, made, write
from tests.selection import mostly_long

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
TOLERANCE = 1e-5  # of the logits' spread
TOKENS = np.random.default_rng(3).integers(3, 97, (4, 90)).astype(np.int32)
BOTH, NEITHER = {FusedAttention, FusedMLP}, set[type]()


def fused(model: nn.Module) -> list[type]:
    return [type(vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]


def small(config: Any) -> Any:
    """A random model with weights of 8 bits, ready to be fused."""
    model = made(config)
    quantize(model, "int8")
    fuse_norms(model)
    attention_interface.select(model, attention_interface.IMPLEMENTATION)
    return model


def step(runner: Runner, rows: list[int], start: int, end: int) -> torch.Tensor:
    """The logits of the last token of each of these sequences, which are in blocks of their own."""
    inputs = []
    for row in rows:
        table = np.arange(row * 23, row * 23 + -(-end // 4), dtype=np.int32)
        inputs.append(SequenceInput(TOKENS[row, start:end], start, np.arange(start, end) + row * 92, table))
    return runner.run(inputs)


# ---- models


@pytest.mark.parametrize("family", mostly_long(sorted(CONFIGS), "llama, biases", "qwen3", "gemma3", "smollm3"))
def test_every_family_gives_the_logits_of_its_own_parts(tmp_path: Path, family: str) -> None:
    """Prompts, chunks and decodes in a batch, with fused modules and without."""
    path = write(made(CONFIGS[family]()), tmp_path / "model.gguf", "Q4_1")
    loaded = adapter.load(path, model_code="transformers")
    kinds = {"phi3": NEITHER, "phi3, longrope": NEITHER, "mixtral": {FusedAttention}, "qwen3_moe": {FusedAttention}}
    assert set(fused(loaded.model)) == kinds.get(family, BOTH)
    assert len(fused(loaded.model)) == len(kinds.get(family, BOTH)) * len(loaded.layers)
    assert loaded.attention == "compiled"
    found = logits(loaded)
    restore_modules(loaded.model)
    assert not fused(loaded.model)
    own = logits(loaded)
    assert all(relative_error(one, other) <= TOLERANCE for one, other in zip(found, own, strict=True))


def logits(loaded: LoadedModel) -> list[torch.Tensor]:
    runner = Runner(loaded, 92, 4)
    return [step(runner, [*range(4)], start, end) for start, end in ((0, 60), (60, 61), (61, 88), (88, 89))]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_decode_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, kind: str) -> None:
    """The prompts share no block, so that nothing is summed in another order."""
    loaded = adapter.load(write(made(CONFIGS["qwen3"]()), tmp_path / "model.gguf", kind))
    runner = Runner(loaded, 92, 4)
    for row in range(4):
        step(runner, [row], 0, 70)
    together = step(runner, [*range(4)], 70, 71)
    assert all(torch.equal(step(runner, [row], 70, 71)[0], together[row]) for row in range(4))


def test_threads_and_instruction_sets_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(made(CONFIGS["qwen3"]()), tmp_path / "model.gguf", "Q4_1")
    expected = logits(adapter.load(path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, logits(adapter.load(path)), expected))
    if "avx512bw" in build.cpu_features():
        monkeypatch.setattr(kernels.kernels(), "instructions", 1)
        assert all(map(torch.equal, logits(adapter.load(path)), expected))


def test_a_copy_of_a_model_uses_its_own_parts() -> None:
    model = small(CONFIGS["qwen3"]())
    fuse_modules(model, 256)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.o_proj = nn.Linear(512, 64, bias=False)
    ids = torch.from_numpy(TOKENS[:1, :20]).long()
    with torch.inference_mode(), attention_interface.handled_by(Values()):
        assert not torch.equal(model(ids, use_cache=False).logits, other(ids, use_cache=False).logits)


def test_replaced_weights_are_used_at_once() -> None:
    model, ids = small(CONFIGS["llama, biases"]()), torch.from_numpy(TOKENS[:1, :20]).long()
    assert fuse_modules(model, 256) == 4
    with torch.inference_mode(), attention_interface.handled_by(Values()):
        before = model(ids, use_cache=False).logits
        for layer in model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                dense = linear.quantized.dense()
                linear.quantized = kernels.QuantizedWeights(*dense.shape, linear.quantized.format)
                linear.quantized.quantise(dense * 1.5, 0)
            layer.self_attn.v_proj.bias.data = layer.self_attn.v_proj.bias.data + 1.0
        after = model(ids, use_cache=False).logits
        restore_modules(model)
        assert relative_error(after, model(ids, use_cache=False).logits) <= TOLERANCE < relative_error(after, before)


class Values:
    """Attention in which each token sees itself only."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.value[0].repeat_interleave(call.query.shape[1] // call.key.shape[1], 0).transpose(0, 1)


def test_another_attention_and_a_cache_run_the_own_forward() -> None:
    model, ids = small(CONFIGS["qwen3"]()), torch.from_numpy(TOKENS[:1, :20]).long()
    with torch.inference_mode(), attention_interface.own_attention(model):
        expected = model(ids, use_cache=True).logits
        fuse_modules(model, 256)
        assert relative_error(model(ids, use_cache=True).logits, expected) <= TOLERANCE


# ---- modules that compute something else


def changed(kind: type[nn.Module], change: Callable[..., Any]) -> type[Any]:
    """A subclass whose forward changes its own arguments."""

    class Changed(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **named: Any) -> Any:
            return change(super().forward, *args, **named)

    return Changed


def scaled_far(own: Any, **named: Any) -> Any:
    """Attention whose inputs are scaled at far positions."""
    far = 1.0 + 0.5 * (named["position_ids"][..., None] >= 200)
    return own(**(named | {"hidden_states": named["hidden_states"] * far}))


CHANGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "far positions": ("self_attn", scaled_far),
    "an output": ("self_attn", lambda own, **named: (own(**named)[0] * 1.001, None)),
    "a residual": ("mlp", lambda own, x: own(x) + 0.01 * x),
    "a clamp": ("mlp", lambda own, x: own(x.clamp(max=0.5))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_compute_something_else_stay(name: str) -> None:
    model = small(CONFIGS["llama"]())
    place, change = CHANGES[name]
    module = getattr(model.model.layers[1], place)
    module.__class__ = changed(type(module), change)
    assert fuse_modules(model, 256) == 3 and "forward" not in vars(module)


def test_queries_that_grow_with_the_position_stay() -> None:
    """Ministral 3 scales queries from `original_max_position_embeddings` on."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    model = small(transformers.Ministral3Config(**SIZES, head_dim=32, rope_parameters=rope))
    assert fuse_modules(model, 256) == 2 and set(fused(model)) == {FusedMLP}


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "gelu_pytorch_tanh"])
def test_only_two_activations_are_fused(activation: str) -> None:
    model = small(transformers.LlamaConfig(**SIZES, hidden_act=activation))
    assert fuse_modules(model, 256) == (4 if activation in ("silu", "gelu_pytorch_tanh") else 2)


@pytest.mark.parametrize("obstacle", ["hook", "forward", "float32"])
def test_modules_with_hooks_or_other_parts_stay(obstacle: str) -> None:
    model = small(CONFIGS["llama"]())
    for module in (model.model.layers[0].mlp, model.model.layers[0].self_attn):
        if obstacle == "hook":
            module.register_forward_hook(lambda *_: None)
        elif obstacle == "forward":
            module.forward = module.forward
        elif obstacle == "float32":
            name = "up_proj" if hasattr(module, "up_proj") else "k_proj"
            width = getattr(module, name).out_features
            setattr(module, name, nn.Linear(64, width, bias=False))
    assert fuse_modules(model, 256) == 2


# ---- arithmetic


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_activations_match_torch(activation: str, scale: float) -> None:
    """An MLP whose products are close to the identity, so that its rows are activations."""
    model = small(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 64}, hidden_act=activation))
    mlp = model.model.layers[0].mlp
    eye = torch.eye(64)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.quantized.quantise(eye, 0)
    assert fuse_modules(model, 256) == 4
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)) * scale
    found, own = mlp(rows), type(mlp).forward(mlp, rows)
    torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6 * scale)
    assert found[:, 5].isfinite().all()
    rows[3, 7] = torch.nan
    assert mlp(rows)[3].isnan().all() and torch.equal(mlp(rows)[:3], found[:3])


@pytest.mark.parametrize("rows", [1, 2, 13, 384, 385, 900])
def test_an_mlp_gives_each_row_the_bits_that_it_has_alone(rows: int) -> None:
    model = small(CONFIGS["llama, biases"]())
    fuse_modules(model, 256)
    mlp, given = model.model.layers[1].mlp, torch.randn(1, rows, 64)
    whole = mlp(given)
    assert all(torch.equal(mlp(given[:, row]), whole[:, row]) for row in {0, rows // 2, rows - 1})
    torch.testing.assert_close(whole, type(mlp).forward(mlp, given), rtol=1e-5, atol=1e-5)
