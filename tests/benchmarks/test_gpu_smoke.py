"""benchmarks/gpu from end to end on tiny shapes, its kernels interpreted, so that no code runs on a GPU for the first
time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_part_runs_and_checks_what_it_times(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu"), "--smoke", "--here"]
    command += ["--stretch", "20", "--peers", str(tmp_path / "none"), "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["smoke"]
    assert not line["missed"]
    (path,) = tmp_path.glob("gpu-interpreter-*.json")
    result = json.loads(path.read_text())
    failed = [row for part in result["parts"].values() for row in part["rows"] if row.get("failed")]
    assert {row.get("peer") for row in failed} <= {"vLLM Triton", "SGLang Triton"}, failed  # their folder is not there
    for name in ("ceilings", "decode", "tree", "chunks", "engine", "profiles"):
        assert result["parts"][name]["status"] == "measured", name
    rows = {name: part["rows"] for name, part in result["parts"].items()}
    assert all(0 < row["error"] < 1e-2 for name in ("decode", "tree", "chunks") for row in rows[name])
    assert {row["layout"] for row in rows["decode"]} == {"paged", "contiguous", "resident"}
    for along, flat in zip(rows["tree"][::2], rows["tree"][1::2], strict=True):
        assert along["read_tokens"] < flat["read_tokens"] == flat["flat_tokens"]
    steps = {row["mode"]: row for row in rows["engine"] if row["case"].startswith("step")}
    assert steps["tree"]["kv_tokens"] < steps["flat"]["kv_tokens"]
    assert all(row["sdpa_backend"] for row in rows["chunks"])
    layers = [row for row in rows["profiles"] if row.get("what", "").endswith("a layer")]
    assert len(layers) == 2
    assert all(row["launches"] > 0 for row in layers)
    assert any(row.get("peer") == "radixkv" for row in rows["peers"])
    assert not list((tmp_path / "rows").iterdir())  # they are in the result
    assert (path.with_suffix(".md")).read_text().startswith("# GPU: interpreter")


@pytest.mark.long
def test_the_checks_of_a_new_gpu_all_have_rows() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu"), "--first-contact", "--smoke"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 17 and all(row.split("|")[2].strip() in {"held", "not checked"} for row in rows), rows


def printing(name: str, state: str, said: str) -> str:
    """Return a statement that prints a row."""
    row = json.dumps({"name": name, "state": state, "said": said})
    return f"print({'row ' + row!r}, flush=True)"


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """first_contact, as on a GPU, with checks that are scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu import device, first_contact

    monkeypatch.setattr(device, "find", lambda smoke: device.Device(torch.device("cpu"), "test", 2, 9, 0, 0, True))
    monkeypatch.setattr(first_contact, "_sanitizer", lambda: None)
    return first_contact


def test_a_check_that_fails_or_dies_or_hangs_stops_no_other(contact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said, asked = subprocess.Popen, list[str](), list[str]()
    worker = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid)"
    )
    scripts = {
        "kernels": f"print('a line'); {printing('k', 'FAILED', 'off')}",
        "graphs": f"{printing('g', 'held', '35')}; raise SystemExit(3)",
        "tree": "import os; os.abort()",
        "engine": f"{printing('e', 'held', '1')}; {worker}; import time; time.sleep(60)",
        "decode": "",
    }

    def start(command: list[str], **options: Any) -> Any:
        asked.append(command[command.index("--check") + 1])
        return run([sys.executable, "-c", scripts.get(asked[-1], printing(asked[-1], "held", ""))], **options)

    monkeypatch.setattr(contact.subprocess, "Popen", start)
    checks = [replace(check, limit_s=3) if check.name == "engine" else check for check in contact.CHECKS]
    monkeypatch.setattr(contact, "CHECKS", checks)
    assert contact.main(False, said.append) == 1
    assert asked == [check.name for check in contact.CHECKS if check.name != "memory"]
    table = next(each for each in said if each.startswith("\n| row"))
    found = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in table.splitlines()[3:]]
    assert ("memory", "not checked", "compute-sanitizer, a part of the CUDA toolkit, is not installed") in found
    assert ("k", "FAILED", "off") in found and "    a line" in said
    assert [row for row in found if row[0] in ("g", "graphs")] == [
        ("g", "held", "35"),
        ("graphs", "FAILED", "its process ended with 3"),
    ]
    assert ("tree", "FAILED", "its process ended with -6") in found
    assert ("e", "held", "1") in found and ("engine", "FAILED", "it took longer than 3 s") in found
    left = next(Path("/proc", each.strip(), "stat") for each in said if each.strip().isdigit())
    assert not left.exists() or " Z " in left.read_text()  # its worker ended with it
    assert ("decode", "FAILED", "it has no row") in found
    assert ("sampling", "held", "") in found
    assert [each.partition(":")[0] for each in said[-5:]] == ["kernels", "graphs", "tree", "engine", "decode"]


def test_all_rows_that_hold_end_in_success(contact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, command = subprocess.Popen, [sys.executable, "-c", printing("it", "held", "")]
    monkeypatch.setattr(contact.subprocess, "Popen", lambda _, **options: run(command, **options))
    said: list[str] = []
    assert contact.main(False, said.append) == 0 and said[-1].startswith("All rows hold")


@pytest.mark.parametrize(("reason", "status"), [("", 0), ("the NVIDIA driver 535 is too old", 2)])
def test_a_driver_that_torch_cannot_use_is_named(
    reason: str, status: int, contact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gpu.device"], "find", lambda smoke: "torch sees no GPU here")
    monkeypatch.setattr("radixkv.device.unusable_gpu", lambda: reason)
    said: list[str] = []
    assert contact.main(False, said.append) == status
    assert said == [f"nothing was checked: {reason or 'torch sees no GPU here'}"]
