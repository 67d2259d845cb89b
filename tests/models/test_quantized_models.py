"""Models with weights of 8 or 4 bits give the logits of their dequantised weights, and formats follow the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from radixkv.errors import InvalidInput
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import read_header
from radixkv.models import adapter, gguf_weights, loader
from radixkv.models.gguf_weights import formats, read_model
from radixkv.models.quantized import build, kernels
from radixkv.models.quantized.kernels import Format
from radixkv.models.quantized.layers import QuantizedEmbedding, QuantizedLinear, quantize, quantized_weights
from radixkv.models.rounding import relative_error
from tests.models.gguf_files import CONFIGS, SIZES, made, write
from tests.models.step_runner import in_chunks
from tests.models.test_packed import Reader
from tests.selection import mostly_long

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
IDS = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(3))
PROMPT = IDS[0].tolist()
TOLERANCE = 1e-5  # of the logits' spread: rounding of float32


def small(path: Path, weights: str = "auto") -> Any:
    header = read_header(path)
    return read_model(header, config_of(header), torch.float32, formats(header, weights))


def plain(path: Path) -> Any:
    header = read_header(path)
    return read_model(header, config_of(header), torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits[0]
    return found


def kinds(model: nn.Module) -> dict[str, Format | None]:
    """The format of each linear layer and embedding, None for a plain one."""
    layers = (nn.Linear, nn.Embedding, QuantizedLinear, QuantizedEmbedding)
    found = {name: module for name, module in model.named_modules() if isinstance(module, layers)}
    return {name: getattr(getattr(module, "quantized", None), "format", None) for name, module in found.items()}


# ---- files


@pytest.mark.parametrize("family", mostly_long(sorted(CONFIGS), "llama, tied", "llama, biases", "gemma3", "qwen3_moe"))
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_kept_and_give_the_logits_of_dequantised_weights(tmp_path: Path, family: str, kind: str) -> None:
    path = write(made(CONFIGS[family]()), tmp_path / "model.gguf", kind)
    model, expected = small(path), plain(path)
    assert any(each is not None for each in kinds(model).values())
    assert relative_error(logits(model), logits(expected)) <= TOLERANCE
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            assert torch.equal(module.quantized.dense(), expected.get_submodule(name).weight), name


def test_a_tied_head_shares_the_weights_of_the_embedding(tmp_path: Path) -> None:
    model = small(write(made(CONFIGS["llama, tied"]()), tmp_path / "model.gguf", "Q8_0"))
    assert model.lm_head.quantized is model.model.embed_tokens.quantized
    assert len(quantized_weights(model)) == 1 + 7 * 2
    assert sum(each.numel() for each in model.parameters()) == 5 * 64  # the norms


@pytest.mark.parametrize(
    ("kind", "weights", "inner", "outer"),
    [
        ("F16", "auto", None, None),
        ("F16", "int8", Format.INT8, Format.INT8),
        ("BF16", "int4", Format.INT4_MIN, Format.INT8),
        ("F32", "int4", Format.INT4_MIN, Format.INT8),
        ("Q8_0", "int4", Format.INT8, Format.INT8),
        ("Q4_0", "int8", Format.INT4, Format.INT4),
        ("Q4_1", "auto", Format.INT4_MIN, Format.INT4_MIN),
        ("Q5_1", "auto", Format.INT8, Format.INT8),
        ("Q5_0", "int4", Format.INT8, Format.INT8),
        ("Q4_1", "float32", None, None),
    ],
)
def test_the_format_follows_the_file_and_the_setting(
    tmp_path: Path, kind: str, weights: str, inner: Format | None, outer: Format | None
) -> None:
    found = kinds(small(write(made(CONFIGS["llama"]()), tmp_path / "model.gguf", kind), weights))
    ends = {"model.embed_tokens", "lm_head"}
    assert {found[name] for name in ends} == {outer}
    assert {format for name, format in found.items() if name not in ends} == {inner}


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_other_types_are_rounded_to_8_bits(tmp_path: Path, kind: str) -> None:
    path = write(
        made(transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 256})),
        tmp_path / "a.gguf",
        kind,
    )
    model, expected = small(path), plain(path)
    assert set(kinds(model).values()) == {Format.INT8}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            groups = expected.get_submodule(name).weight.view(-1, 8, 32)
            error = (module.quantized.dense().view(-1, 8, 32) - groups).abs().amax(-1)
            assert (error <= (0.5 / 127 + 2**-11) * groups.abs().amax(-1)).all(), name


def test_the_file_needs_the_memory_of_its_blocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512})
    path = write(made(config), tmp_path / "model.gguf", "Q4_0")
    header = read_header(path)
    stored, dense = gguf_weights.bytes_of(header, formats(header, "auto"), 4), header.bytes_in(4)
    assert stored < dense / 5
    monkeypatch.setattr(loader, "free_memory", lambda: (stored + dense) // 2)
    assert adapter.load(path).model is not None
    with pytest.raises(InvalidInput, match="as float32"):
        adapter.load(path, weights="float32")
    monkeypatch.setattr(loader, "free_memory", lambda: stored - 1)
    with pytest.raises(InvalidInput, match="as float32, and"):  # Q4_0 keeps its blocks, whatever is wanted
        adapter.load(path, weights="int8")


def test_files_of_kept_blocks_need_no_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf", "Q4_1")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    assert small(path) is not None


# ---- models that are quantised when they are loaded


def test_a_model_of_a_caller_stays_as_it_was(build: Callable[..., Any]) -> None:
    model = build(CONFIGS["llama, tied"]())
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    expected = own_logits(model)
    loaded = adapter.load(model, weights="int8")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert torch.equal(own_logits(model), expected)
    assert set(kinds(loaded.model).values()) == {Format.INT8}
    assert relative_error(in_chunks(loaded, PROMPT, [70])[-1], expected[-1]) <= 0.06


# ---- hits


def own_logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return logits(model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_chunks_and_decodes_give_the_logits_of_one_forward(tmp_path: Path, kind: str) -> None:
    loaded = adapter.load(write(made(CONFIGS["llama 3"]()), tmp_path / "model.gguf", kind))
    assert kinds(loaded.model)["model.layers.0.self_attn.q_proj"] is not None
    whole = in_chunks(loaded, PROMPT, [70])[-1]
    for cuts in ([64, 70], [17, 34, 51, 69, 70], [*range(50, 71)]):
        assert relative_error(in_chunks(loaded, PROMPT, cuts)[-1], whole) <= TOLERANCE


# ---- refusals, and layers that cannot be replaced


def test_without_products_the_model_runs_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf", "Q4_0")
    monkeypatch.setattr(build, "library", lambda: (_ for _ in ()).throw(build_error()))
    monkeypatch.setattr(kernels, "_loaded", kernels._loaded.__wrapped__)
    kernels.kernels.cache_clear()
    try:
        for name, weights in ((path, "auto"), (path, "int8"), ("tiny", "int8")):
            assert set(kinds(adapter.load(name, weights=weights).model).values()) <= {None}
        assert [record.message for record in caplog.records if "float32" in record.message] == [
            "weights are float32, not of 8 or 4 bits: there is no C++ compiler"
        ]
    finally:
        kernels.kernels.cache_clear()


def build_error() -> Exception:
    return build.BuildError("there is no C++ compiler")


def test_a_layer_whose_weight_is_read_in_a_forward_becomes_plain(build: Callable[..., Any]) -> None:
    model = build(CONFIGS["llama"]())
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Reader(mlp.down_proj)
    loaded = adapter.load(model, weights="int8")
    found = kinds(loaded.model)
    assert [name for name, format in found.items() if format is None] == ["model.layers.1.mlp.down_proj.inner"]
    assert relative_error(in_chunks(loaded, PROMPT, [70])[-1], own_logits(model)[-1]) <= 0.06


def test_only_plain_layers_are_quantised() -> None:
    class Own(nn.Linear):
        pass

    model: Any = nn.Sequential(nn.Linear(32, 4), Own(32, 4), *(nn.Linear(32, 4) for _ in range(2)), nn.Linear(33, 4))
    model[2].register_forward_hook(lambda *_: None)
    model[3].forward = lambda given: given
    quantize(model, "int4")
    assert [type(layer) for layer in model] == [QuantizedLinear, Own, *[nn.Linear] * 3]
