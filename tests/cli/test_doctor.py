"""Each finding is made where there is something to find, and only there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from radixkv import Engine, device
from radixkv.attention import triton_backend
from radixkv.cli import doctor, doctor_checks, doctor_weights, main
from radixkv.cli.doctor_checks import Finding
from radixkv.config import EngineConfig
from radixkv.errors import UnsupportedModel
from radixkv.models.adapter import load
from radixkv.models.loaded import LoadedModel
from radixkv.models.quantized import kernels as quantized_kernels
from radixkv.models.quantized.kernels import kernels
from radixkv.sizing.kv_size import size_text
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.models.conftest import GROUPED, make


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("tiny")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and short texts."""
    monkeypatch.setattr(doctor_weights, "_MOST_TOKENS", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, list[tuple[str, str]]]]]:
    """Run the command; return its exit status, and (status, seen) of each finding by its subject."""

    def run(*arguments: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
        status = main(["doctor", *arguments, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["problems"] == sum(each["status"] == "problem" for each in told["findings"])
        assert (status == 1) == (told["problems"] > 0)
        found: dict[str, list[tuple[str, str]]] = {}
        for each in told["findings"]:
            found.setdefault(each["about"], []).append((each["status"], each["seen"]))
        return status, found

    return run


def of(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(each.status, each.seen) for each in findings]


def weights(numbers: int) -> str:
    return f"{numbers:,} numbers in memory, {size_text(4 * numbers)}"


# ---- the whole


def test_the_bundled_model_is_well(examine: Any, tiny: LoadedModel) -> None:
    status, found = examine("--kv-memory", "96MiB", "--device", "cpu")
    assert status == 0
    assert {about for about, seen in found.items() if seen[0][0] != "ok"} <= {"faster", "telemetry", "cuda"}
    assert found["layers"] == [("ok", "4 x 3 heads over 3 KV heads, keys 64, values 64")]
    assert found["pool"] == [("ok", "1,024 blocks of 16 tokens, 96 KiB each: 96 MiB, 4 whole contexts")]
    assert found["attention"] == [("ok", "torch: Triton does not run on cpu")]
    assert "host memory" not in found  # only if a size is given
    assert "float32 on cpu, context 4,096, 1,536 token ids" in found["model"][0][1]
    head = 1536 * 192  # it is the embedding's weight, unless it was packed for this CPU
    assert found["weights"] in [[("ok", weights(1_771_200))], [("ok", weights(1_771_200 + head))]]
    assert found["stop tokens"] == [("ok", "2 '<|im_end|>'")]
    assert found["chat template"] == [("ok", "appended histories read exactly as the template renders them")]
    (status, said), *_ = found["self-test"]
    assert status == "ok"
    assert 0 < float(said.partition("within ")[2].partition(" ")[0]) < 1e-4


def test_a_format_of_kv_is_compared_and_the_self_test_is_not_its_own(examine: Any) -> None:
    status, found = examine("--kv-dtype", "float16", "--device", "cpu")
    [(_, compared)], [(_, tested)] = found["KV"], found["self-test"]
    assert status == 0
    assert compared.startswith("float16, ") and "mean KL divergence" in compared
    assert tested.endswith("is allowed), with KV as computed")


@pytest.mark.skipif(kernels() is None, reason="no compiler, or a CPU without AVX2")
def test_weights_of_8_and_4_bits_are_counted(examine: Any) -> None:
    _, found = examine("--weights", "int4", "--device", "cpu")
    numbers, outer = 1_771_200, 1536 * 192  # the embedding, which is the head
    inner = numbers - outer - 9 * 192  # without the norms
    stored = inner // 32 * 20 + outer // 32 * 34 + 9 * 192 * 4
    bits = f"{outer:,} of them in 8 bits, {inner:,} of them in 4 bits"
    assert found["weights"] == [("ok", f"{numbers:,} numbers in memory, {size_text(stored)}, {bits}")]


def test_the_reason_against_small_weights_is_given_once(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "there is no C++ compiler"
    monkeypatch.setattr(quantized_kernels, "_loaded", lambda: said)
    kernels.cache_clear()
    try:
        status, found = examine("--weights", "int8", "--device", "cpu")
    finally:
        kernels.cache_clear()
    assert status == 0 and found["formats"] == [("note", f"float32: {said}")]
    assert [about for about, each in found.items() if any(said in seen for _, seen in each)] == ["formats"]


def test_a_model_that_is_not_there_is_a_problem(examine: Any) -> None:
    status, found = examine("/no/such/folder")
    assert (status, found["model"]) == (1, [("problem", "there is no model folder /no/such/folder")])
    assert "torch" in found
    assert "pool" not in found
    with pytest.raises(ValueError, match="no model folder"):
        main(["doctor", "/no/such/folder", "--debug"])


@pytest.mark.long
def test_weights_and_kv_of_ranks_are_counted(examine: Any, tmp_path: Path) -> None:
    make(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    with Engine.load(str(tmp_path), num_blocks=4, monitor=False) as engine:
        token = engine.model.bytes_per_token
    status, found = examine(str(tmp_path), "--tensor-parallel", "2")
    assert status == 0 and [kind for kind, _ in found["ranks"]] == ["ok", "note"]
    assert f": {size_text(token // 2)} a token" in found["KV"][0][1]


def test_a_model_with_windows_and_without_a_tokenizer(examine: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=97, max_position_embeddings=256, sliding_window=21, attn_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    status, found = examine(str(tmp_path), "--device", "cpu", "--dtype", "bfloat16", "--kv-memory", "80kB")
    assert status == 0
    heads = "4 heads over 2 KV heads, keys 16, values 16"
    assert [seen for _, seen in found["layers"]] == [
        f"2 x {heads}, window 21 (all KV is kept), softcap 3",
        f"1 x {heads}, softcap 3",
    ]
    assert found["pool"][0] == (
        "note",
        "13 blocks of 16 tokens, 6 KiB each: 78 KiB; its 208 tokens are fewer than the context of 256",
    )
    assert found["tokenizer"][0][0] == "note"
    assert "chat template" not in found
    assert any("dtype='float32'" in seen for _, seen in found["faster"])


def test_what_a_real_checkpoint_has_besides_weights_is_said(examine: Any, tmp_path: Path) -> None:
    make(transformers.LlamaConfig(**{**GROUPED, "vocab_size": 264, "eos_token_id": None})).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    settings = {"do_sample": True, "temperature": 0.7, "eos_token_id": [263, 261]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    status, found = examine(str(tmp_path), "--device", "cpu", "--kv-memory", "1MiB")
    assert status == 0
    [(_, model), (kind, beyond)] = found["model"]
    assert model.startswith(f"{tmp_path}: LlamaForCausalLM")
    assert (kind, beyond.startswith("the tokenizer has 1 tokens that the model has no embedding for")) == ("note", True)
    assert found["stop tokens"] == [("ok", "261 '<|endoftext|>', 263 '<|im_end|>'")]
    assert "SamplingParams(temperature=0.7)" in found["sampling"][0][1]
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    status, found = examine(str(tmp_path))
    assert (status, [kind for kind, _ in found["model"]]) == (1, ["problem"])
    assert "pickled weights only, and unpickling runs code" in found["model"][0][1]


def test_a_self_test_that_fails_is_a_problem(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> float:
        raise UnsupportedModel("a decode differs by 3.0e-01")

    monkeypatch.setattr("radixkv.models.selftest.self_test", fail)  # loading has its own name for it
    status, found = examine()
    assert (status, found["self-test"]) == (1, [("problem", "a decode differs by 3.0e-01")])


def test_the_room_and_the_folder_of_a_disk(examine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = ("--kv-memory", "96MiB", "--disk-cache", str(tmp_path / "disk"), "--disk-memory", "1GiB")
    monkeypatch.setattr("radixkv.disk.store.LEAST_FREE", 0)
    monkeypatch.setattr("radixkv.disk.store.LEAST_SHARE", 0.0)
    status, found = examine(*command)
    assert found["host memory"] == [("ok", "512 more blocks, 8,192 tokens: 48 MiB")]
    assert (status, found["disk"]) == (0, [("ok", "room for 173,632 tokens")])
    monkeypatch.setattr("radixkv.disk.store.LEAST_SHARE", 1.1)
    assert found_kind(examine(*command), "are free: nothing would be written") == "note"
    (tmp_path / "file").touch()
    for wrong, why in (
        (("--disk-cache", str(tmp_path / "file")), "disk_cache="),
        (("--disk-memory", "1MB"), "and 64 are the least"),
    ):
        assert found_kind(examine(*command, *wrong), why) == "problem"


def found_kind(examined: tuple[int, dict[str, list[tuple[str, str]]]], end: str) -> str:
    [(kind, text)] = examined[1]["disk"]
    assert end in text and examined[0] == (kind == "problem")
    return kind


def test_a_pool_that_does_not_fit_is_a_problem(examine: Any) -> None:
    status, found = examine("--kv-memory", "1kB")
    assert (status, found["pool"][0][0]) == (1, "problem")
    assert "holds no block" in found["pool"][0][1]


# ---- versions


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages, to be changed, under requirements of our own."""
    here = {"torch": "2.12.1+cu128", "triton": "3.7.0", "transformers": "5.20.0", "numpy": "2.1", "rich": "14.1"}
    stated = [
        "torch<2.14,>=2.11",
        "triton<3.10,>=3.6; sys_platform != 'none'",
        "transformers>=5.10,<6",
        "numpy>=1.26,<3",
    ]

    def version(name: str) -> str:
        if name not in here:
            raise doctor_checks.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(doctor_checks, "version", version)
    extras = ["pytest>=99; extra == 'dev'", "pywin32>=1; sys_platform == 'none'"]
    monkeypatch.setattr(doctor_checks, "requires", lambda _: [*stated, *extras])
    return here


def judged() -> dict[str, str]:
    return {each.about: each.status for each in doctor_checks.versions()}


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("torch", "2.10.0", "problem"),
        ("torch", "2.14.0+cpu", "note"),
        ("torch", "2.13.0.dev20260901", "ok"),
        ("torch", None, "problem"),
        ("triton", None, "note"),
        ("transformers", "6.0.0", "note"),
        ("numpy", "1.25", "problem"),
        ("numpy", None, "problem"),
    ],
)
def test_versions_outside_their_ranges(packages: dict[str, str], name: str, version: str | None, status: str) -> None:
    del packages[name]
    if version is not None:
        packages[name] = version
    assert judged()[name] == status


# ---- the machine


def test_telemetry_may_be_off_or_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.telemetry.socket_paths.folders", lambda: [tmp_path / "own"])
    monkeypatch.delenv("RADIXKV_MONITOR", raising=False)
    assert doctor._telemetry().status == "ok"
    (tmp_path / "own").chmod(0o755)
    assert (doctor._telemetry().status, "others can enter it" in doctor._telemetry().seen) == ("problem", True)
    monkeypatch.setenv("RADIXKV_MONITOR", "0")
    assert doctor._telemetry().status == "note"


def test_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Big GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 80 * 2**30))
    assert of(doctor._machine(True))[0] == ("ok", "Big GPU, sm_90, 10 GiB of 80 GiB free")
    monkeypatch.setattr(device, "unusable_gpu", lambda: "")
    assert len(of(doctor._machine(False))) == 1
    monkeypatch.setattr(device, "unusable_gpu", lambda: "the driver is too old")
    assert of(doctor._machine(False))[0] == ("note", "the driver is too old")


def test_threads_and_widths_that_slow_a_cpu_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(cores: int, dtype: torch.dtype = torch.float32) -> str:
        monkeypatch.setattr(doctor, "_cores", lambda: cores)
        return " ".join(seen for _, seen in of(doctor._faster_on_cpu(dtype, "torch"))[1:])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert notes(1) == ""
    assert notes(4) == "more threads: torch uses 1 of 4 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert notes(4).endswith(", as OMP_NUM_THREADS sets it")
    assert "widens KV in bfloat16" in notes(1, torch.bfloat16)
    assert "float64 takes twice" in notes(1, torch.float64)
    torch.set_num_threads(2)
    assert notes(1) == "fewer threads: torch uses 2, but the process has 1 cores"


def test_what_slows_a_gpu_down(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_obstacle", lambda _: "heads of 512 numbers do not fit")
    slow = replace(tiny, device=torch.device("cuda"))
    assert [said.partition(":")[0] for _, said in of(doctor._faster(slow))] == [
        "dtype='bfloat16'",
        "attention='triton'",
    ]
    fast = replace(slow, dtype=torch.bfloat16, attention="triton")
    assert of(doctor._faster(fast)) == []
    assert doctor._attention(fast).seen == "triton: the kernels serve every layer"
    assert doctor._why(fast) == ": the kernels serve every layer"
    assert doctor._why(slow) == ": heads of 512 numbers do not fit"


# ---- compiling in advance


def test_compiling_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "unusable_gpu", lambda: "the driver is too old")
    assert main(["doctor", "--compile", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "radixkv: --compile needs a GPU and Triton: the driver is too old\n"


def test_compiling_counts_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine of few blocks loads and serves; it compiles one of two kernels, as Triton reports it."""
    triton = pytest.importorskip("triton")
    load = Engine.load

    def loading(model: str, config: EngineConfig, **given: Any) -> Engine:
        assert (given["block_size"], config.verify) == (8, "always")
        for hit in (False, True):
            triton.knobs.compilation.listener(src="", metadata={}, metadata_group={}, times=None, cache_hit=hit)
        return load(model, config, **given)

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    monkeypatch.setattr(triton_backend, "device_obstacle", lambda place: None)
    monkeypatch.setattr(Engine, "load", loading)
    assert main(["doctor", "--compile", "--device", "cpu", "--block-size", "8", "--kv-memory", "64MiB"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"1 kernels were compiled in \d+ s: /cache\n", said.out)
    assert re.fullmatch(r"(\r1 kernels, \d+ s){2}\n", said.err)
