"""Runs the tests of the Triton kernels in a process of their own, where Triton interprets what it would compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FILES = sorted(Path(__file__).parent.glob("interpreted/test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
