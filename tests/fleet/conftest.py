"""Fixtures of the tests with a real fleet. `make fleet` installs Dynamo and runs them; no other run does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.processes import Fleet, fleet

pytest.importorskip("dynamo.llm", reason="needs Dynamo: make fleet")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Fleet]:
    """A frontend and two workers."""
    with fleet(tmp_path, 2) as made:
        yield made


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a process."""
    made = Fleet(tmp_path)
    yield made
    made.close()
