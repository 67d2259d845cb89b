"""Sampling parameters that a generation_config.json suggests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from radixkv.chat import Engine
from radixkv.sampling.params import SamplingParams, suggested
from tests.chat.worlds import byte_tokenizer
from tests.models.checkpoints.files import read, rewrite
from tests.models.conftest import GROUPED, make

ALL: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def of(**settings: Any) -> SamplingParams:
    return suggested(SimpleNamespace(generation_config=SimpleNamespace(**settings)))


def test_suggestions_come_from_the_file(one: Path) -> None:
    assert suggested(read(one)[0]) == SamplingParams()
    rewrite(one / "generation_config.json", do_sample=True, **ALL)
    assert suggested(read(one)[0]) == SamplingParams(**ALL)
    (one / "generation_config.json").unlink()
    assert suggested(read(one)[0]) == SamplingParams()


def test_without_a_choice_to_sample_only_the_penalty_counts() -> None:
    assert of(do_sample=False, **ALL) == SamplingParams(repetition_penalty=1.1)
    assert of(do_sample=None, **ALL) == of(**ALL) == SamplingParams(**ALL)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 2.5}, {"repetition_penalty": "x"}])
def test_a_value_out_of_range_is_left_out_alone(wrong: dict[str, Any]) -> None:
    [name] = wrong
    assert of(**{**ALL, **wrong}) == SamplingParams(**{key: value for key, value in ALL.items() if key != name})


def test_requests_and_turns_without_params_follow_the_file(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 300, "max_position_embeddings": 128}  # short replies
    config = {**GROUPED, **sizes, "eos_token_id": None}
    make(transformers.LlamaConfig(**config)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    with Engine.load(str(tmp_path), num_blocks=60, monitor=False) as engine:
        assert engine.default_params == SamplingParams()
        [greedy] = engine.generate([chat], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_k": 1}')
    with Engine.load(str(tmp_path), num_blocks=60, monitor=False) as engine:
        assert engine.default_params == SamplingParams(top_k=1)
        ids = engine.generate([chat])[0].token_ids
        assert ids[:40] == greedy.token_ids[: len(ids)]
        assert engine.chat().send("hello").token_ids == ids
        drawn = {engine.generate([chat], SamplingParams(max_tokens=40, seed=seed))[0].token_ids for seed in range(3)}
        assert len(drawn) == 3  # params that are passed are used as they are
