"""The bytes per token equal those that the attention of a model writes; the capacity follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from radixkv import Engine
from radixkv.cli import main
from radixkv.cli.plan import Plan
from radixkv.errors import InvalidInput
from radixkv.models.attention_interface import IMPLEMENTATION, select
from radixkv.models.probe import probe
from radixkv.models.recurrent.mixers import install
from radixkv.sizing.kv_shapes import _DEFAULTS, kv_shape
from radixkv.sizing.kv_size import KVShape, LayerKV
from tests.models.recurrent.hybrids import HYBRIDS, hybrid

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 21}
GEMMA4: dict[str, Any] = {  # its full layers have heads of their own
    **SMALL,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 21,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
SHARED: dict[str, Any] = {  # the last two layers have no KV of their own
    **SMALL,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
CONFIGS: dict[str, Any] = {
    "jetmoe": lambda: transformers.JetMoeConfig(
        **SMALL, num_key_value_heads=2, kv_channels=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama, grouped": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=24),
    "diffllama": lambda: transformers.DiffLlamaConfig(**SMALL, num_key_value_heads=2),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **SHARED, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4, shared": lambda: transformers.Gemma4TextConfig(**SHARED, global_head_dim=40),
    "gpt-oss": lambda: transformers.GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=16, **MIXED, **EXPERTS),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**SMALL, num_key_value_heads=4, **LATENT),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=128),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=128
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, word_embed_proj_dim=32
    ),
}


def written(folder: Path, **fields: Any) -> str:
    """A config.json with a decoder's four fields, and these."""
    decoder = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 512}
    path = folder / "config.json"
    path.write_text(json.dumps({**decoder, "dtype": "bfloat16", **fields}))
    return str(path)


def kinds(shape: KVShape) -> list[tuple[int, int, int]]:
    return [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in shape.layers]


def stored(model: Any) -> list[tuple[int, int, int]]:
    """The layers that an attention over the pool stores, as `kinds` lists them."""
    layers = [layer for layer in probe(model).layers if layer.source is None]
    return [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers]


# ---- shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_says_what_the_model_writes(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    select(model, IMPLEMENTATION)
    config.save_pretrained(tmp_path)
    assert kinds(kv_shape(str(tmp_path))) == stored(model)


HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4, "dtype": "bfloat16",
    "max_position_embeddings": 262_144,
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in HYBRIDS if kind not in ("mamba2", "zaya")])
def test_the_file_of_a_hybrid_model_says_what_its_layers_keep(kind: str, tmp_path: Path) -> None:
    model = hybrid(kind)
    install(model)
    select(model, IMPLEMENTATION)
    found = probe(model)
    model.config.save_pretrained(tmp_path)
    shape = kv_shape(str(tmp_path))
    assert kinds(shape) == [(each.kv_heads, each.key_dim, each.value_dim) for each in found.layers]
    assert shape.bytes_per_state("float32") == sum(spec.num_bytes for spec in found.state)


@pytest.mark.parametrize(
    ("fields", "attending"),
    [
        ({}, 8),
        ({"model_type": "lfm2", "full_attn_idxs": [2, 5]}, 2),
        ({"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_state": 64}, 1),
        ({"model_type": "falcon_h1", "mamba_n_heads": 16, "mamba_d_state": 64, "mamba_d_head": "auto"}, 32),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E" + "-" * 27, "mamba_num_heads": 8,
          "mamba_head_dim": 64, "ssm_state_size": 128}, 1),
        ({"model_type": "kimi_linear",
          "linear_attn_config": {"kda_layers": [1, 2], "num_heads": 4, "head_dim": 64}}, 30),
    ],
)  # fmt: skip
def test_hybrid_files_may_state_their_layers_in_many_ways(
    fields: dict[str, Any], attending: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID, **fields}))
    shape = kv_shape(str(tmp_path))
    assert len(shape.layers) == attending
    assert shape.bytes_per_state() > 0


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command; return its output, or the error of a status 2."""

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["plan", *arguments]) == status
        said = capsys.readouterr()
        assert (said.out == "", said.err.count("\n")) == (status > 0, status > 0)
        return said.err if status else said.out

    return run


@pytest.fixture
def planned(plan: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: json.loads(plan(*arguments, "--json"))


@pytest.fixture
def of_states(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    return str(tmp_path)


def test_a_plan_counts_states(of_states: str, plan: Any, planned: Any) -> None:
    found = planned(of_states, "--memory", "4GiB")
    assert (found["bytes_per_token"], found["bytes_per_state"]) == (32_768, 51_904_512)
    fits = found["rank"]["fits"]
    assert (fits["state_rows"], fits["state_snapshots"]) == (13, 14)
    assert fits["blocks"] == (4 * 2**30 - 27 * 51_904_512) // (16 * 32_768)
    text = plan(of_states, "--memory", "4GiB")
    assert "49.5 MiB in 24 layers, as much as the KV of 1,584 tokens" in text
    assert "13 sequences at once, 14 snapshots" in text
    assert "holds 1 states, and two are needed" in plan(of_states, "--memory", "200MiB", status=2)
    assert "give --memory too" in plan(of_states, "--state-memory", "1GB", status=2)
    assert planned(of_states, "--host-memory", "1GB")["rank"]["host"]["state_snapshots"] > 0
    assert "this model has recurrent state" in plan(of_states, "--disk-memory", "1GB", status=2)


def test_a_plan_counts_past_text_as_an_engine_does(plan: Any, planned: Any) -> None:
    tree = ("tiny", "--speculate", "tree")
    assert "note: the past text of drafts takes 28 MiB of host memory in addition" in plan(*tree)
    with Engine.load("tiny", num_blocks=4, speculate="tree", monitor=False) as engine:
        assert planned(*tree)["past_text_bytes"] == engine.core.cache.past_text.nbytes
    assert "speculate='trie': allowed are 'ngram', 'tree', None" in plan("tiny", "--speculate", "trie", status=2)


def test_a_plan_counts_a_disk_and_its_host_memory_as_an_engine_does(tmp_path: Path, plan: Any, planned: Any) -> None:
    found = planned("tiny", "--dtype", "float32", "--memory", "24MiB", "--disk-memory", "1GiB")
    disk = {"disk_cache": tmp_path / "disk", "disk_memory": "1GiB"}
    with Engine.load("tiny", kv_memory="24MiB", monitor=False, **disk) as engine:
        stats = engine.stats()
    assert found["rank"]["host"]["blocks"] == stats.cache.host_blocks == 128
    assert found["rank"]["disk"] == {"blocks": stats.disk.slots, "tokens": 16 * stats.disk.slots}
    assert found["notes"][-1].endswith("an engine with a disk takes half of its pool up to 256 MiB, or an eighth")
    told = plan(*SEVENTY, "--memory", "8GiB", "--host-memory", "64GiB", "--disk-memory", "1TiB")
    assert re.search(r"  host memory of 64 GiB, each of 2 ranks +26,214 more blocks", told)
    assert re.search(r"  disk of 1 TiB, each of 2 ranks +[\d,]+ blocks, [\d,]+ tokens\n", told)
    assert "one block of this model takes 48 KiB; give at least" in plan("tiny", "--host-memory", "90kB", status=2)
    assert "has room for 20 blocks, and 64 are the least" in plan("tiny", "--disk-memory", "1MB", status=2)


@pytest.mark.parametrize("family", _DEFAULTS)
def test_what_goes_unsaid_is_what_transformers_fills_in(family: str) -> None:
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    said = {name: value for name, value in _DEFAULTS[family].items() if name != "global_head_dim"}
    assert said == {name: getattr(kind, name) for name in said}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"num_key_value_heads": [8, 4, 2, 1]}, [(8, 8, 8), (4, 8, 8), (2, 8, 8), (1, 8, 8)]),
        ({"per_layer_config": {"01": {"head_dim": 32}}}, [(8, 8, 8), (8, 32, 32), (8, 8, 8), (8, 8, 8)]),
        ({"attn_config": {"kv_n_heads": 2}}, [(2, 8, 8)] * 4),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, [(2, 8, 8)] * 4),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "swa_num_key_value_heads": 4,
                "swa_head_dim": 6,
            },
            [(8, 8, 8), (4, 6, 6)] * 2,
        ),
        (
            {
                "block_configs": [
                    {"attention": {"n_heads_in_group": 4}},
                    {"attention": {"no_op": True}},
                    {"attention": {"n_heads_in_group": 8}},
                    {"attention": {"replace_with_linear": True}},
                ]
            },
            [(2, 8, 8), (1, 8, 8)],
        ),
    ],
)
def test_layers_may_differ(fields: dict[str, Any], layers: list[tuple[int, int, int]], tmp_path: Path) -> None:
    assert kinds(kv_shape(written(tmp_path, **fields))) == layers


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"sliding_window": 128}, "4 of 4 layers see a window of 128 tokens, but keep all KV"),
        ({"sliding_window": 128, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        (
            {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "attention_chunk_size": 64},
            "3 of 4 layers see a",
        ),
        ({"kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}, "takes 8.0 times"),
        ({"num_kv_shared_layers": 2}, "2 more layers, the last ones, read the KV of earlier layers"),
    ],
)
def test_what_a_reader_may_not_expect_is_said(fields: dict[str, Any], note: str | None, tmp_path: Path) -> None:
    notes = kv_shape(written(tmp_path, **fields)).notes
    assert (len(notes), note is None or note in notes[0]) == (note is not None, True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"hidden_size": 10**400}, "below 2**31"),
        ({"num_attention_heads": 65}, "65 heads share 64 numbers"),
        ({"num_key_value_heads": 3}, "8 heads cannot share 3"),
        ({"kv_lora_rank": 16}, "no qk_nope_head_dim"),
        ({"dtype": "int3"}, "int3"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["ViTForImageClassification"]}, "ViTForImageClassification is no decoder"),
        ({"model_type": "rwkv"}, "rwkv: it keeps something else"),
        ({"mamba_d_state": 16}, "mamba_d_state: it keeps something else"),
        ({"text_config": {"linear_num_key_heads": 4}}, "linear_num_key_heads"),
        ({"cross_attention_layers": [1]}, "another model's output"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "type linear_attention"),
        ({"layer_types": ["full_attention"]}, "not one of 4 layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, not a number below its 4 layers"),
        ({"block_configs": [{"attention": {"no_op": True}}] * 4}, "none of its layers"),
    ],
)
def test_what_is_no_decoder_is_refused_with_the_reason(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="states no KV shape") as refused:
        kv_shape(written(tmp_path, **fields))
    assert why in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff"])
def test_what_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidInput, match="states no KV shape"):
        kv_shape(str(tmp_path))


FIELDS = st.sampled_from(
    [
        "text_config",
        "architectures",
        "model_type",
        "layer_types",
        "per_layer_config",
        "block_configs",
        "attn_config",
        "num_key_value_heads",
        "head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "sliding_window",
        "multi_query",
        "dtype",
        "hidden_size",
        "num_hidden_layers",
        "num_kv_shared_layers",
        "swa_head_dim",
        "max_position_embeddings",
        "attention_k_eq_v",
        "global_head_dim",
        "full_attention_interval",
        "linear_attn_config",
        "attn_layer_indices",
        "full_attn_idxs",
        "hybrid_override_pattern",
        "linear_num_key_heads",
        "mamba_d_state",
        "mamba_n_heads",
        "conv_L_cache",
    ]
)
NAMES = ["0", "full_attention", "conv", "gemma2", "qwen3_5_text", "kimi_linear", "bamba", "lfm2", "nemotron_h"]
LEAVES = st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(NAMES)
PARTS = st.dictionaries(FIELDS | st.sampled_from(["0", "attention"]), LEAVES, max_size=3)
VALUES = LEAVES | PARTS | st.lists(LEAVES | PARTS, max_size=4) | st.dictionaries(st.sampled_from(["0", "01"]), PARTS)


@given(st.dictionaries(FIELDS, VALUES, max_size=6))
def test_whatever_a_file_holds_it_is_a_shape_or_refused(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    path = written(tmp_path_factory.getbasetemp(), **fields)
    try:
        shape = kv_shape(path)
    except InvalidInput:
        return
    assert shape.bytes_per_token() > 0


def test_names_and_folders_without_a_config(tmp_path: Path) -> None:
    assert kv_shape("meta-llama/Meta-Llama-3.1-8B-Instruct") == kv_shape("llama-3.1-8b")
    with pytest.raises(InvalidInput, match=r"none of tiny, llama-3\.1-8b"):
        kv_shape("llama-9")
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        kv_shape(str(tmp_path))


# ---- arithmetic

LAYERS = st.lists(
    st.builds(LayerKV, st.integers(1, 16), st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=4
).map(tuple)


@given(LAYERS, st.integers(1, 20), st.sampled_from(["float32", "bfloat16"]))
def test_ranks_hold_everything_between_them(layers: tuple[LayerKV, ...], ranks: int, dtype: str) -> None:
    shape = KVShape("any", layers)
    whole, rank = shape.bytes_per_token(dtype), shape.bytes_per_token(dtype, ranks)
    assert whole <= rank * ranks
    even = all(layer.kv_heads % ranks == 0 for layer in layers)
    assert (rank * ranks == whole) == even
    assert rank >= sum(layer.key_dim + layer.value_dim for layer in layers) * (4 if dtype == "float32" else 2)


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(1, 2000))
def test_what_fits_and_what_is_empty_by_counting(context: int, block_size: int, blocks: int) -> None:
    shape = KVShape("any", (LayerKV(1, 3, 4),))
    plan = Plan(shape, "bfloat16", context, block_size, 1, memory=blocks * block_size * 14 + 13)
    assert plan.blocks == blocks
    for each in plan.lengths():
        tables = 0
        while (tables + 1) * len(range(0, each.tokens, block_size)) <= blocks:
            tables += 1
        assert each.paged_sequences == tables
        assert each.contiguous_sequences * context * 14 <= plan.memory < (each.contiguous_sequences + 1) * context * 14
        same = [n for n in range(1, each.tokens + 1) if -(-n // block_size) == -(-each.tokens // block_size)]
        reserved = -(-each.tokens // block_size) * block_size
        assert each.paged_empty == pytest.approx(float(sum(Fraction(reserved - n, reserved) for n in same) / len(same)))
        assert each.contiguous_empty == pytest.approx(
            float(sum(Fraction(context - n, context) for n in same) / len(same))
        )


# ---- the command

SEVENTY = ["llama-3.1-70b", "--dtype", "float16", "--context", "8192", "--tensor-parallel", "2"]


def test_notes_on_ranks_and_context(tmp_path: Path, plan: Any) -> None:
    def notes(*options: str) -> str:
        return str(plan(path, *options)).partition("note:")[2]

    path = written(tmp_path, num_key_value_heads=4)
    assert notes() == notes("--tensor-parallel", "2") == ""
    assert "layer 0 has 4 KV heads, which do not divide by 8 ranks" in notes("--tensor-parallel", "8")
    assert "more than the model's own 512" in notes("--context", "513")
    path = written(tmp_path, dtype=None)
    assert "names no dtype" in notes() and "names no dtype" not in notes("--dtype", "float32")
    path = written(tmp_path, max_position_embeddings=None)
    assert "--context" in plan(path, status=2) and not notes("--context", "100")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--context", "0"], "--context 0"),
        (["--dtype", "int8"], "int8"),
        (["--dtype", "bfloat16", "--kv-dtype", "float16"], "computes in bfloat16"),
        (["--memory", "1kB"], "one block of this model takes 48 KiB"),
    ],
)
def test_wrong_numbers_are_refused(options: list[str], why: str, plan: Any) -> None:
    assert why in plan("tiny", *options, status=2)


def test_a_plan_counts_the_format_of_kv_or_refuses_it(tmp_path: Path, plan: Any, planned: Any) -> None:
    path = written(tmp_path, head_dim=64)
    for name, size in (("auto", 256), ("float16", 128), ("int8", 66)):
        found = planned(path, "--dtype", "float32", "--kv-dtype", name, "--tensor-parallel", "2")
        assert (found["bytes_per_token"], found["rank"]["bytes_per_token"]) == (4 * 8 * 2 * size, 4 * 4 * 2 * size)
    refused = plan(written(tmp_path), "--kv-dtype", "int8", status=2)
    assert "the keys of layer 0 have 8 numbers, no multiple of 16" in refused


def test_a_context_that_does_not_fit_names_the_largest_that_does(plan: Any) -> None:
    contexts = ([], ["--context", "65536"], ["--context", "65537"])
    said = [plan("llama-3.1-8b", "--memory", "8GiB", *context) for context in contexts]
    advice = "tokens fits; --context 65536 is the largest that does"
    assert [advice in each for each in said] == [True, False, True]
    tables = {each.partition("Sequences that share nothing")[2].partition("\n\n")[0].strip() for each in said}
    assert len(tables) == 1 and tables.pop().splitlines()[-1].split() == ["65,536", "1", "0.0%", "1", "0.0%"]


def test_the_page_shows_what_is_printed(plan: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
    assert f"```text\n{plan(*SEVENTY, '--memory', '8GiB')}```" in page
