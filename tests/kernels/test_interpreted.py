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


def run(names: list[str]) -> None:
    paths = [f"{FOLDER}/{name}" for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("models", [False, True], ids=["kernels", "models"])
def test_kernels_in_the_interpreter(models: bool) -> None:
    """Two processes for all files: to start one takes as long as its tests."""
    run([name for name in FILES if (name in WITH_MODELS) == models])
