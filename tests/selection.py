"""Select the parameters of a test that run in `make test`, and import large packages when a test needs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all values for `pytest.mark.parametrize`, marked long except for the quick ones.

    >>> [each if isinstance(each, str) else each.values for each in mostly_long(["lru", "fifo"], "lru")]
    ['lru', ('fifo',)]
    """
    every = list(values)
    assert all(value in every for value in quick), f"{quick} must be among {every}"
    return [value if value in quick else pytest.param(*_each(value), marks=pytest.mark.long) for value in every]


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Later:
    """A package that is imported at the first use of one of its names: each process collects all tests."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks
            raise AttributeError(name)
        return getattr(importlib.import_module(self._package), name)
