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
WITH_MODELS = ("test_engine.py", "test_gpu_layers.py", "test_graphs.py")  # the others start without transformers
QUICK = (
    "test_attention.py::test_along_the_tree_equals_sequence_by_sequence",
    "test_backend.py",
    "test_blocks.py",
    "test_combinations.py::test_any_two_settings_meet",
    "test_edges.py::test_decodes_of_lengths_around_blocks",
    "test_layers.py::test_a_rotation_has_the_bits_of_torch",
    "test_streams.py::test_copies_of_blocks_do_not_make_the_host_wait",
)


def run(names: list[str]) -> None:
    paths = [f"{FOLDER}/{name}" for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
def test_some_tests_of_each_file_without_models_in_the_interpreter() -> None:
    assert {name.split("::")[0] for name in QUICK} == set(FILES) - set(WITH_MODELS)
    run(list(QUICK))


@pytest.mark.long
@pytest.mark.parametrize("models", [False, True], ids=["kernels", "models"])
def test_kernels_in_the_interpreter(models: bool) -> None:
    """Two processes for all files: to start one takes as long as its tests."""
    run([name for name in FILES if (name in WITH_MODELS) == models])
