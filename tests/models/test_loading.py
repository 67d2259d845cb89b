"""Names, folders, devices and dtypes, and the properties of a loaded model; its files are in checkpoints/."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radixkv.errors import InvalidInput
from radixkv.models import adapter
from radixkv.models.runner import Runner


@pytest.fixture
def folder(tmp_path: Path, build: Callable[..., Any]) -> Path:
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_folder_loads_in_float32_on_a_cpu(folder: Path) -> None:
    loaded = adapter.load(str(folder))
    assert (loaded.dtype, loaded.device, loaded.tokenizer) == (torch.float32, torch.device("cpu"), None)
    assert (loaded.max_length, loaded.vocab_size, loaded.stop_token_ids) == (256, 97, frozenset({2}))
    assert loaded.name == str(folder)
    assert Runner(loaded, 4).store.dtype == torch.float32


def test_a_built_model_keeps_its_dtype(build: Callable[..., Any]) -> None:
    loaded = adapter.load(build("llama", torch.float64))
    assert loaded.dtype == torch.float64
    assert loaded.name == "LlamaForCausalLM"


def test_key_and_value_dims_may_differ_from_the_configuration(build: Callable[..., Any]) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    layers = adapter.load(build(config)).layers
    assert {(layer.key_dim, layer.value_dim) for layer in layers} == {(16, 12)}


def test_sinks_are_probed(build: Callable[..., Any]) -> None:
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=21,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    layers = adapter.load(build(config)).layers
    assert [(layer.sinks, layer.window) for layer in layers] == [(True, 21), (True, None)]


def test_stop_ids_beyond_the_vocabulary_are_left_out(build: Callable[..., Any]) -> None:
    model = build("llama")
    model.generation_config.eos_token_id = [2, 7, 4000]
    assert adapter.load(model).stop_token_ids == {2, 7}


def test_a_model_in_use_cannot_be_run_by_others(build: Callable[..., Any]) -> None:
    model = adapter.load(build("llama"), model_code="transformers").model
    with pytest.raises(RuntimeError, match="run it through radixkv"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_weights_that_change_below_another_engine_are_said(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    first = adapter.load(model)
    again = adapter.load(model)
    assert not caplog.records
    adapter.load(model, dtype="bfloat16")
    assert again.model.dtype == first.model.dtype == torch.bfloat16
    [said] = [each.getMessage() for each in caplog.records]
    assert "loaded it as torch.float32 on cpu runs with other weights from now on: load a copy for torch.bf" in said
    caplog.clear()
    del first, again
    gc.collect()
    adapter.load(model, dtype="float32")
    assert not caplog.records  # the model is no longer used


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/no-such-model"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match="there is no model folder"):
        adapter.load(name)


def test_a_revision_of_a_folder_is_not_dropped_without_a_word(folder: Path) -> None:
    for name in (str(folder), "tiny"):
        with pytest.raises(InvalidInput, match=r"revision='v2' is for models on the hub, and .* is here"):
            adapter.load(name, revision="v2")


def test_a_model_without_its_weights_is_refused(build: Callable[..., Any]) -> None:
    model = build("llama").to("meta")
    with pytest.raises(InvalidInput, match="LlamaForCausalLM lies on the meta device, without weights; load them"):
        adapter.load(model)


def test_devices_and_dtypes_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match="no CUDA device"):
        adapter.load(str(folder), device="cuda")
    with pytest.raises(InvalidInput, match="'int8' is no dtype"):
        adapter.load(str(folder), dtype="int8")
    assert adapter.load(str(folder), device="auto").device.type == "cpu"
