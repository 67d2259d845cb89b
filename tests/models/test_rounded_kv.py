"""Models over KV of 16 and 8 bits: the logits of a forward whose keys and values are rounded alike, and refusals."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv import Engine, EngineConfig, SamplingParams
from radixkv.attention.kv_formats import Int8
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, compiled_attention, rounded_kv
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.quantized.kernels import kernels
from radixkv.models.rounded_kv import format_test, rounded_logits
from radixkv.models.rounding import relative_error
from radixkv.models.runner import Runner
from radixkv.models.selftest import self_test
from tests.models.conftest import FAMILIES, GROUPED, SIZES, make
from tests.models.recurrent.hybrids import Steps, hybrid
from tests.models.step_runner import StepRunner, own_logits, prompts, random_steps

FORMATS = ["float16", "int8"]
exact = importlib.import_module("model_parts.exact").exact


def wide(family: str) -> Any:
    """The family with heads of 16 numbers, of which int8 takes multiples."""
    config = FAMILIES[family]()
    config.hidden_size, config.head_dim = 64, 16
    return config


def gemma3n() -> Any:
    """The last two layers read the KV of the layers before them."""
    return transformers.Gemma3nTextConfig(
        **{**GROUPED, "num_hidden_layers": 4, "intermediate_size": 48}, head_dim=16, num_kv_shared_layers=2,
        sliding_window=20, vocab_size_per_layer_input=97, hidden_size_per_layer_input=16, laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip


def gemma4() -> Any:
    """Heads of the layers that see everything are wider."""
    return transformers.Gemma4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, global_head_dim=48, sliding_window=20,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=97, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def deepseek_v3() -> Any:
    """Keys of 48 numbers, values of 32."""
    return transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, first_k_dense_replace=2, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip


def gpt_oss() -> Any:
    """Sinks, and windows in every second layer."""
    return transformers.GptOssConfig(
        **GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=21,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


SPECIAL = {each.__name__: each for each in (gemma3n, gemma4, deepseek_v3, gpt_oss)}
CONFIGS: dict[str, Callable[[], Any]] = {name: (lambda name=name: wide(name)) for name in FAMILIES} | SPECIAL
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
def test_a_chunk_attends_to_its_own_tokens_as_they_are_stored(kv_dtype: str) -> None:
    """Else a hit, which reads them from the pool, would differ from a cold run."""
    runner = Runner(adapter.load(make(wide("llama"), torch.float64), kv_dtype=kv_dtype, attention="torch"), 8, 4)
    tokens, table = np.arange(5, 25, dtype=np.int32), np.arange(5, dtype=np.int32)
    whole = runner.run([SequenceInput(tokens, 0, np.arange(20), table)])
    for start, end in ((0, 7), (7, 19), (19, 20)):
        last = runner.run([SequenceInput(tokens[start:end], start, np.arange(start, end), table[: -(-end // 4)])])
    torch.testing.assert_close(last, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_fallback_reads_keys_without_their_rotation(kv_dtype: str) -> None:
    """Else it would multiply rotated keys by queries that are not."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    loaded = adapter.load(make(config, torch.float64), kv_dtype=kv_dtype)
    assert loaded.attention == "fallback"
    runner, table = Runner(loaded, 8, 4), np.arange(5, dtype=np.int32)
    tokens = np.arange(5, 25, dtype=np.int32)
    for start, end in ((0, 7), (7, 19), (19, 20)):
        last = runner.run([SequenceInput(tokens[start:end], start, np.arange(start, end), table[: -(-end // 4)])])
    own = own_logits(loaded, tokens.tolist())
    assert 1e-9 < relative_error(last[0], own) < 2e-2


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


def test_scales_that_are_lost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Int8.encode

    def without(self: Int8, new: torch.Tensor) -> Any:
        codes, scale = encode(self, new)
        return codes, torch.ones_like(scale)

    loaded = adapter.load(make(wide("llama")), attention="torch", kv_dtype="int8")
    own = rounded_logits
    monkeypatch.setattr(rounded_kv, "rounded_logits", with_codec(own, encode))
    monkeypatch.setattr(Int8, "encode", without)
    with pytest.raises(UnsupportedModel, match="int8 KV"):
        format_test(loaded)


def with_codec(own: Any, encode: Any) -> Any:
    """Let the own forward round by `encode` while the store does otherwise."""

    def logits(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Int8, "encode", encode)
            return own(*given)

    return logits


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


def test_a_load_reports_the_larger_of_both_errors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "radixkv"):
        loaded = adapter.load(make(wide("llama"), torch.float64), kv_dtype="int8", attention="torch")
    [said] = [each for each in caplog.messages if "self-test error" in each]
    errors = self_test(loaded), format_test(loaded)
    assert errors[0] != errors[1]
    assert f"self-test error {max(errors):.1e}, KV in int8" in said


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


def test_a_setting_is_checked_before_the_model_is_read() -> None:
    with pytest.raises(InvalidInput, match="kv_dtype='int4': allowed are 'auto', 'float16', 'int8'"):
        EngineConfig(kv_dtype="int4")
    with pytest.raises(InvalidInput, match="kv_dtype='int4'"):
        adapter.load("/no/such/folder", kv_dtype="int4")


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


@pytest.mark.parametrize("kv_dtype", [pytest.param("float16", marks=pytest.mark.long), "int8"])
@pytest.mark.parametrize("num_blocks", [30, pytest.param(200, marks=pytest.mark.long)])
def test_options_of_requests_give_the_answers_of_an_engine_without_a_cache(kv_dtype: str, num_blocks: int) -> None:
    """Streams that fork, beams, constraints, scores and shared runs, with hits at a full pool and with room."""
    options: dict[str, Any] = {"block_size": 4, "deterministic": True, "prefill_chunk": 8, "max_sequences": 4}
    asked = [
        GREEDY.but(n=2),
        GREEDY.but(beam_width=2, logprobs=None),
        GREEDY.but(choice=["yes", "no"], ignore_eos=False),
        GREEDY.but(prompt_logprobs=1),
    ]
    texts = prompts(random.Random(4), 4)
    answers = []
    for prefix_cache in (True, False):
        size = {"num_blocks": num_blocks if prefix_cache else 200, "prefix_cache": prefix_cache}
        with Engine.load("tiny", monitor=False, kv_dtype=kv_dtype, **options, **size) as engine:
            found = []
            for params in asked * 2:
                replies = [engine.generate([text], params)[0] for text in texts]
                found.append([(each.token_ids, [other.token_ids for other in each.alternatives]) for each in replies])
            answers.append(found)
            engine.client.thread.ask(engine.core.cache.check)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_an_audit_finds_a_wrong_token(kv_dtype: str) -> None:
    with Engine.load("tiny", num_blocks=80, block_size=4, monitor=False, kv_dtype=kv_dtype) as engine:
        for text in prompts(random.Random(8), 4):
            engine.generate([text], GREEDY)
        assert engine.audit(blocks=40).differ == 0
        store = engine.core.runner.store
        for layer, shape in enumerate(store.layers):
            slots = torch.arange(0, store.num_blocks * 4, 3)
            other = (torch.randn(shape.kv_heads, len(slots), dim) for dim in (shape.key_dim, shape.value_dim))
            store.write(layer, slots, *other)
        assert engine.audit(blocks=4).differ > 0


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
