"""Check the items of benchmarks/scoring.py, its comparison of two sides, and the process of radixkv."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scoring  # in the folder of the benchmarks, not installed
from scoring_parts import items, ours
from scoring_parts.items import Item
from scoring_parts.sides import HF, SCORE, Measured

from radixkv import Engine

Scores = list[list[tuple[float, bool]]]


def measured(scores: Scores, computed: int = 100) -> Measured:
    return Measured(scores, computed, wall_s=2.0, cpu_s=1.0, versions={}, details={}, asked="")


@pytest.mark.parametrize(
    ("scores", "other", "expected"),
    [
        ([[(-1.0, True), (-2.0, False)]], [[(-1.0, True), (-2.01, False)]], {"differs": True, "other_answers": 0}),
        ([[(-1.0, True), (-2.0, False)]], [[(-2.0, False), (-1.0, True)]], {"differs": True, "other_answers": 1}),
        ([[(-1.0, True), (-2.0, False)]], [[(-1.0, False), (-2.0, False)]], {"other_greedy_flags": 1}),
        ([[(-1.0, True), (-1.0001, False)]], [[(-1.0, True), (-0.9999, False)]], {"near_ties": 1, "differs": False}),
    ],
)
def test_differences(scores: Scores, other: Scores, expected: dict[str, Any]) -> None:
    found = scoring.difference(measured(scores), measured(other))
    assert {name: found[name] for name in expected} == expected


def test_rows_compare_with_hf_on_the_items_that_both_scored() -> None:
    asked = [Item(str(at), ["a", "b"], 0) for at in range(2)]
    right, wrong = [(-1.0, False), (-2.0, False)], [(-2.0, False), (-1.0, False)]
    rows = scoring.table({SCORE: measured([right, wrong], 40), HF: measured([right], 100)}, asked)
    assert rows[SCORE]["accuracy"] == 0.5 and rows[HF]["accuracy"] == 1.0
    assert rows[SCORE]["computed_an_item"] == 20 and rows[HF]["cpu_ms_an_item"] == 1000
    assert rows[SCORE]["reference"] == HF and rows[SCORE]["compared"] == 1 and "reference" not in rows[HF]
    assert "by 0 from hf, 0 answers, 0 greedy flags" in scoring.shown(rows)


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
