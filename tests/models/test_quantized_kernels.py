"""The compiled products equal those of plain torch, with the same bits alone and in a batch."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
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


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the compiler by a shell script, which finds the path of its output in $OUT."""
    script = tmp_path / "c++"

    def replace(lines: str) -> Path:
        script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; OUT="$2"\n{lines}\n')
        script.chmod(0o755)
        os.utime(script, ns=(0, 0))
        monkeypatch.setattr(build.shutil, "which", lambda name: str(script))
        return tmp_path

    return replace


def copy_of_the_library() -> str:
    """The command that compiles in no time."""
    return f'cp {build.library().resolve()} "$OUT"'


def test_a_library_is_compiled_once_into_a_private_folder(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(f"{copy_of_the_library()}; echo >>{tmp_path}/calls")
    fresh = use_folder(tmp_path, monkeypatch)
    calls = lambda: len((tmp_path / "calls").read_text())  # noqa: E731
    before = os.umask(0)  # modes must not depend on it
    first = build.library()
    assert build.library().resolve() == first.resolve() and calls() == 1
    assert capfd.readouterr().err == "radixkv compiles functions for this CPU, once: about five seconds\n"
    os.umask(before)
    whole, path = first.read_bytes(), first.resolve()
    path.write_bytes(whole[:3000])  # loading a truncated library would kill the process
    again = build.library()
    assert again.resolve() == path and calls() == 2
    assert again.read_bytes() == whole and path.parent == fresh and [*fresh.iterdir()] == [path]
    assert [each.stat().st_mode & 0o777 for each in (fresh.parent, fresh, path)] == [0o700, 0o700, 0o600]
    monkeypatch.setattr(build, "_OPTIONS", (*build._OPTIONS, "-O2"))
    os.utime(path, (0, 0))  # nobody has loaded it for years
    assert build.library().resolve() != path and calls() == 3 and not path.exists()


def use_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    return base / "radixkv" / "kernels"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("printf 'fatal error: \\377\\376' >&2; exit 1", "c\\+\\+ failed: fatal error: \ufffd\ufffd"),
        ('echo junk >"$OUT"', "made no library that can be loaded: .*OSError"),
        ("COPY; truncate -s 3000 $OUT", "made no library that can be loaded"),
        ("true", "made no library that can be loaded"),
        ("COPY 2>/dev/null; echo 'error: No space left on device'; exit 1", "error: No space left on device"),
    ],
)
def test_of_a_compiler_that_misbehaves_nothing_is_kept(
    lines: str, reason: str, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of_the_library()
    compiler(lines.replace("COPY", copy))
    fresh = use_folder(tmp_path, monkeypatch)
    with pytest.raises(build.BuildError, match=reason):
        build.library()
    assert not [*fresh.iterdir()]
    compiler(copy)
    assert build.library().resolve().parent == fresh


BUILD = "from radixkv.models.quantized import build; print(build.library().resolve())"


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_killed_leaves_no_folder(
    ending: signal.Signals, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of_the_library()
    compiler(f"echo $$ >{tmp_path}/begun; exec sleep 60")
    fresh = use_folder(tmp_path, monkeypatch)
    environment, begun = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, tmp_path / "begun"
    with subprocess.Popen([sys.executable, "-c", BUILD], env=environment) as process:
        while not (begun.exists() and begun.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        assert len([*fresh.iterdir()]) == 1
        process.send_signal(ending)
    assert process.returncode == (143 if ending == signal.SIGTERM else -9)
    assert len([*fresh.iterdir()]) == (ending == signal.SIGKILL)
    if ending == signal.SIGKILL:
        os.kill(int(begun.read_text()), signal.SIGKILL)
    compiler(copy)
    path = build.library().resolve()
    assert [*fresh.iterdir()] == [path]  # it removes what SIGKILL left


def test_of_eight_first_builds_at_once_one_compiles(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f"sleep 0.2; {copy_of_the_library()}; echo >>{tmp_path}/calls")
    fresh = use_folder(tmp_path, monkeypatch)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", BUILD]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    found = {process.communicate()[0].strip() for process in started}
    assert found == {str(each) for each in fresh.iterdir()} and len(found) == 1
    assert (tmp_path / "calls").read_text() == "\n"


def test_a_build_that_hangs_delays_no_process_whose_library_is_cached(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(copy_of_the_library())
    fresh = use_folder(tmp_path, monkeypatch)
    path = build.library().resolve()
    folder = os.open(fresh, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as the process whose compiler hangs
    try:
        assert build.library().resolve() == path
        monkeypatch.setattr(build, "_LONGEST_S", 0.2)
        path.write_bytes(b"damaged")
        with pytest.raises(build.BuildError, match=f"another process has been compiling into {fresh} for 0.2 s"):
            build.library()
    finally:
        os.close(folder)
    monkeypatch.undo()
    assert path.read_bytes() == b"damaged", "only the process that holds the lock removes libraries"


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_build_needs_no_stderr(
    is_broken: bool, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(copy_of_the_library())
    fresh = use_folder(tmp_path, monkeypatch)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stderr:
        if not is_broken:
            stderr.close()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stderr)
            assert build.library().resolve().parent == fresh
        with suppress(BrokenPipeError):
            stderr.close()


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


@pytest.mark.parametrize("place", ["radixkv/kernels", "radixkv", "."])
def test_a_folder_that_others_may_change_is_refused(fresh: Path, tmp_path: Path, place: str) -> None:
    fresh.mkdir(parents=True, mode=0o700)
    folder = tmp_path / place
    folder.chmod(0o777)
    with pytest.raises(build.BuildError, match=rf"other users may .* {folder}: chmod .* \(XDG_CACHE_HOME sets"):
        build.library()
    assert not [*fresh.iterdir()]


def test_the_library_that_was_checked_is_the_one_that_is_loaded(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(copy_of_the_library())
    fresh = use_folder(tmp_path, monkeypatch)
    checked = build.library()
    (path,) = fresh.iterdir()
    path.rename(fresh / "away")
    path.write_bytes(b"exchanged")
    assert kernels.Kernels(str(checked)).instructions == kernels.kernels().instructions  # type: ignore[union-attr]


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
