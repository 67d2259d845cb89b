"""Fixtures: a model written by save_pretrained, in one file and in many."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.models.conftest import FAMILIES, make


@pytest.fixture(scope="module", autouse=True)
def _no_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in one file, in `one`, and in twelve, in `many`."""
    place = tmp_path_factory.mktemp("saved")
    model = make(FAMILIES["llama"]())
    model.save_pretrained(place / "one")
    model.save_pretrained(place / "many", max_shard_size="10KB")
    return place


@pytest.fixture
def one(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model in one file, to be changed."""
    return Path(shutil.copytree(saved / "one", tmp_path / "model"))


@pytest.fixture
def many(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model in twelve files, to be changed."""
    return Path(shutil.copytree(saved / "many", tmp_path / "model"))
