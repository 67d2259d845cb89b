"""Tests in Triton's interpreter, which must be chosen before Triton is imported and holds for a whole process.

A command line that names a path in this folder chooses it, for the tests of other folders, too. Any other run leaves
these out, and `test_interpreted.py` starts a process for them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Choose the interpreter if the command line names this folder."""
    paths = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    if "triton" not in sys.modules and any(HERE in (path, *path.parents) for path in paths):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect() -> bool | None:
    """Leave these tests out where Triton compiles."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `--seed` repeat cases of `test_random.py`."""
    parser.addoption("--seed", action="append", type=int, default=[], help="a case of test_random.py; may be repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the cases of `--seed`, or the fixed examples."""
    if "seed" in metafunc.fixturenames and (seeds := getattr(metafunc.module, "EXAMPLES", None)):
        metafunc.parametrize("seed", metafunc.config.getoption("--seed") or seeds)
