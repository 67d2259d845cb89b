"""Files that are quantised tensor by tensor give the model that is loaded in float32 and then quantised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, checkpoint, loader, safetensors_files
from radixkv.models.quantized import kernels
from radixkv.models.quantized.kernels import Format
from radixkv.models.quantized.layers import QuantizedEmbedding, QuantizedLinear, quantize, quantized_weights
from radixkv.sizing.kv_size import size_text
from tests.models.gguf_files import CONFIGS, SIZES, made
from tests.selection import mostly_long

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
IDS = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(3))


def read(folder: Path, weights: str) -> Any:
    options: dict[str, Any] = {"device": torch.device("cpu"), "revision": None, "trust_remote_code": False}
    return loader.read(str(folder), dtype=torch.float32, weights=weights, **options)[0]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Load a folder tensor by tensor, and in float32 that is then quantised."""

    def load(folder: Path, weights: str) -> tuple[Any, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(loader, "_read_model", lambda *_: pytest.fail("loaded in float32"))
            found = read(folder, weights)
        expected = read(folder, "float32")
        quantize(expected, weights)
        return found, expected

    return load


@torch.no_grad()
def assert_equal(found: Any, expected: Any) -> None:
    modules = dict(found.named_modules())
    assert list(modules) == [name for name, _ in expected.named_modules()]
    for name, module in expected.named_modules():
        assert type(modules[name]) is type(module), name
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            assert modules[name].quantized.format == module.quantized.format, name
            assert torch.equal(modules[name].quantized.dense(), module.quantized.dense()), name
    assert {name: value.shape for name, value in found.named_parameters()} == {
        name: value.shape for name, value in expected.named_parameters()
    }
    assert len(quantized_weights(found)) == len(quantized_weights(expected)) > 0
    assert torch.equal(found(IDS).logits, expected(IDS).logits)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert not hasattr(found, "hf_quantizer")


@pytest.mark.parametrize(
    "family", mostly_long(sorted(CONFIGS), "llama, tied", "llama, biases", "gemma3", "qwen3_moe", "phi3")
)
def test_the_model_is_the_same(tmp_path: Path, family: str, both: Callable[..., tuple[Any, Any]]) -> None:
    made(CONFIGS[family]()).save_pretrained(tmp_path)
    assert_equal(*both(tmp_path, "int4"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_shards(tmp_path: Path, dtype: torch.dtype, both: Callable[..., tuple[Any, Any]]) -> None:
    made(CONFIGS["llama"]()).to(dtype).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    assert_equal(*both(tmp_path, "int8"))


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_in_the_files_of_a_tied_model(tmp_path: Path, equal: bool, both: Callable[..., tuple[Any, Any]]) -> None:
    """It is the embedding only if their weights are equal."""
    made(CONFIGS["llama, tied"]()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found, expected = both(tmp_path, "int8")
    assert_equal(found, expected)
    assert (found.lm_head.quantized is found.model.embed_tokens.quantized) is equal


def test_only_what_stays_and_one_tensor_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 12})).save_pretrained(tmp_path)
    dense = sum(each.numel() for each in load_file(tmp_path / "model.safetensors").values()) * 4
    [most] = {value.nbytes for name, value in load_file(tmp_path / "model.safetensors").items() if "lm_head" in name}
    small = sum(each.nbytes for each in quantized_weights(read(tmp_path, "int4")))
    norms = (2 * 12 + 1) * 64 * 4
    assert small + norms + most < dense / 3
    monkeypatch.setattr(loader, "free_memory", lambda: small + norms + most)
    assert adapter.load(tmp_path, weights="int4").model is not None
    monkeypatch.setattr(loader, "free_memory", lambda: small + norms + most - 1)
    with pytest.raises(InvalidInput, match=f"take {size_text(small + norms + most)} as int4, and .* free on cpu$"):
        adapter.load(tmp_path, weights="int4")


def test_threads_of_transformers_may_read_tensors_at_once(tmp_path: Path) -> None:
    made(CONFIGS["llama"]()).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    with safetensors_files.file_tensors(checkpoint.examine(tmp_path)) as tensors, ThreadPoolExecutor(4) as pool:
        for name, found in pool.map(lambda name: (name, tensors[name][...]), [*expected] * 40):
            assert torch.equal(found, expected[name]), name


def broken(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    made(CONFIGS["llama"]()).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_files_that_do_not_fit_the_model_are_refused_with_the_same_errors(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    broken(tmp_path, lambda tensors: tensors.update({name: torch.zeros(96, 32)}))
    with pytest.raises(InvalidInput, match=rf"{name} has the shape \[96, 32\] in the files, and .* \[96, 64\]"):
        adapter.load(tmp_path, weights="int8")
    broken(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(UnsupportedModel, match=f"lacks 1 weights, {name} among them"):
        adapter.load(tmp_path, weights="int8")
    broken(tmp_path, lambda tensors: tensors.update({name.replace("weight", "bias"): torch.zeros(96)}))
    with pytest.raises(UnsupportedModel, match=r"has no place for model\.layers\.1\.mlp\.up_proj\.bias"):
        adapter.load(tmp_path, weights="int8")


def test_files_that_cannot_be_read_so_are_loaded_in_float32_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(CONFIGS["llama"]()).save_pretrained(tmp_path)
    monkeypatch.setattr(safetensors_files, "DTYPES", {})
    loaded = adapter.load(tmp_path, weights="int8")
    assert {each.format for each in quantized_weights(loaded.model)} == {Format.INT8}
