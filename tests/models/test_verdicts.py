"""A model is tested whole once: its record holds while nothing changes on which the result depends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidInput
from radixkv.models import adapter, verdicts
from radixkv.models.quantized import kernels
from radixkv.models.selftest import self_test
from tests.models.test_native import made, needs_products


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a small model, with an empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made("qwen2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def whole_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The results of all whole tests so far."""
    found: list[float] = []

    def counted(loaded: Any) -> float:
        found.append(self_test(loaded))
        return found[-1]

    monkeypatch.setattr(verdicts, "self_test", counted)
    yield found
    verdicts._machine.cache_clear()


def load(folder: Path, **options: Any) -> Any:
    return adapter.load(folder, verify="auto", **options)


def records(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache/radixkv/verdicts").iterdir())


def test_a_second_load_tests_a_chunk_and_a_decode(folder: Path, whole_tests: list[float]) -> None:
    for _ in range(3):
        load(folder)
    assert len(whole_tests) == len(records(folder)) == 1
    adapter.load(folder)  # as `doctor` does, and verify="always"
    assert len(whole_tests) == 2


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensor(folder: Path, *, at: int) -> None:
    """Change one byte after the header, and leave size and time as they were."""
    path = folder / "model.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "the base of the rotary table": lambda folder: set_config(
        folder, rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "the epsilon of norms": lambda folder: set_config(folder, rms_norm_eps=1e-3),
    "a longer context": lambda folder: set_config(folder, max_position_embeddings=1024),
    "the first byte of a tensor": lambda folder: change_tensor(folder, at=0),
    "the time of the file": lambda folder: os.utime(folder / "model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_tested_whole(folder: Path, whole_tests: list[float], change: Any) -> None:
    load(folder)
    change(folder)
    load(folder)
    load(folder)
    assert len(whole_tests) == 2


def test_other_settings_versions_and_code_are_tested_whole(
    folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder)
    load(folder, dtype="float64")
    load(folder, attention="torch", weights="int8")
    monkeypatch.setattr(verdicts, "__version__", "9")
    verdicts._machine.cache_clear()
    load(folder)
    code = Path(sys.modules["radixkv.models.native.layers"].__file__ or "")
    stat = Path.stat

    def later(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result([*found[:6], found.st_size + 1, *found[7:]]) if path == code else found

    monkeypatch.setattr(Path, "stat", later)
    verdicts._machine.cache_clear()
    load(folder)
    assert len(whole_tests) == 5


@needs_products
def test_another_compiled_library_is_tested_whole(
    folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, weights="int8")
    monkeypatch.setattr(kernels.kernels(), "file", "of another compiler")
    load(folder, weights="int8")
    load(folder, weights="int8")
    assert len(whole_tests) == 2


def test_weights_that_are_not_numbers_are_refused_with_a_record(folder: Path, whole_tests: list[float]) -> None:
    load(folder)
    path = folder / "model.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    place = json.loads(data[8:header])["model.norm.weight"]["data_offsets"][0]
    data[header + place + 72 : header + place + 76] = b"\0\0\xc0\x7f"  # between the samples
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InvalidInput, match="nan or infinity"):
        load(folder)
    assert len(whole_tests) == 1  # it raised in the whole test, which a failed short one begins
    assert len(records(folder)) == 1


@pytest.mark.parametrize("content", [b"", b"[", b'["other", 1e-7]', b"null", b'["%s", NaN]'])
def test_a_damaged_record_runs_the_whole_test(folder: Path, whole_tests: list[float], content: bytes) -> None:
    load(folder)
    (record,) = records(folder)
    record.write_bytes(content.replace(b"%s", record.name.encode()))
    load(folder)
    load(folder)
    assert len(whole_tests) == 2
    assert json.loads(record.read_bytes()) == [record.name, whole_tests[1]]


def test_folders_that_cannot_be_trusted_or_written_hold_no_records(folder: Path, whole_tests: list[float]) -> None:
    (folder.parent / "cache/radixkv/verdicts").mkdir(parents=True, mode=0o755)
    os.chmod(folder.parent / "cache/radixkv/verdicts", 0o755)
    for _ in range(2):
        load(folder)
    assert len(whole_tests) == 2
    assert not records(folder)


def test_without_a_home_there_are_no_records(
    folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    load(folder)
    load(folder)
    assert len(whole_tests) == 2


def test_a_full_disk_leaves_no_record(folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        load(folder)
    assert not records(folder)
    load(folder)
    assert len(whole_tests) == 2


def test_two_loads_at_once_leave_one_record(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [each.name for each in pool.map(load, [folder, folder])] == [str(folder)] * 2
    (record,) = records(folder)
    assert json.loads(record.read_bytes())[0] == record.name
