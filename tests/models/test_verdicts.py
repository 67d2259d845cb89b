"""A model is tested whole once: its record holds while nothing changes on which the result depends."""

from __future__ import annotations

import json
import os
import pwd
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv.errors import InvalidInput
from radixkv.models import adapter, verdicts
from radixkv.models.native.layers import NativeModel
from radixkv.models.quantized import kernels
from radixkv.models.selftest import self_test
from tests.models import gguf_files
from tests.models.gguf_files import LLAMA3, YARN
from tests.models.test_native import HALF, WINDOWS, made, needs_products

pytestmark = pytest.mark.usefixtures("each_load_tested")


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


def rotate_by(**parameters: Any) -> Any:
    return lambda folder: set_config(folder, rope_parameters={"rope_theta": 10_000.0, **parameters})


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change bytes of the file of weights, and leave its time as it was."""
    path = folder / "model.safetensors"
    before = path.stat()
    path.write_bytes(change(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_tensor(name: str, where: float, by: bytes = b"") -> Any:
    """Replace bytes of a tensor from this part of its length on; without new ones, change one bit."""

    def changed(data: bytes) -> bytes:
        header = 8 + int.from_bytes(data[:8], "little")
        start, end = json.loads(data[8:header])[name]["data_offsets"]
        at = header + start + int(where * (end - 1 - start))
        new = by or bytes([data[at] ^ 1])
        return data[:at] + new + data[at + len(new) :]

    return lambda folder: rewrite(folder, changed)


def exchange_tensors(one: bytes, other: bytes) -> Any:
    """Let the tensors with two names of equal length in the header have each other's."""
    return lambda folder: rewrite(folder, lambda data: other.join(p.replace(other, one) for p in data.split(one)))


CHANGES: dict[str, Any] = {
    "the base of the rotary table": lambda folder: set_config(
        folder, rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "the epsilon of norms": lambda folder: set_config(folder, rms_norm_eps=1e-3),
    "a longer context": lambda folder: set_config(folder, max_position_embeddings=1024),
    "a linear scaling": rotate_by(rope_type="linear", factor=2.0),
    "a scaling of low frequencies": rotate_by(**LLAMA3),
    "another factor of a scaling": rotate_by(**YARN),
    "twice as many heads of half the size": lambda folder: set_config(
        folder, num_attention_heads=8, num_key_value_heads=4
    ),
    "a window of one layer": lambda folder: set_config(
        folder, **WINDOWS, layer_types=["sliding_attention", "full_attention"]
    ),
    "a bias": change_tensor("model.layers.0.self_attn.k_proj.bias", 1),
    "a projection": change_tensor("model.layers.1.self_attn.o_proj.weight", 0.502),
    "a norm": change_tensor("model.layers.1.input_layernorm.weight", 0),
    "the embedding": change_tensor("model.embed_tokens.weight", 1),
    "the head": change_tensor("lm_head.weight", 0.502),
    "keys for values": exchange_tensors(b"layers.0.self_attn.k_proj", b"layers.0.self_attn.v_proj"),
    "the layers in another order": exchange_tensors(b"model.layers.0.", b"model.layers.1."),
    "the time of the file": lambda folder: os.utime(folder / "model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_tested_whole(folder: Path, whole_tests: list[float], change: Any) -> None:
    load(folder)
    change(folder)
    assert isinstance(load(folder).model, NativeModel)
    load(folder)
    assert len(whole_tests) == len(records(folder)) == 2


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "the scale of attention": ("granite", {"attention_multiplier": 0.5}),
    "the scale of the embedding": ("granite", {"embedding_multiplier": 3.0}),
    "the scale of residuals": ("granite", {"residual_multiplier": 0.5}),
    "the divisor of logits": ("granite", {"logits_scaling": 2.0}),
    "the softcap of attention": ("gemma2", {"attn_logit_softcapping": 5.0}),
    "the softcap of logits": ("gemma2", {"final_logit_softcapping": 5.0}),
    "other layers without rotation": ("smollm3, linear", {"no_rope_layers": [0, 1, 1, 0]}),
    "the base of a part of each head": ("phi3, half rotated", {"rope_parameters": {**HALF, "rope_theta": 5e5}}),
}


@pytest.mark.parametrize(("model", "fields"), FIELDS.values(), ids=FIELDS)
def test_a_changed_field_is_tested_whole(
    model: str, fields: dict[str, Any], tmp_path: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made(model).save_pretrained(tmp_path / "model")
    load(tmp_path / "model")
    set_config(tmp_path / "model", **fields)
    assert isinstance(load(tmp_path / "model").model, NativeModel)
    assert len(whole_tests) == len(records(tmp_path / "model")) == 2


@pytest.mark.parametrize("name", ["rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor"])
def test_a_changed_header_of_a_gguf_file_is_tested_whole(
    name: str, tmp_path: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = gguf_files.write(gguf_files.made(gguf_files.CONFIGS["llama, linear"]()), tmp_path / "model.gguf", "Q8_0")
    load(file)
    data, before, key = file.read_bytes(), file.stat(), f"llama.{name}".encode()
    at = data.index(key) + len(key) + 4  # the type of the value precedes it
    (value,) = struct.unpack_from("<f", data, at)
    file.write_bytes(data[:at] + struct.pack("<f", value * 1.5) + data[at + 4 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert isinstance(load(file).model, NativeModel)
    load(file)
    assert len(whole_tests) == len(records(file)) == 2


def test_other_settings_versions_and_code_are_tested_whole(
    folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder)
    load(folder, dtype="float64")
    load(folder, attention="torch", weights="int8")
    monkeypatch.setattr(verdicts, "__version__", "9")
    verdicts._machine.cache_clear()
    load(folder)
    assert len(whole_tests) == 4


@pytest.mark.parametrize("set_to", [torch.set_num_threads, torch.set_float32_matmul_precision])
def test_other_threads_and_precisions_are_tested_whole(
    folder: Path, whole_tests: list[float], set_to: Callable[[Any], None]
) -> None:
    before, other = {
        torch.set_num_threads: (torch.get_num_threads(), torch.get_num_threads() + 1),
        torch.set_float32_matmul_precision: (torch.get_float32_matmul_precision(), "medium"),
    }[set_to]
    load(folder)
    set_to(other)
    try:
        load(folder)
    finally:
        set_to(before)
    assert len(whole_tests) == 2


@pytest.mark.long
def test_the_name_of_a_record_is_the_same_in_each_process() -> None:
    config = made("llama 3").config.to_diff_dict()
    code = f"from radixkv.models.native.switches import switches_of; print(switches_of({config!r}))"
    environments = [{**os.environ, "PYTHONHASHSEED": str(seed)} for seed in (1, 2)]  # sets of texts differ in order
    found = {subprocess.check_output([sys.executable, "-c", code], env=each) for each in environments}
    assert len(found) == 1


def test_records_that_were_not_used_for_90_days_are_removed(folder: Path, whole_tests: list[float]) -> None:
    load(folder)
    (record,) = records(folder)
    for name in ("old", "older"):
        (record.parent / name).write_bytes(b"")
        os.utime(record.parent / name, (1, 1))
    (record.parent / "link").symlink_to("nowhere")  # no entry that cannot be read ends the removal
    os.utime(record, (1, 1))
    load(folder)  # uses the record
    set_config(folder, rms_norm_eps=1e-3)
    load(folder)  # writes another one
    names = {each.name for each in records(folder)}
    assert record.name in names and len(names) == 3 and not names & {"old", "older"}


@pytest.mark.parametrize("make", [Path.symlink_to, lambda record, _: os.mkfifo(record)], ids=["link", "pipe"])
def test_a_link_or_a_pipe_is_no_record(folder: Path, whole_tests: list[float], make: Any) -> None:
    load(folder)
    (record,) = records(folder)
    target = record.rename(folder.parent / "elsewhere")
    os.utime(target, (1, 1))
    make(record, target)
    load(folder)
    assert len(whole_tests) == 2
    assert target.stat().st_mtime == 1


CODE = (
    "models/native/layers.py", "models/native/rotary.py", "models/native/fused.py", "models/native/compiled.py",
    "models/native/switches.py", "models/native/files.py", "models/attention_interface.py", "models/runner.py",
    "models/quantized/kernels.cpp", "attention/torch_backend.py",
)  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_changed_code_is_tested_whole(
    name: str, folder: Path, whole_tests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder)
    code, stat = Path(radixkv.__file__).parent / name, Path.stat
    assert code.is_file()

    def later(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result([*found[:6], found.st_size + 1, *found[7:]]) if path == code else found

    monkeypatch.setattr(Path, "stat", later)
    verdicts._machine.cache_clear()
    load(folder)
    assert len(whole_tests) == 2


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
    change_tensor("model.norm.weight", 0.3, b"\0\0\xc0\x7f" * 2)(folder)  # between the samples
    with pytest.raises(InvalidInput, match="nan or infinity"):
        load(folder)
    assert len(whole_tests) == 1  # it raised in the whole test, which a failed short one begins
    assert len(records(folder)) == 1


@pytest.mark.parametrize("content", [b"", b"[", b"[" * 10_000, b'["other", 1e-7]', b"null", b'["%s", NaN]'])
def test_a_damaged_record_runs_the_whole_test(folder: Path, whole_tests: list[float], content: bytes) -> None:
    load(folder)
    (record,) = records(folder)
    record.write_bytes(content.replace(b"%s", record.name.encode()))
    load(folder)
    load(folder)
    assert len(whole_tests) == 2
    assert json.loads(record.read_bytes()) == [record.name, whole_tests[1]]


def open_to_others(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder.parent / "cache/radixkv/verdicts").mkdir(parents=True)
    os.chmod(folder.parent / "cache/radixkv/verdicts", 0o755)


def no_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", "/dev/null")


def no_home(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    patch.delenv("XDG_CACHE_HOME")
    patch.delenv("HOME")
    patch.setattr(pwd, "getpwuid", unknown)


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    patch.setattr(os, "mkdir", refused)


def full_disk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(os, "fsync", full)


@pytest.mark.parametrize("change", [open_to_others, no_folder, no_home, read_only, full_disk])
def test_where_no_record_can_be_kept_each_load_tests_whole(
    folder: Path, whole_tests: list[float], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder, monkeypatch)
    load(folder)
    load(folder)
    assert len(whole_tests) == 2
    kept = folder.parent / "cache/radixkv/verdicts"
    assert not (kept.exists() and records(folder))


def test_two_loads_at_once_leave_one_record(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [each.name for each in pool.map(load, [folder, folder])] == [str(folder)] * 2
    (record,) = records(folder)
    assert json.loads(record.read_bytes())[0] == record.name
