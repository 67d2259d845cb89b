"""Dynamo's requests become the engine's field by field, or are refused by a field's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import SamplingParams
from radixkv.engine import Chunk, Completion
from radixkv.engine.output import Usage
from radixkv.errors import InvalidInput
from radixkv.fleet.requests import call_of, chunk_of, end_of
from radixkv.sampling.params import TokenLogprobs

DEFAULT = SamplingParams(temperature=0.6, top_k=20)


def request(**parts: Any) -> dict[str, Any]:
    """What the frontend sends, with null for absent fields."""
    stopping = dict.fromkeys(
        ("max_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "max_thinking_tokens")
    )
    sampling = dict.fromkeys(("n", "best_of", "temperature", "top_p", "seed", "use_beam_search", "guided_decoding"))
    groups: dict[str, Mapping[str, Any]] = {
        "stop_conditions": {**stopping, "stop_token_ids_hidden": [2]},
        "sampling_options": sampling,
        "output_options": {"logprobs": None, "prompt_logprobs": None, "return_tokens_as_token_ids": None},
        "routing": {"dp_rank": 0},
    }
    made: dict[str, Any] = {"model": "tiny", "token_ids": [5, 6], "eos_token_ids": [2], "annotations": []}
    made |= {name: {**group, **parts.pop(name, {})} for name, group in groups.items()}
    return made | parts


def test_absent_parameters_are_the_models_own() -> None:
    call = call_of(request(), DEFAULT)
    assert call.params == DEFAULT.but(stop_token_ids=(2,))
    assert (list(call.tokens), call.bounded, call.namespace, call.priority, call.session) == (
        [5, 6],
        False,
        None,
        0,
        None,
    )


SAME: dict[str, dict[str, Any]] = {
    "sampling_options": {
        "n": 3, "seed": 7, "top_k": 5, "temperature": 0.0, "min_p": 0.25, "presence_penalty": -1.5,
        "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    },
    "stop_conditions": {"max_tokens": 9, "min_tokens": 3, "ignore_eos": True, "stop": ("x",), "stop_token_ids": (9, 2)},
    "output_options": {"logprobs": 4, "prompt_logprobs": 0},
}  # fmt: skip


def test_each_field_has_its_parameter() -> None:
    params = call_of(request(**SAME), DEFAULT).params
    for fields in SAME.values():
        assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"json": {"type": "object"}}, ("json_schema", '{"type":"object"}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"choice": ["a", "b"]}, ("choice", ("a", "b"))),
    ],
)
def test_each_constraint_has_its_parameter(given: dict[str, Any], constraint: tuple[str, Any]) -> None:
    asked = request(sampling_options={"guided_decoding": given})
    assert call_of(asked, DEFAULT).params.constraint == constraint


def test_salt_priority_and_session_are_kept() -> None:
    given = request(routing={"cache_salt": "s", "priority": 5, "priority_jump": 5.0}, agent_context={"session_id": "x"})
    call = call_of(given, DEFAULT)
    assert (call.namespace, call.priority, call.session) == ("s", 5, "x")


@given(st.floats(0.01, 2).map(lambda value: round(value, 4)))
def test_numbers_are_those_that_the_client_wrote(value: float) -> None:
    """The frontend rounds them to 32 bits."""
    rounded = float(np.float32(value))
    assert call_of(request(sampling_options={"temperature": rounded}), DEFAULT).params.temperature == value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling_options": {"best_of": 4}}, "best_of"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "backend": "x"}}}, "backend"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "structural_tag"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "regex and choice"),
        ({"sampling_options": {"guided_decoding": {"json": False}}}, "json_schema"),
        ({"sampling_options": {"guided_decoding": {"choice": []}}}, "choice"),
        ({"routing": {"cache_salt": "x" * 257}}, "cache_salt"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"output_options": {"formatted_prompt": True}}, "formatted_prompt"),
        ({"routing": {"something": 1}}, "something"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"prefill_result": {}}, "prefill_result"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_its_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        call_of(request(**change), DEFAULT)


def test_a_chunk_has_its_token_its_stream_and_its_log_probabilities() -> None:
    logprobs = TokenLogprobs(-0.5, ((8, -0.25), (7, -0.5)))
    made = chunk_of(Chunk("a", (7,), 1, logprobs, "stop"))
    assert made["top_logprobs"] == [
        [
            {"rank": 2, "token_id": 7, "token": None, "logprob": -0.5},
            {"rank": 1, "token_id": 8, "token": None, "logprob": -0.25},
        ]
    ]
    del made["top_logprobs"]
    assert made == {"token_ids": [7], "index": 1, "log_probs": [-0.5], "finish_reason": "stop"}
    assert chunk_of(Chunk("", (7,))) == {"token_ids": [7], "index": 0}


def test_the_end_has_the_cost_of_all_replies_and_the_prompts_log_probabilities() -> None:
    usage = Usage(3, 2, 4, 5, 0.1, 0.2)
    prompt = (None, TokenLogprobs(-1.0, ((9, -0.5),), 2), TokenLogprobs(-0.25, ((6, -0.25),), 1))
    completion = Completion(
        "a", (1,), "stop", usage, prompt_logprobs=prompt, alternatives=(Completion("b", (1,), "stop", usage),)
    )
    made = end_of(completion, [4, 5, 6])
    assert made["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    entries = made["engine_data"]["prompt_logprobs"]
    assert entries == [
        None,
        {"9": {"logprob": -0.5, "rank": 1}, "5": {"logprob": -1.0, "rank": 2}},
        {"6": {"logprob": -0.25, "rank": 1}},
    ]
