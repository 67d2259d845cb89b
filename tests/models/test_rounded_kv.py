"""Models over KV of 16 and 8 bits: the logits of a forward whose keys and values are rounded alike, and refusals."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from radixkv import Engine, SamplingParams
from radixkv.attention.kv_formats import Int8
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, compiled_attention
from radixkv.models.loaded import LoadedModel
from radixkv.models.quantized.kernels import kernels
from radixkv.models.rounded_kv import format_test, rounded_logits
from radixkv.models.rounding import relative_error
from tests.models.conftest import FAMILIES, make
from tests.models.recurrent.hybrids import Steps, hybrid
from tests.models.step_runner import StepRunner, in_chunks, own_logits, prompts, random_steps
from tests.models.test_architectures import deepseek_v3, gemma3n, gemma4, gpt_oss

FORMATS = ["float16", "int8"]
exact = importlib.import_module("model_parts.exact").exact


def wide(family: str) -> Any:
    """The family with heads of 16 numbers, of which int8 takes multiples."""
    config = FAMILIES[family]()
    config.hidden_size, config.head_dim = 64, 16
    return config


CONFIGS: dict[str, Callable[[], Any]] = {name: (lambda name=name: wide(name)) for name in FAMILIES} | {
    "gemma3n": gemma3n,
    "gemma4": lambda: gemma4(16, 48),
    "deepseek_v3": lambda: deepseek_v3(32, 16, 32),
    "gpt_oss": lambda: gpt_oss(16),
}
IN_FLOAT32 = {"gpt_oss": 2e-2, "gemma3n": 1e-3, "gemma4": 1e-3, "deepseek_v3": 1e-3}
"""Models that compute parts in float32: a number between two codes may get the other one."""


def compared(loaded: LoadedModel, tolerance: float, steps: int = 9) -> None:
    """Check that chunks, decodes, hits and forks give the logits of one forward with rounded keys and values."""
    step_runner = StepRunner(loaded, num_blocks=70)
    rows = random_steps(step_runner, seed=3, steps=steps)
    assert len(rows) > 25
    assert step_runner.hits > 50
    assert step_runner.copied > 1
    for tokens, logits in rows:
        own = rounded_logits(loaded, torch.tensor(tokens), torch.tensor([len(tokens) - 1]))[0]
        torch.testing.assert_close(logits, own, rtol=0, atol=tolerance, check_dtype=False)


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("kv_dtype", [pytest.param("float16", marks=pytest.mark.long), "int8"])
def test_logits_equal_a_forward_with_rounded_keys_and_values(kind: str, kv_dtype: str) -> None:
    dtype = torch.float32 if kind == "gpt_oss" else torch.float64
    loaded = adapter.load(make(CONFIGS[kind](), dtype), attention="torch", kv_dtype=kv_dtype)
    compared(loaded, IN_FLOAT32.get(kind, 1e-9))


@pytest.mark.skipif(kernels() is None, reason="no compiler, or a CPU without AVX2")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3n", "gpt_neox"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_compiled_attention_reads_what_it_has_written(kind: str, kv_dtype: str) -> None:
    loaded = adapter.load(make(CONFIGS[kind]()), kv_dtype=kv_dtype)
    assert loaded.attention == "compiled"
    compared(loaded, 5e-2)
    assert format_test(loaded) < 1e-2


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_hybrids_keep_their_states_with_rounded_kv(kv_dtype: str) -> None:
    with exact():
        loaded = adapter.load(hybrid("qwen3_5", torch.float64), attention="torch", kv_dtype=kv_dtype)
        steps = Steps(loaded, seed=5)
        rows = [row for _ in range(14) for row in steps.step()]
        assert len(rows) > 20
        assert steps.restored > 1
        for tokens, logits in rows:
            own = rounded_logits(loaded, torch.tensor(tokens), torch.tensor([len(tokens) - 1]))[0]
            torch.testing.assert_close(logits, own, rtol=0, atol=1e-8, check_dtype=False)
    assert loaded.state_bytes == replace(loaded, kv_dtype="auto").state_bytes


def test_rounded_kv_is_not_the_kv_of_the_model() -> None:
    """The comparison above would else show nothing."""
    loaded = adapter.load(make(wide("llama")), kv_dtype="int8")
    tokens, rows = torch.arange(3, 60), torch.arange(57)
    plain = rounded_logits(replace(loaded, kv_dtype="auto"), tokens, rows)
    assert (rounded_logits(loaded, tokens, rows) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_fallback_reads_keys_without_their_rotation(kv_dtype: str) -> None:
    """Else it would multiply rotated keys by queries that are not."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    loaded = adapter.load(make(config, torch.float64), kv_dtype=kv_dtype)
    assert loaded.attention == "fallback"
    tokens = list(range(5, 25))
    last = in_chunks(loaded, tokens, [7, 19, 20])[-1]
    assert 1e-9 < relative_error(last, own_logits(loaded, tokens)) < 2e-2


# ---- the test at load


def unrotated(self: Int8, attend: Any) -> Any:
    return attend


@pytest.mark.usefixtures("each_load_tested")
@pytest.mark.parametrize("attention", ["torch", "compiled"])
def test_wrong_attention_over_codes_is_refused(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if attention == "compiled" and kernels() is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    monkeypatch.setattr(Int8, "attending", unrotated)
    with pytest.raises(UnsupportedModel, match="does not compute the same over int8 KV"):
        adapter.load(make(wide("llama")), attention=attention, kv_dtype="int8")


def test_keys_beyond_float16_are_refused_with_their_size() -> None:
    model = make(wide("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e5)
    with pytest.raises(InvalidInput, match=r"holds numbers up to 65,504, and .* has a key or value of \d\d\d,\d\d\d"):
        adapter.load(model, kv_dtype="float16")


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_values_below_float16_are_refused(kv_dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model stays the same function in float32."""
    model = make(wide("llama"))

    def scale(factor: float) -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(factor)
                layer.self_attn.o_proj.weight.div_(factor)

    scale(1e-7)
    adapter.load(model, kv_dtype=kv_dtype)
    assert [each.levelname for each in caplog.records if "moves the logits" in each.message] == ["WARNING"]
    scale(1e-1)
    with pytest.raises(InvalidInput, match="of their spread: its keys or values may be too small"):
        adapter.load(model, kv_dtype=kv_dtype)


def test_the_fallback_is_compared_with_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    loaded = adapter.load(make(config), kv_dtype="int8")
    assert loaded.attention == "fallback" and 0 < format_test(loaded) < 2e-2
    encode = Int8.encode
    monkeypatch.setattr(Int8, "encode", lambda self, new: encode(self, new.flip(-1)))
    with pytest.raises(InvalidInput, match="kv_dtype='int8' moves the logits"):
        format_test(loaded)


def test_a_reload_tests_the_format() -> None:
    model = make(wide("llama"))
    with Engine.load(model, num_blocks=40, kv_dtype="float16", monitor=False) as engine:
        state = {name: each.clone() for name, each in model.state_dict().items()}
        engine.reload_weights(state)
        state["model.layers.1.self_attn.k_proj.weight"] *= 1e5
        with pytest.raises(InvalidInput, match=r"65,504, and .* has a key or value of \d\d\d,\d\d\d"):
            engine.reload_weights(state)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_dtype": "fp8"}, "allowed are 'auto', 'float16', 'int8'"),
        ({"kv_dtype": "float16", "dtype": "bfloat16"}, "the model computes in bfloat16"),
        ({"kv_dtype": "int8", "config": "narrow"}, "the keys of layer 0 have 8 numbers, no multiple of 16 up to 512"),
    ],
)
def test_what_no_pool_can_have_is_refused(options: dict[str, Any], reason: str) -> None:
    config = FAMILIES["llama"]() if options.pop("config", "") else wide("llama")
    with pytest.raises(InvalidInput, match=reason):
        adapter.load(make(config), **options)


def test_without_a_compiler_torch_expands_codes_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_attention, "kernels", lambda: None)
    assert adapter.load(make(wide("llama")), kv_dtype="int8").attention == "torch"
    assert [each for each in caplog.messages if "int8 KV runs in torch" in each] == [
        "attention over int8 KV runs in torch, which expands it: nothing is compiled on this machine"
    ]


# ---- engines


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("kv_dtype", [pytest.param("float16", marks=pytest.mark.long), "int8"])
@pytest.mark.parametrize("host_memory", [pytest.param(None, marks=pytest.mark.long), "200KB"])
def test_a_deterministic_engine_gives_the_same_bits_with_a_hit(kv_dtype: str, host_memory: str | None) -> None:
    options: dict[str, Any] = {"deterministic": True, "prefill_chunk": 8, "block_size": 4, "kv_dtype": kv_dtype}
    texts = prompts(random.Random(8), 6)
    with (
        Engine.load(
            "tiny", num_blocks=30 if host_memory else 80, host_memory=host_memory, monitor=False, **options
        ) as warm,
        Engine.load("tiny", num_blocks=60, prefix_cache=False, monitor=False, **options) as cold,
    ):
        for text in texts * 2:
            assert warm.generate([text], GREEDY)[0].logprobs == cold.generate([text], GREEDY)[0].logprobs
        assert warm.stats().cached_tokens > 100
        assert bool(warm.stats().host_tokens) == bool(host_memory)
        report = warm.audit(blocks=10)
        assert report.differ == 0 < report.blocks


@pytest.mark.parametrize("fault", ["a column of codes", "noise", "scales"])
def test_an_audit_finds_codes_that_are_off(fault: str) -> None:
    with Engine.load("tiny", num_blocks=80, block_size=4, monitor=False, kv_dtype="int8") as engine:
        engine.generate([list(range(20, 90))], GREEDY)
        assert engine.audit(blocks=40).differ == 0
        store = engine.core.runner.store
        for codes, scales in (each.tensors for each in (*store.key_parts, *store.value_parts)):
            if fault == "scales":
                scales.mul_(1.05)
                continue
            by = torch.randint(-3, 4, codes.shape) if fault == "noise" else 15 * (torch.arange(codes.shape[-1]) == 3)
            codes.copy_((codes.int() + by).clamp(-127, 127))
        assert engine.audit(blocks=40).differ > 0


WIDTHS = {"auto": 6144, "float16": 3072, "int8": 1584}  # bytes of a token of the bundled model


def test_sizes_and_names_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "radixkv"):
        found = {}
        for kv_dtype in ("auto", *FORMATS):
            with Engine.load("tiny", kv_memory="1MB", kv_dtype=kv_dtype, monitor=False) as engine:
                stats = engine.stats()
                found[kv_dtype] = stats.cache.num_blocks
                assert stats.kv_dtype == engine.config.kv_dtype == kv_dtype
                assert stats.kv_bytes == found[kv_dtype] * engine.core.runner.store.bytes_per_block
    assert found == {name: 1_000_000 // (16 * width) for name, width in WIDTHS.items()}
    assert [each for each in caplog.messages if "a hit may change an answer" in each] == [
        f"tiny: with kv_dtype={name!r} a hit may change an answer, as KV computed in other chunks may round otherwise; "
        "deterministic=True prevents that"
        for name in FORMATS
    ]
