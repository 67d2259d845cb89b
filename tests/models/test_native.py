"""Layers of our own compute what transformers' models compute, bit for bit, and all else takes transformers' code."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv import Engine
from radixkv.errors import EngineClosed, InvalidInput
from radixkv.models import adapter, checkpoint
from radixkv.models.loaded import LoadedModel
from radixkv.models.native import files
from radixkv.models.native.compiled import CompiledOperators
from radixkv.models.native.layers import TORCH, NativeModel
from radixkv.models.native.switches import TYPES, NotListed, switches_of
from radixkv.models.quantized import build, kernels
from radixkv.models.quantized.kernels import Format
from radixkv.models.quantized.layers import quantized_weights
from radixkv.models.rounding import relative_error
from radixkv.models.runner import Runner
from tests.models import gguf_files
from tests.models.gguf_files import LINEAR, LLAMA3, LONGROPE, SIZES, YARN, write
from tests.models.step_runner import chunk
from tests.selection import mostly_long

_t = transformers
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
FOUR: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
HALF = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
OTHER_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
CONFIGS: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in gguf_files.CONFIGS.items() if name not in ("mixtral", "qwen3_moe")},
    "llama, one KV head": lambda: _t.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, rms_norm_eps=1e-2),
    "llama, yarn": lambda: _t.LlamaConfig(**SIZES, rope_parameters=OTHER_YARN),
    "llama, yarn with a factor of attention": lambda: _t.LlamaConfig(
        **SIZES, rope_parameters={**YARN, "attention_factor": 1.5}
    ),
    "mistral, no window": lambda: _t.MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen2, windows": lambda: _t.Qwen2Config(**SIZES, **WINDOWS, rope_parameters=LLAMA3),
    "qwen3, windows": lambda: _t.Qwen3Config(**SIZES, **WINDOWS, head_dim=32, attention_bias=True),
    "smollm3, biases": lambda: _t.SmolLM3Config(
        **FOUR, attention_bias=True, mlp_bias=True, no_rope_layers=[1, 0, 0, 1]
    ),
    "smollm3, linear": lambda: _t.SmolLM3Config(**FOUR, rope_parameters=LINEAR, no_rope_layer_interval=2),
    "granite, biases": lambda: _t.GraniteConfig(
        **SIZES, attention_bias=True, mlp_bias=True, embedding_multiplier=12.3, residual_multiplier=0.22
    ),
    "phi3, half rotated": lambda: _t.Phi3Config(**SIZES, rope_parameters=HALF),
    "phi3, short context": lambda: _t.Phi3Config(
        **SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=4096
    ),
    "gemma, biases": lambda: _t.GemmaConfig(
        **{**SIZES, "hidden_size": 96}, head_dim=32, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma2, no softcaps": lambda: _t.Gemma2Config(
        **SIZES, head_dim=32, sliding_window=21, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3, a softcap": lambda: _t.Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=21, final_logit_softcapping=5.0,
        layer_types=["full_attention", "sliding_attention"],
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(3).integers(3, 97, (3, 90)).astype(np.int32)
needs_products = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")


def made(name: str) -> Any:
    """A random model of transformers whose norms and biases are far from their usual values."""
    model = gguf_files.made(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randint(-64, 64, parameter.shape) / 128)
    return model


def native(folder: Path, dtype: torch.dtype, weights: str = "float32") -> NativeModel:
    model = files.read_model(checkpoint.examine(folder), dtype, weights, lambda _: None)
    assert model is not None
    return model.eval()


@torch.inference_mode()
def alone(model: Any, rows: slice = slice(None)) -> torch.Tensor:
    """The logits of whole prompts by a model alone."""
    found = [model(torch.from_numpy(each)[None].long(), use_cache=False).logits[0] for each in TOKENS[rows]]
    return torch.stack(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_have_the_bits_of_transformers(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        own = _t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
        longest = TOKENS.shape[1]
        if name == "phi3, longrope":  # transformers chooses its frequencies by the longest prompt
            longest = own.config.max_position_embeddings
        prompt = torch.from_numpy(np.resize(TOKENS[0], longest))[None].long()
        with torch.inference_mode():
            expected = own(prompt, use_cache=False).logits
            assert torch.equal(native(tmp_path, dtype)(prompt).logits, expected)


# ---- over a pool


def steps(loaded: LoadedModel) -> torch.Tensor:
    """The logits of three sequences after misses and hits: chunks, decodes, and a prefix that two of them share."""
    runner, found = Runner(loaded, 69, 4), list[torch.Tensor]()
    tables = np.arange(69, dtype=np.int32).reshape(3, 23)
    tables[2, :10] = tables[1, :10]
    cuts = [[(0, 0, 50), (1, 0, 40)], [(0, 50, 51), (2, 40, 80), (1, 40, 41)], [(0, 51, 90), (1, 41, 42), (2, 80, 81)]]
    for cut in cuts:
        inputs = []
        for row, start, end in cut:
            inputs.append(chunk(prompts()[row, start:end], start, tables[row, : -(-end // 4)]))
        found.append(runner.run(inputs))
    return torch.cat(found)


def prompts() -> np.ndarray[Any, np.dtype[np.int32]]:
    tokens = TOKENS.copy()
    tokens[2, :40] = tokens[1, :40]
    return tokens


@pytest.mark.parametrize("name", mostly_long(sorted(CONFIGS), "llama 3", "gemma3", "smollm3, biases", "phi3"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hits_and_misses_give_the_logits_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path)
    loaded = adapter.load(tmp_path, dtype=dtype)
    assert isinstance(loaded.model, NativeModel) and loaded.attention == "torch"
    own = adapter.load(tmp_path, dtype=dtype, model_code="transformers")
    assert (loaded.layers, loaded.max_length, loaded.stop_token_ids) == (own.layers, own.max_length, own.stop_token_ids)
    assert relative_error(steps(loaded), steps(own)) < (1e-9 if dtype == torch.float64 else 1e-5)


@needs_products
@pytest.mark.parametrize("name", mostly_long(sorted(CONFIGS), "llama, biases", "qwen3", "gemma3", "granite"))
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_files_give_the_logits_of_transformers(name: str, weights: str, tmp_path: Path) -> None:
    """The logits of the same numbers in float32, which the model of transformers gets from our layers."""
    own = made(name)
    own.save_pretrained(tmp_path)
    loaded = adapter.load(tmp_path, weights=weights)
    assert isinstance(loaded.model, NativeModel) and loaded.attention == "compiled"
    names = [name for name, _ in own.named_parameters()]
    values = {each: loaded.model.get_submodule(each.rpartition(".")[0]) for each in names}
    rounded = {each: getattr(module, each.rpartition(".")[2]) for each, module in values.items()}
    assert relative_error(rounded["model.embed_tokens.weight"], own.model.embed_tokens.weight.detach()) < 0.01
    inner = Format.INT8 if weights == "int8" else Format.INT4_MIN
    assert loaded.model.model.embed_tokens.quantized.format is loaded.model.lm_head.quantized.format is Format.INT8
    assert {each.format for each in quantized_weights(loaded.model)} == {Format.INT8, inner}
    own.load_state_dict(rounded, strict=False)
    assert relative_error(steps(loaded), steps(adapter.load(own, weights="float32"))) < 1e-5


@needs_products
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("name", mostly_long(sorted({*CONFIGS} & {*gguf_files.CONFIGS}), "llama 3", "gemma2"))
def test_gguf_files_give_the_logits_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    path = write(gguf_files.made(CONFIGS[name]()), tmp_path / "model.gguf", kind)
    loaded, own = (adapter.load(path, model_code=code) for code in ("auto", "transformers"))
    assert isinstance(loaded.model, NativeModel) and not isinstance(own.model, NativeModel)
    assert relative_error(steps(loaded), steps(own)) < 1e-5
    assert loaded.stop_token_ids == own.stop_token_ids


# ---- what is not listed


LLAMA: dict[str, Any] = {**SIZES, "model_type": "llama", "hidden_act": "silu"}
UNLISTED: dict[str, dict[str, Any]] = {
    "a type": {"model_type": "mixtral"},
    "a field": {"attention_chunk_size": 8},
    "a field of another type": {"residual_multiplier": 0.5},
    "a softcap that transformers ignores": {"model_type": "gemma3_text", "attn_logit_softcapping": 3.0},
    "code of its own": {"auto_map": {}},
    "a quantisation": {"quantization_config": {}},
    "an activation": {"hidden_act": "gelu"},
    "a scaling": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "a parameter of a scaling": {"rope_parameters": {**LLAMA3, "long_mscale": 1.0}},
    "a type of scaling by a name that transformers ignores": {
        "model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "two scalings that transformers merges": {
        "model_type": "gemma3_text", "rope_parameters": {"full_attention": LINEAR}, "rope_scaling": YARN,
    },
    "an option of YaRN that transformers does not find": {
        "model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {**YARN, "truncate": False}},
    },
    "a scaling without a factor": {"rope_scaling": {"type": "linear"}},
    "frequencies that are not finite": {"rope_parameters": {**LINEAR, "factor": 0.0}},
    "a part of each head": {"partial_rotary_factor": 0.5},
    "heads that share unevenly": {"num_key_value_heads": 3},
    "an odd head": {"head_dim": 7},
    "a flag for a size": {"num_hidden_layers": True},
    "a text": {"rms_norm_eps": "1e-6"},
    "no size": {"vocab_size": None},
}  # fmt: skip


@pytest.mark.parametrize("name", UNLISTED)
def test_what_no_test_has_compared_is_not_listed(name: str) -> None:
    assert switches_of(LLAMA)
    with pytest.raises(NotListed):
        switches_of(LLAMA | UNLISTED[name])


@pytest.mark.parametrize("kind", TYPES)
def test_no_value_of_a_field_raises_another_error(kind: str) -> None:
    """transformers' code then reports the value, or accepts it."""
    listed = LLAMA | {"model_type": kind, "hidden_act": TYPES[kind]["hidden_act"]}
    assert switches_of(listed)
    values: list[Any] = [None, True, -1, 0, 3, 10**30, 1e400, float("nan"), "", "silu", [], [1], {}, {"factor": []}]
    values += [{"full_attention": 5}, {"rope_type": [], "factor": 2}, {"rope_type": "yarn", "factor": 0}]
    for name in TYPES[kind]:
        for value in values:
            with contextlib.suppress(NotListed):
                switches_of(listed | {name: value})


def test_files_with_other_weights_take_the_code_of_transformers(tmp_path: Path) -> None:
    made("llama, tied").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert files.read_model(checkpoint.examine(tmp_path), torch.float32, "float32", lambda _: None) is None


def test_other_model_code_is_refused() -> None:
    with pytest.raises(InvalidInput, match="model_code='own': allowed are 'auto', 'transformers'"):
        Engine.load("tiny", model_code="own")


# ---- weights that change


def scored(engine: Engine) -> list[float]:
    """The log probabilities of a prompt's end after its beginning."""
    (found,) = engine.score(TOKENS[0, :60].tolist(), [TOKENS[0, 60:].tolist()])
    return [*found.token_logprobs]


@pytest.mark.parametrize("weights", ["float32", pytest.param("int8", marks=needs_products)])
def test_a_closed_engine_keeps_neither_weights_nor_pool(weights: str) -> None:
    engine = Engine.load("tiny", weights=weights, num_blocks=32)
    gc.collect()
    gc.disable()  # no cycle may keep them until the next collection
    try:
        before = scored(engine)
        model = engine.model.model
        kept = [weakref.ref(each) for each in (*model.modules(), *model.parameters(), engine.core.runner.store)]
        del model
        engine.close()
        assert not [each for each in kept if each() is not None]
    finally:
        gc.enable()
    assert before
    assert engine.model.name == "tiny"
    with pytest.raises(EngineClosed):
        scored(engine)
    with pytest.raises(EngineClosed):
        engine.reload_weights()


# ---- compiled operators


def compiled(name: str, tmp_path: Path) -> tuple[Any, CompiledOperators]:
    """A model with weights of 8 bits, and its operators."""
    made(name).save_pretrained(tmp_path)
    model, library = native(tmp_path, torch.float32, "int8"), kernels.kernels()
    assert library is not None
    return model.model, CompiledOperators(model, library)


@needs_products
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_norm_gives_each_row_the_bits_that_it_has_alone(name: str, tmp_path: Path) -> None:
    model, operators = compiled(name, tmp_path)
    rows = torch.randn(11, 64) * torch.logspace(-4, 3, 11)[:, None]
    found, total = operators.norm(model.norm, rows, rows.flip(0))
    expected, same = TORCH.norm(model.norm, rows, rows.flip(0))
    assert torch.equal(total, same)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(operators.norm(model.norm, total[i : i + 1], None)[0][0], found[i]) for i in range(11))
    across = torch.randn(64, 5).t()
    assert torch.equal(operators.norm(model.norm, across, None)[0], operators.norm(model.norm, across + 0.0, None)[0])


@needs_products
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("name", ["llama, biases", "gemma"])
def test_an_mlp_computes_its_activation_as_torch(name: str, scale: float, tmp_path: Path) -> None:
    model, operators = compiled(name, tmp_path)
    mlp, rows = model.layers[0].mlp, torch.randn(385, 64, generator=torch.Generator().manual_seed(1)) * scale
    found, own = operators.mlp(mlp, rows), TORCH.mlp(mlp, rows)
    assert ((found - own).norm(dim=1) <= 1e-5 * own.norm(dim=1)).all()
    assert all(torch.equal(operators.mlp(mlp, rows[i : i + 1])[0], found[i]) for i in (0, 200, 384))
    rows[3, 7] = torch.nan
    assert operators.mlp(mlp, rows)[3].isnan().all() and torch.equal(operators.mlp(mlp, rows)[:3], found[:3])


@needs_products
def test_threads_and_instruction_sets_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(gguf_files.made(CONFIGS["qwen3"]()), tmp_path / "model.gguf", "Q4_1")
    expected = steps(adapter.load(path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(steps(adapter.load(path)), expected)
    if "avx512bw" in build.cpu_features():
        monkeypatch.setattr(kernels.kernels(), "instructions", 1)
        assert torch.equal(steps(adapter.load(path)), expected)


# ---- models of a caller


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])
def test_a_model_of_transformers_lends_its_parameters(name: str) -> None:
    own = made(name)
    expected, loaded = alone(own), adapter.load(own)
    assert isinstance(loaded.model, NativeModel) and {*loaded.model.parameters()} <= {*own.parameters()}
    torch.testing.assert_close(alone(loaded.model), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(alone(own), expected)
    assert not isinstance(adapter.load(own, model_code="transformers").model, NativeModel)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_of_transformers_lends_its_rotary_frequencies(name: str) -> None:
    own = made(name)
    for each in own.model.rotary_emb.buffers():
        each[2:] *= 0.25  # hardly visible in the first tokens
    expected, loaded = alone(own), adapter.load(own)
    assert isinstance(loaded.model, NativeModel)
    torch.testing.assert_close(alone(loaded.model), expected, rtol=1e-4, atol=1e-4)
