"""`doctor` names the formats of the weights with the reason, and measures the KL divergence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.cli import doctor_weights
from radixkv.errors import InvalidInput
from radixkv.gguf.header import read_header
from radixkv.models.adapter import load
from radixkv.models.loaded import LoadedModel
from radixkv.models.quantized import build, kernels
from tests.models.gguf_files import CONFIGS, made, write

compiled = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
TOKENIZER = SimpleNamespace(encode=lambda text: [5 + ord(letter) % 80 for letter in text])

UNQUANTISED = "'auto' keeps the bits of quantised GGUF files only; weights='int8' takes about a quarter of the memory"


def unexpected() -> LoadedModel:
    pytest.fail("loaded again")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("tiny")


def one(
    loaded: LoadedModel, path: Path | None, weights: str, again: Callable[[], LoadedModel] = unexpected
) -> tuple[str, str]:
    [found] = doctor_weights.accuracy(loaded, weights, path and read_header(path), again)
    assert found.about == "accuracy"
    return found.status, found.seen


def divergence(said: str) -> float:
    found = re.search(r"mean KL divergence (\S+) nats", said)
    assert found
    return float(found[1])


# ---- formats


def test_formats_of_floats_have_their_reason(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(weights: str = "auto", **changes: Any) -> tuple[str, str]:
        found = doctor_weights.formats(replace(tiny, **changes), weights, None)
        return found.status, found.seen

    monkeypatch.setattr(kernels, "_loaded", lambda: SimpleNamespace())
    assert said() == (
        "ok",
        f"float32: {UNQUANTISED}",
    )
    assert said("float32") == ("ok", "float32: weights='float32' was asked for")
    assert said(dtype=torch.bfloat16) == ("ok", "bfloat16: weights of 8 and 4 bits are for float32 on a CPU")
    assert said("int8")[0] == "note" and "no layer is a plain one" in said("int8")[1]
    monkeypatch.setattr(kernels, "_loaded", lambda: "there is no C++ compiler")
    assert said() == ("ok", "float32: no setting changes that, because for 8 and 4 bits there is no C++ compiler")
    assert said("int8") == ("note", "float32: there is no C++ compiler")


def test_a_quantised_file_without_products_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: (_ for _ in ()).throw(build.BuildError("there is no C++ compiler")))
    monkeypatch.setattr(kernels, "_loaded", kernels._loaded.__wrapped__)
    kernels.kernels.cache_clear()
    try:
        path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf", "Q8_0")
        found = doctor_weights.formats(load(path), "auto", read_header(path))
        assert (found.status, found.seen) == ("note", "float32: there is no C++ compiler")
    finally:
        kernels.kernels.cache_clear()


# ---- accuracy


def test_divergence_matches_the_distributions() -> None:
    ours, theirs = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    p = torch.tensor([2.0, 0.0]).softmax(-1)
    first = float((p * (p / 0.5).log()).sum())
    found, same = doctor_weights._divergence(ours.repeat(20, 1), theirs.repeat(20, 1))
    assert found == pytest.approx(first / 2) and same == 1
    assert doctor_weights._divergence(-theirs, theirs)[1] == 0
    assert doctor_weights._divergence(theirs, theirs) == (0.0, 1.0)


@compiled
def test_rounded_weights_are_compared_with_the_files() -> None:
    again = [load("tiny", weights="float32")]
    found = {
        weights: one(load("tiny", weights=weights), None, weights, lambda: again[0]) for weights in ("int8", "int4")
    }
    assert [status for status, _ in found.values()] == ["ok", "note"]
    assert 0 < divergence(found["int8"][1]) <= 1e-2 < divergence(found["int4"][1])
    assert "from the float32 weights of the files" in found["int8"][1]


@compiled
def test_rounded_blocks_of_a_file_are_compared_with_its_dequantised_weights(tmp_path: Path) -> None:
    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf", "Q5_1")
    status, said = one(replace(load(path), codec=TOKENIZER), path, "auto", lambda: load(path, weights="float32"))
    assert status == "ok" and 1e-9 < divergence(said) <= 1e-2


@compiled
def test_accuracy_that_cannot_be_measured_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("tiny", weights="int8")
    before = "the KL divergence from float32 was not measured: "
    assert one(replace(loaded, codec=None), None, "int8") == ("note", f"{before}there is no tokenizer for the text")

    def refuse() -> LoadedModel:
        raise InvalidInput("the weights do not fit")

    assert one(loaded, None, "int8", refuse) == ("note", f"{before}the weights do not fit")
    monkeypatch.setattr("radixkv.sizing.memory.free_memory", lambda: 1000)
    assert one(loaded, None, "int8") == ("note", f"{before}in float32 the weights take 6.75 MiB, and 1000 B are free")
