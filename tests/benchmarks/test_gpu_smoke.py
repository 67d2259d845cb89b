"""benchmarks/gpu from end to end on tiny shapes, its kernels interpreted, so that no code runs on a GPU for the first
time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
@pytest.mark.skipif(os.environ.get("RADIXKV_LONG") != "1", reason="takes 15 s of a core: RADIXKV_LONG=1 runs it")
def test_the_checks_of_a_new_gpu_run_in_order() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu"), "--first-contact", "--smoke"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    places = [done.stdout.index(f"- {name}: ") for name in ("kernels", "capture", "engine")]
    assert places == sorted(places)
    assert "10 replies are equal; steps that no graph served: 0" in done.stdout


def test_a_check_that_fails_stops_the_others_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu import device, first_contact

    place = device.Device(torch.device("cpu"), "test", 2, 9, 0, 0, True)
    said: list[str] = []
    ran: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[command.index("--check") + 1])
        return subprocess.CompletedProcess(command, int(ran[-1] == "capture"), "the last lines\n")

    monkeypatch.setattr(device, "find", lambda smoke: place)
    monkeypatch.setattr(first_contact.subprocess, "run", run)
    assert first_contact.main(False, said.append) == 1
    assert ran == ["kernels", "capture"]
    assert "torch does not recover from a failed capture" in said[-1]
