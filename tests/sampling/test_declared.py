"""Each declared parameter changes a reply, and each body takes it: a parameter that nothing reads is found here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv import Engine
from radixkv.sampling.params import SamplingParams, parameters
from radixkv.serve.anthropic.schemas import MessageSampling
from radixkv.serve.bodies import Body, read
from radixkv.serve.infill import InfillBody
from radixkv.serve.ollama.schemas import OllamaOptions
from radixkv.serve.sampling_fields import OF_BEAMS, sampling_params
from radixkv.serve.schemas import Sampling

DECLARED = {name: each for name, each in parameters(SamplingParams).items() if not each.inert}
BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"logit_bias": {5: 100}, "stop_token_ids": (5,)},
    "stop_token_ids": {"logit_bias": {5: 100}},
    "presence_penalty": {"max_tokens": 60},
    "ignore_eos": {"temperature": 0},
    "length_penalty": {"beam_width": 3, "max_tokens": 20},
    "early_stopping": {"beam_width": 3, "max_tokens": 40},
}
"""What a reply needs so that the example of a parameter changes it: a token that ends it, repeated tokens, beams."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("tiny", monitor=False, num_blocks=64) as engine:
        yield engine


def reply(engine: Engine, **given: Any) -> tuple[Any, ...]:
    [one] = engine.generate(["Hello there, how are you"], SamplingParams(**{"max_tokens": 12, "seed": 3, **given}))
    return one.text, one.token_ids, one.logprobs, one.prompt_logprobs, [each.token_ids for each in one.alternatives]


@pytest.mark.parametrize("name", DECLARED)
def test_the_example_of_a_parameter_changes_a_reply(engine: Engine, name: str) -> None:
    beside = BESIDE.get(name, {})
    assert reply(engine, **beside) != reply(engine, **beside, **{name: DECLARED[name].example}), name


@pytest.mark.parametrize("body", [Sampling, MessageSampling, InfillBody, OllamaOptions])
def test_each_body_takes_the_examples_of_its_parameters(body: type[Body]) -> None:
    renamed = {"stop": "stop_sequences"} if body is MessageSampling else {}
    for name, each in DECLARED.items():
        field = renamed.get(name, name)
        if not each.on_wire or (name == "n" and body is not Sampling):
            continue
        assert field in body.model_fields, name
        given = json.loads(json.dumps({"input_prefix": "", "input_suffix": "", field: each.example}))
        given = {known: value for known, value in given.items() if known in body.model_fields}
        params = sampling_params(read(body, given, None), 9, None, renamed=renamed, beams=name in OF_BEAMS)
        assert getattr(params, name) == getattr(SamplingParams(**{name: each.example}), name)
