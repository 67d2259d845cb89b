"""Figures that tests note and that the run prints at its end. A conftest.py imports both names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figure = Callable[[str], None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of all tests."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    figures = [
        text for each in reports if each.when == "call" for name, text in each.user_properties if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        for text in figures:
            terminalreporter.write_line(text)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """A function that notes a line to print at the end of the run; it may come from another process."""
    return lambda text: record_property("figure", text)
