"""Run the tests of the Triton kernels in processes of their own, in which Triton interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FOLDER = "tests/kernels/interpreted"
FILES = sorted(path.name for path in (ROOT / FOLDER).glob("test_*.py"))
# The others start without transformers.
WITH_MODELS = ("test_engine.py", "test_first_contact.py", "test_gpu_layers.py", "test_graphs.py", "test_virtual_gpu.py")

CASES, SHARD = 500, 20  # random cases of a long run, and of one process
FRESH = int(os.environ.get("RADIXKV_SEED") or 0) * 1000  # the seed of the first


def run(names: list[str], *options: str) -> None:
    paths = [f"{FOLDER}/{name}" for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("models", [False, True], ids=["kernels", "models"])
def test_kernels_in_the_interpreter(models: bool) -> None:
    """Two processes for all files: to start one takes as long as its tests."""
    run([name for name in FILES if (name in WITH_MODELS) == models])


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("RADIXKV_LONG") != "1", reason="a quarter of an hour for all: RADIXKV_LONG=1")
@pytest.mark.parametrize("first", range(FRESH, FRESH + CASES, SHARD))
def test_random_cases_in_the_interpreter(first: int) -> None:
    run(["test_random.py"], *(f"--seed={seed}" for seed in range(first, first + SHARD)))
