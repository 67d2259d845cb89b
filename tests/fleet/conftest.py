"""Fixtures of the tests with a real fleet. `make fleet` installs Dynamo and runs them; no other run does."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fleet.processes import Fleet, fleet


def pytest_ignore_collect() -> bool | None:
    """Leave these tests out without Dynamo, also where tests of other folders run."""
    return None if find_spec("dynamo") else True


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
