"""Check the items of benchmarks/scoring.py, its comparison of two sides, and the process of radixkv."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scoring_parts import items, ours

from radixkv import Engine


def test_sharing_computes_less_and_scores_the_same() -> None:
    made = items.items(8)
    prompts, choices = [items.prompt(item, made[:2]) for item in made[2:]], [*map(items.continuations, made[2:])]
    found = []
    for prefix_cache in (True, False):
        with Engine.load("tiny", num_blocks=256, monitor=False, prefix_cache=prefix_cache) as engine:
            found.append(ours.score(engine, prompts, choices))
    shared, alone = found
    for mine, theirs in zip(chain(*shared["scores"]), chain(*alone["scores"]), strict=True):
        assert mine == (pytest.approx(theirs[0], abs=1e-3), theirs[1])
    assert shared["computed"] < alone["computed"] / 4
