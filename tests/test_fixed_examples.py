"""Hypothesis tries the same examples in every run, with any set of imported modules (tests/conftest.py)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CONSTANT = 7_364_529_187_331


def examples() -> list[int]:
    tried: list[int] = []

    @settings(derandomize=True, max_examples=300)
    @given(st.integers(0, 10**13))
    def try_numbers(number: int) -> None:
        tried.append(number)

    try_numbers()
    return tried


def test_examples_do_not_depend_on_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = examples()
    assert len(set(before)) > 100
    path = tmp_path / "constants.py"
    path.write_text(f"CONSTANT = {CONSTANT}\n")
    spec = importlib.util.spec_from_file_location("constants_of_a_project", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert examples() == before
    assert CONSTANT not in before


def test_examples_are_fixed_unless_a_seed_is_given() -> None:
    assert settings().derandomize is not bool(os.environ.get("RADIXKV_SEED"))
