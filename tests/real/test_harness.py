"""lm-evaluation-harness gets the same log-likelihoods from `radixkv serve` as from its own `hf` backend.

`make harness` installs the harness and runs these tests; without it they are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scoring  # in the folder of the benchmarks, not installed
from scoring_parts import items
from scoring_parts.sides import HF, SCORE, SERVED, Measured, Run, measured

ITEMS, SHOTS = 12, 5


@pytest.fixture(scope="module")
def run(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    harness = scoring.installed_harness()
    if harness is None:
        pytest.skip("lm-evaluation-harness is not installed; `make harness` installs it")
    made = items.items(SHOTS + ITEMS)
    return Run(model_file, made[SHOTS:], made[:SHOTS], tmp_path_factory.mktemp("scoring"), 1, harness)


@pytest.fixture(scope="module")
def hf(run: Run) -> Measured:
    return measured(HF, run, resume=False)


@pytest.mark.parametrize("side", [SCORE, SERVED])
def test_scores_match_the_hf_backend(side: str, run: Run, hf: Measured, figure: Figure) -> None:
    found = measured(side, run, resume=False)
    result = scoring.difference(found, hf)
    figure(f"{side}: {result}, computed tokens {found.computed} and {hf.computed}")
    assert result["compared"] == ITEMS and not result["differs"]
    assert result["other_greedy_flags"] == 0
    assert found.choices == hf.choices or result["near_ties"]
    assert found.computed < hf.computed / 4, "the choices of an item share its prompt, and the items share their shots"
