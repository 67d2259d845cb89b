"""What a generation_config.json suggests for sampling, and what of it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.models.sampling_params import SamplingParams
from radixkv.models.suggested import suggested
from tests.models.checkpoints.files import read, rewrite

ALL: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def of(**settings: Any) -> SamplingParams:
    return suggested(SimpleNamespace(generation_config=SimpleNamespace(**settings)))


def test_suggestions_come_from_the_file(one: Path) -> None:
    assert suggested(read(one)[0]) == SamplingParams()
    rewrite(one / "generation_config.json", do_sample=True, **ALL)
    assert suggested(read(one)[0]) == SamplingParams(**ALL)
    (one / "generation_config.json").unlink()
    assert suggested(read(one)[0]) == SamplingParams()


def test_where_nobody_chose_to_sample_only_the_penalty_counts() -> None:
    assert of(do_sample=False, **ALL) == SamplingParams(repetition_penalty=1.1)
    assert of(do_sample=None, **ALL) == of(**ALL) == SamplingParams(**ALL)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 2.5}, {"repetition_penalty": "x"}])
def test_a_value_out_of_range_is_left_out_alone(wrong: dict[str, Any]) -> None:
    [name] = wrong
    assert of(**{**ALL, **wrong}) == SamplingParams(**{key: value for key, value in ALL.items() if key != name})


def test_a_model_may_have_no_settings() -> None:
    assert suggested(object()) == SamplingParams()
