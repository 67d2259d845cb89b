"""The configuration of a model from the metadata of its GGUF file, and the metadata that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.architectures import ARCHITECTURES, config_of, float_dtype
from radixkv.gguf.header import GGUFHeader, GGUFTensor
from radixkv.gguf.placements import placements

SIZES = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
}

EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def header(
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    path: Path = Path("model.gguf"),
    kind: str = "Q4_0",
    **metadata: Any,
) -> GGUFHeader:
    """A header with these keys of the architecture and these tensors; a key with the value None is left out."""
    stated = {**SIZES, **(keys or {})}
    return GGUFHeader(
        path,
        {
            "general.architecture": architecture,
            **{f"{architecture}.{key}": value for key, value in stated.items() if value is not None},
            **metadata,
        },
        {
            name: GGUFTensor(name, shape, 0 if name.startswith("rope") else 2, kind, path, 0, 4)
            for name, shape in {
                "token_embd.weight": (97, 64),
                **{f"t{i}": (1,) for i in range(5)},
                **(tensors or {}),
            }.items()
        },
    )


def test_gemma2_has_its_published_softcaps_where_the_file_has_none() -> None:
    config = config_of(header("gemma2"))
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    stated = config_of(header("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 0.0}))
    assert (stated["attn_logit_softcapping"], stated["final_logit_softcapping"]) == (20.0, None)


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match="architecture 'qwen35', only ") as refused:
        config_of(header("qwen35"))
    assert all(each in str(refused.value) for each in ARCHITECTURES)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"phi3"}))
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"attention.scale2": 0.5}, r"attention\.scale2 is 0\.5"),
        ({"rope.dimension_count": 8}, "rotate 8 of the 16 numbers"),
        ({"attention.value_length": 8}, "keys have 16 numbers a head, values have 8"),
        ({"rope.scaling.type": "longrope"}, "scaled by 'longrope'"),
        ({"rope.scaling.attn_factor": 1.2}, r"attn_factor is 1\.2"),
        ({"rope.dimension_sections": [8, 8, 0, 0]}, "dimension_sections"),
        ({"attention.causal": False}, "causal is False"),
        ({"attention.head_count_kv": [2, 2, 2, 2, 2, 1]}, "differs between layers"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
    ],
)
def test_keys_that_would_change_the_answers_are_refused(architecture: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        config_of(header(architecture, {**(EXPERTS if architecture == "qwen3moe" else {}), **keys}))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"attention.head_count": None}, r"no llama\.attention\.head_count"),
        ({"attention.head_count": 0}, "head_count is 0"),
        ({"feed_forward_length": 2**63}, "feed_forward_length is 9223372036854775808"),
        ({"attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads evenly"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"rope.freq_base": 1e300, "rope.scaling.factor": float("inf")}, "factor is inf"),
        ({"block_count": 10**9}, "1,000,000,000 layers in 6 tensors"),
        ({"attention.sliding_window": -1}, "sliding_window is -1"),
        ({"rope.dimension_count": 2**30}, "dimension_count is 1,073,741,824, of 16 numbers"),
        ({"embedding_length": 128}, "embedding_length is 128"),
        ({"context_length": "long"}, "'long', where int is expected"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    ],
)
def test_broken_metadata_is_invalid_input(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        config_of(header(keys=keys))


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(InvalidInput, match="5 of 4 experts run for each token"):
        config_of(header("qwen3moe", {"expert_count": 4, "expert_used_count": 5}))


def test_a_longrope_of_one_token_is_invalid_input() -> None:
    keys = {"attention.sliding_window": 0, "rope.scaling.original_context_length": 1}
    with pytest.raises(InvalidInput, match="original_context_length is 1"):
        config_of(header("phi3", keys, {"rope_factors_long.weight": (8,)}))


def test_keys_without_effect_are_ignored() -> None:
    plain = config_of(header())
    keys = {"vocab_size": 32000, "expert_count": 0, "rope.scaling.factor": 1.0, "attention.causal": True}
    assert config_of(header(keys=keys, **{"general.name": "Model", "tokenizer.ggml.model": "gpt2"})) == plain


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_scaling_of_rotary_frequencies(architecture: str, keys: dict[str, Any], scaling: dict[str, Any]) -> None:
    found = config_of(header(architecture, {"rope.freq_base": 500_000.0, **keys}))
    assert found["rope_parameters"] == {"rope_theta": 500_000.0, **scaling}


def test_window_of_an_old_mistral() -> None:
    found = config_of(header(keys={"attention.sliding_window": 1024}))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 1024)
    assert config_of(header(keys={"attention.sliding_window": 4096}))["model_type"] == "llama"  # as long as the context


def test_gemma3_alternates_windows_and_scales_attention_by_size() -> None:
    keys = {"attention.sliding_window": 512, "attention.key_length": 32, "attention.value_length": 32}
    found = config_of(
        header("gemma3", {**keys, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    )
    assert found["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert found["query_pre_attn_scalar"] == 32 and found["sliding_window"] == 512
    assert found["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    large = {"block_count": 62, "embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
    tensors = {"token_embd.weight": (97, 5376), **{f"blk.{i}.attn_norm.weight": (5376,) for i in range(62)}}
    found = config_of(header("gemma3", {**keys, **large, "attention.value_length": 128}, tensors))
    assert found["query_pre_attn_scalar"] == 168  # of Gemma 3 27B
    assert set(config_of(header("gemma3"))["layer_types"]) == {"full_attention"}


def test_first_files_of_phi3_have_a_window_without_its_key() -> None:
    assert config_of(header("phi3", {"context_length": 4096}))["sliding_window"] == 2047
    assert config_of(header("phi3", {"context_length": 4096, "attention.sliding_window": 0}))["sliding_window"] is None
    with pytest.raises(UnsupportedModel, match="sliding_window is missing"):
        config_of(header("phi3", {"context_length": 8192}))


@pytest.mark.parametrize(
    ("base", "factor", "head_dim"), [(500_000.0, 8.0, 128), (500_000.0, 32.0, 64), (10_000.0, 8.0, 16)]
)
def test_factors_of_llama3_become_its_parameters(tmp_path: Path, base: float, factor: float, head_dim: int) -> None:
    frequencies = base ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = 2 * np.pi / frequencies
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    path = tmp_path / "model.gguf"
    (1 / ((1 - smooth) / factor + smooth)).astype("<f4").tofile(path)
    keys = {"rope.freq_base": base, "attention.key_length": head_dim, "attention.value_length": head_dim}
    tensors = {"rope_freqs.weight": (head_dim // 2,)}
    found = config_of(header(keys=keys, tensors=tensors, path=path, kind="F32"))["rope_parameters"]
    expected = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    assert found == expected
    np.full(head_dim // 2, 1.0, "<f4").tofile(path)
    assert (
        config_of(header(keys=keys, tensors=tensors, path=path, kind="F32"))["rope_parameters"]["rope_type"]
        == "default"
    )
    np.linspace(1, 7, head_dim // 2, dtype="<f4").tofile(path)
    with pytest.raises(UnsupportedModel, match="that Llama 3 does not have"):
        config_of(header(keys=keys, tensors=tensors, path=path, kind="F32"))
    np.full(head_dim // 2, np.nan, "<f4").tofile(path)
    with pytest.raises(InvalidInput, match="no factors"):
        config_of(header(keys=keys, tensors=tensors, path=path, kind="F32"))


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_sinks.weight", "blk.01.attn_q.weight"]
)
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    given = header("qwen2", tensors={name: (8,)})
    for extra in range(5):
        del given.tensors[f"t{extra}"]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match=f"no place for {name},"):
        placements(given, {"head_dim": 16})


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [(["F32"], "float32"), (["F16", "F32"], "float16"), (["BF16"], "bfloat16"), (["Q4_K", "Q6_K", "F32"], "bfloat16"),
     (["F16", "BF16"], "bfloat16"), (["F16", "Q8_0"], "bfloat16")],
)  # fmt: skip
def test_dtype_of_the_floats_in_a_file(kinds: list[str], dtype: str) -> None:
    tensors = {kind: GGUFTensor(kind, (2, 2), 0, kind, Path(), 0, 0) for kind in kinds}
    norm = {"norm": GGUFTensor("norm", (2,), 0, "F32", Path(), 0, 0)}
    assert float_dtype(GGUFHeader(Path(), {}, tensors | norm)) == dtype
