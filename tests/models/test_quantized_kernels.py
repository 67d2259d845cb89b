"""The compiled products equal those of plain torch, with the same bits alone and in a batch."""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from radixkv.models.quantized import build, kernels
from radixkv.models.quantized.kernels import BLOCKS, Format, QuantizedWeights, stored_bytes

FEATURES = build.cpu_features()
pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
INSTRUCTIONS = [1, pytest.param(2, marks=pytest.mark.skipif("avx512bw" not in FEATURES, reason="no AVX-512"))]
SHAPES = [
    (1, 32),
    (64, 64),
    (97, 288),
    (130, 2080),
]  # outputs and inputs: below, at and above whole panels and segments
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 24, 95, 96, 97, 205)


def blocks_of(kind: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(rows * columns)
    found: np.ndarray[Any, Any] = gguf.quants.quantize(draw.normal(size=(rows, columns)).astype(np.float32), Kind[kind])
    return found


def stored(kind: str, rows: int, columns: int) -> tuple[QuantizedWeights, torch.Tensor]:
    """Weights made of blocks, and the numbers that the package gguf reads in them."""
    blocks = blocks_of(kind, rows, columns)
    weights = QuantizedWeights(rows, columns, BLOCKS[kind])
    weights.store_blocks(blocks, 0)
    return weights, torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def check_products(products: torch.Tensor, given: torch.Tensor, dense: torch.Tensor) -> None:
    scale = given.double().norm(dim=1)[:, None] * dense.double().norm(dim=1)
    assert ((products - given.double() @ dense.double().T).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_products_match_the_dequantised_weights(
    kind: str, shape: tuple[int, int], instructions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, dense = stored(kind, *shape)
    monkeypatch.setattr(weights, "_instructions", instructions)
    given = drawn(max(ROWS), shape[1])
    whole = weights.multiply(given)
    check_products(whole, given, dense)
    for count in ROWS:  # other numbers of rows take other code
        assert torch.equal(weights.multiply(given[-count:]), whole[-count:]), count


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_both_instruction_sets_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx512bw" not in FEATURES:
        pytest.skip("no AVX-512")
    weights, _ = stored(kind, 130, 288)
    given, found = drawn(40, 288), []
    for instructions in (1, 2):
        monkeypatch.setattr(weights, "_instructions", instructions)
        found.append([weights.multiply(given[:count]) for count in (1, 7, 40)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_any_number_of_threads_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = stored(kind, 520, 576)
    given = drawn(200, 576)
    expected = [weights.multiply(given[:count]) for count in (1, 200)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(5):
        assert all(torch.equal(weights.multiply(given[: len(each)]), each) for each in expected)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_blocks_come_back_bit_for_bit(kind: str) -> None:
    weights, dense = stored(kind, 97, 96)
    assert torch.equal(weights.dense(), dense)
    ids = torch.tensor([[96, 0], [3, 3]])
    assert torch.equal(weights.rows(ids), dense[ids])
    assert weights.rows(ids[:0]).shape == (0, 2, 96)
    assert weights.nbytes == stored_bytes(97, 96, BLOCKS[kind]) == 128 * 3 * blocks_of(kind, 1, 32).nbytes


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_rows_may_be_stored_in_pieces(kind: str) -> None:
    blocks = blocks_of(kind, 150, 64)
    weights, _ = stored(kind, 150, 64)
    pieces = QuantizedWeights(150, 64, BLOCKS[kind])
    for start, end in itertools.pairwise([0, 1, 63, 70, 128, 150]):
        pieces.store_blocks(blocks[start:end], start)
    assert torch.equal(pieces.dense(), weights.dense())


def test_shapes_strides_and_biases() -> None:
    weights, _ = stored("Q8_0", 40, 64)
    bias, given = torch.randn(40), drawn(30, 64)
    expected = weights.multiply(given)
    assert torch.equal(weights.multiply(given, bias), expected + bias)
    assert torch.equal(weights.multiply(given.reshape(2, 15, 64)), expected.reshape(2, 15, 40))
    assert torch.equal(weights.multiply(given.t().contiguous().t()), expected)  # columns are contiguous
    assert torch.equal(weights.multiply(given[7]), expected[7])
    assert weights.multiply(given[:0]).shape == (0, 40)
    apart = torch.zeros(30 * 64 + 1)[1:].view(30, 64)  # not at a multiple of 16 bytes
    apart.copy_(given)
    assert torch.equal(weights.multiply(apart), expected)


def test_nothing_is_written_outside_of_the_product() -> None:
    weights, _ = stored("Q4_1", 97, 64)
    library, given = kernels.kernels(), drawn(13, 64)
    assert library is not None
    for rows in (1, 5, 13):
        around = torch.full((rows * 97 + 200,), 7.0)
        siblings = kernels.SiblingWeights([weights], [None])
        library.multiply(
            siblings.addresses, siblings.bias_addresses, 1, given.data_ptr(), around[100:].data_ptr(), rows,
            library.instructions, 1, None,
        )  # fmt: skip
        assert torch.equal(around[100:-100], weights.multiply(given[:rows]).flatten())
        assert (around[:100] == 7).all() and (around[-100:] == 7).all()


# ---- rounding


@pytest.mark.parametrize(("format", "share"), [(Format.INT8, 0.5 / 127), (Format.INT4_MIN, 0.5 / 15)])
def test_weights_are_rounded_to_the_nearest_level_of_their_group(format: Format, share: float) -> None:
    weights = QuantizedWeights(70, 96, format)
    values = drawn(70, 96) * torch.logspace(-3, 3, 70)[:, None]
    weights.quantise(values, 0)
    groups = values.view(70, 3, 32)
    spread = groups.abs().amax(-1) if format == Format.INT8 else groups.amax(-1) - groups.amin(-1)
    error = (weights.dense() - values).view(70, 3, 32).abs().amax(-1)
    rounded = 2**-11 * groups.abs().amax(-1)  # of the scale and the minimum to float16
    assert (error <= share * spread + 1.1 * rounded).all()


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4_MIN])
def test_weights_of_a_quantised_file_are_rounded_at_most_once(format: Format) -> None:
    weights = QuantizedWeights(70, 96, format)
    weights.quantise(drawn(70, 96), 0)
    again = QuantizedWeights(70, 96, format)
    again.quantise(weights.dense(), 0)
    assert (again.dense() - weights.dense()).abs().max() <= 2e-3


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4_MIN])
def test_groups_of_zeros_of_tiny_numbers_and_of_damage(format: Format) -> None:
    values = torch.zeros(4, 64)
    values[1, :32] = torch.linspace(-1e-6, 1e-6, 32)
    values[2, 5], values[3, 40] = torch.nan, torch.inf
    weights = QuantizedWeights(4, 64, format)
    weights.quantise(values, 0)
    dense = weights.dense()
    assert torch.equal(dense[0], values[0])
    assert (dense[1] - values[1]).abs().max() <= 1.2e-7
    assert dense[2, :32].isnan().all() and torch.equal(dense[2, 32:], values[2, 32:])
    assert dense[3, 32:].isnan().all()


# ---- compiling


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "radixkv" / "kernels"


def test_a_library_is_compiled_once_into_a_private_folder(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compiler(command: list[str], **options: Any) -> Any:
        calls.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"library")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(build.subprocess, "run", compiler)
    first = build.library()
    assert build.library() == first and len(calls) == 1
    assert first.read_bytes() == b"library"
    first.write_bytes(b"lib")  # loading a truncated library would kill the process
    assert build.library() == first and len(calls) == 2
    assert first.read_bytes() == b"library" and first.parent == fresh and [*fresh.iterdir()] == [first]
    assert fresh.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(build, "_OPTIONS", (*build._OPTIONS, "-O2"))
    assert build.library() != first and len(calls) == 3


@pytest.mark.parametrize(
    ("features", "system", "reason"),
    [
        ({"sse2", "fma"}, "Linux on x86_64", "lacks avx2, f16c"),
        (set(), "Darwin on arm64", "is another machine or system"),
    ],
)
def test_other_machines_are_refused(
    features: set[str], system: str, reason: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(build.platform, "system", lambda: system.split()[0])
    monkeypatch.setattr(build.platform, "machine", lambda: system.split()[-1])
    with pytest.raises(build.BuildError, match=rf"need Linux on an x86-64 CPU .* \({system}\) {reason}$"):
        build.library()
    assert not fresh.exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_a_folder_that_others_may_read_or_write_is_refused(fresh: Path, mode: int) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(mode)
    with pytest.raises(build.BuildError, match="chmod 700"):
        build.library()
    assert not [*fresh.iterdir()]


def test_a_folder_of_another_user_or_a_link_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.parent.mkdir(parents=True)
    fresh.symlink_to("/tmp")
    with pytest.raises(build.BuildError, match="is no folder"):
        build.library()
    fresh.unlink()
    monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    with pytest.raises(build.BuildError, match="belongs to another user"):
        build.library()


def test_without_a_home_or_its_folder_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(build.BuildError, match="cannot be used"):
        build.library()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(build.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("there is no home")))
    with pytest.raises(build.BuildError, match="there is no home"):
        build.library()


@pytest.mark.parametrize("lacking", ["compiler", "features", "right numbers", "a library that loads"])
def test_without_products_there_is_one_warning(
    lacking: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled, again = kernels.kernels(), cache(kernels.kernels.__wrapped__)
    monkeypatch.setattr(kernels, "_loaded", cache(kernels._loaded.__wrapped__))
    if lacking == "compiler":
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    elif lacking == "features":
        monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"sse2"}))
    elif lacking == "right numbers":
        monkeypatch.setattr(build, "library", lambda: "")
        monkeypatch.setattr(kernels, "Kernels", lambda path: compiled)
        right = QuantizedWeights.multiply
        monkeypatch.setattr(
            QuantizedWeights, "multiply", lambda self, rows: right(self, rows) * (1.001 if len(rows) > 1 else 1)
        )
    else:
        monkeypatch.setattr(build, "library", lambda: str(build.SOURCES[0]))
    assert again() is None and again() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "float32" in caplog.text and str(kernels.obstacle()) in caplog.text


@pytest.mark.long
def test_two_processes_may_compile_at_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_OPTIONS", ("-O0", *build._OPTIONS[1:]))  # without optimisation, in less time
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.library(), range(2))
    assert first == second and [*fresh.iterdir()] == [first]
    assert ctypes.CDLL(str(first)).radixkv_instructions() == kernels.kernels().instructions  # type: ignore[union-attr]
