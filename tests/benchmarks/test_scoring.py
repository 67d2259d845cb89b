"""Check the items of benchmarks/scoring.py, its comparison of two sides, and the process of radixkv."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scoring  # in the folder of the benchmarks, not installed
from scoring_parts import items, ours, sides
from scoring_parts.items import CHOICES, Item
from scoring_parts.sides import ALONE, HF, SCORE, SERVED, Measured, Run

from radixkv import Engine

Scores = list[list[tuple[float, bool]]]


def measured(scores: Scores, computed: int = 100) -> Measured:
    return Measured(scores, computed, wall_s=2.0, cpu_s=1.0, versions={}, details={}, asked="")


def test_items_have_four_different_choices_and_different_questions() -> None:
    made = items.items(1000)
    assert all(len(set(item.choices)) == CHOICES for item in made)
    assert len({item.question for item in made}) == 1000
    right = Counter(item.answer for item in made)
    assert set(right) == set(range(CHOICES)) and min(right.values()) > 200
    assert made[:20] == items.items(20) != items.items(20, seed=24)


def test_right_choices_are_right() -> None:
    for item in items.items(400):
        asked, right = item.question, item.choices[item.answer]
        if "How much" in asked:
            one, other = (int(word.rstrip("?")) for word in asked.split() if word.rstrip("?").isdigit())
            assert right.endswith(f" is {one + other}.")
        if "capital" in asked:
            country = asked.split()[-1].rstrip("?")
            assert right == f"The capital of {country} is {items.CAPITALS[country]}."


def test_the_task_has_the_items_and_shots(tmp_path: Path) -> None:
    made = items.items(7)
    task = json.loads(items.write_task(tmp_path / "task", made[5:], made[:5]).read_text())
    files = {split: json.loads(Path(file).read_text()) for split, file in task["dataset_kwargs"]["data_files"].items()}
    assert [Item(**row) for row in files["test"]] == made[5:]
    assert [Item(**row) for row in files["train"]] == made[:5] and task["num_fewshot"] == 5


def test_a_prompt_is_solved_items_and_the_question() -> None:
    shot, item = Item("One?", ["A.", "B.", "C.", "D."], 1), Item("Two?", ["E.", "F.", "G.", "H."], 0)
    assert items.prompt(item, [shot]) == "Question: One?\nAnswer: B.\n\nQuestion: Two?\nAnswer:"
    assert items.continuations(item) == [" E.", " F.", " G.", " H."]


def test_equal_scores_do_not_differ() -> None:
    one = measured([[(-1.0, True), (-2.0, False)], [(-3.0, False), (-2.5, False)]])
    other = measured([[(-1.0001, True), (-2.0, False)]])
    found = scoring.difference(one, other)
    assert found["compared"] == 1 and not found["differs"]
    assert found["greatest_difference"] == pytest.approx(1e-4, rel=0.01)
    assert one.choices == [0, 1]


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


def test_sides_without_a_harness_are_left_out_with_the_reason() -> None:
    assert scoring.present([SCORE, SERVED], Path("python")) == ([SCORE, SERVED], None)
    wanted, missing = scoring.present([SCORE, ALONE, SERVED, HF], None)
    assert wanted == [SCORE, ALONE] and missing is not None and missing.startswith("serve and hf need")


def test_a_kept_result_is_taken_for_the_same_prompts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = items.items(4)
    run = Run(Path("model.gguf"), made[:2], made[2:3], tmp_path, 1, None)
    calls: list[Run] = []

    def way(given: Run) -> Measured:
        calls.append(given)
        return Measured([[(-1.0, True)]], 1, 1.0, 1.0, {}, {}, given.digest)

    monkeypatch.setitem(sides.WAYS, HF, way)
    first = sides.measured(HF, run, resume=True)
    again = sides.measured(HF, run, resume=True)
    assert len(calls) == 1 and again.scores == [[[-1.0, True]]] == [[list(first.scores[0][0])]]
    assert again.details == {"earlier_run": 1.0}
    sides.measured(HF, run, resume=False)
    sides.measured(HF, Run(Path("model.gguf"), made[:2], made[3:], tmp_path, 1, None), resume=True)
    assert len(calls) == 3


@pytest.mark.long
def test_a_failed_process_is_reported_with_its_log(tmp_path: Path) -> None:
    run = Run(Path("no-such-model.gguf"), items.items(1), [], tmp_path, 1, None)
    with pytest.raises(sides.SideError, match=r"score failed with status 1(.|\n)*no-such-model"):
        sides.measured(SCORE, run, resume=False)


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
