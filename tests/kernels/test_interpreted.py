"""Runs the tests of the Triton kernels in a process of their own, where Triton interprets what it would compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted(Path(__file__).parent.glob("interpreted/test_*.py"))

MODELS = ("test_engine.py", "test_graphs.py")
"""What loads models; the others start without transformers."""


@pytest.mark.parametrize("models", [False, True], ids=["kernels", "models"])
def test_kernels_in_the_interpreter(models: bool) -> None:
    """Two processes for all files: to start one takes as long as its tests."""
    paths = [str(path) for path in FILES if (path.name in MODELS) == models]
    assert len(paths) >= 2
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
