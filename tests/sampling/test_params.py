"""Sampling parameters are checked when they are created, and errors give the allowed range."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from radixkv.errors import InvalidInput
from radixkv.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an int >= 1, not 0"),
        ({"max_tokens": 2.0}, "max_tokens must be an int"),
        ({"max_tokens": True}, "max_tokens must be an int"),
        ({"min_tokens": -1}, "min_tokens must be an int >= 0"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) is larger than max_tokens \(8\)"),
        ({"temperature": -0.1}, "temperature must be a number >= 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"temperature": math.inf}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": -2}, "top_k must be an int >= -1"),
        ({"top_p": 0.0}, "top_p must be a number > 0 and <= 1"),
        ({"top_p": 1.1}, "top_p must be a number > 0 and <= 1"),
        ({"min_p": 1.1}, "min_p must be a number >= 0 and <= 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number >= 0.01 and <= 100"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be a number >= 0.01 and <= 100"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"presence_penalty": 3}, "presence_penalty must be a number >= -2 and <= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number >= -2 and <= 2"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, not be a list"),
        ({"logit_bias": {1: 101}}, "from -100 to 100, not 1 to 101"),
        ({"logit_bias": {-1: 1}}, "logit_bias must map token ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids"),
        ({"seed": 1.5}, "seed must be an int or None"),
        ({"stop": ["ok", ""]}, "stop must be a string or a list of strings, none of them empty"),
        ({"stop": 5}, "stop must be"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be ints >= 0"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list"),
        ({"n": 0}, "n must be an int >= 1"),
        ({"logprobs": -1}, "logprobs must be None or an int from 0 to 100"),
        ({"logprobs": 101}, "logprobs must be None or an int from 0 to 100"),
        ({"json_schema": "{"}, "json_schema is no JSON: "),
        ({"json_schema": "3"}, "json_schema must be a mapping, its JSON text, or True for any value, not 3"),
        ({"json_schema": False}, "json_schema must be a mapping"),
        ({"json_schema": [1]}, "json_schema must be a mapping"),
        ({"json_schema": {"const": math.nan}}, "json_schema is no JSON"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema is no JSON"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema is no valid Unicode"),
        ({"json_schema": {"description": "x" * 300_000}}, "json_schema has 300018 characters: at most 262144"),
        ({"regex": ""}, "regex must be a text, not ''"),
        ({"regex": 3}, "regex must be a text, not 3"),
        ({"regex": "a" * 20_000}, "regex has 20000 characters: at most 16384"),
        ({"grammar": b"start"}, "grammar must be a text"),
        ({"choice": ["a", ""]}, "choice must be a string or a list of strings, none of them empty"),
        ({"choice": ["a", 3]}, "choice must be a string or a list of strings"),
        ({"choice": ["a"] * 10_001}, "choice has 10001 texts: at most 10000"),
        ({"choice": ["a"], "regex": "b"}, "regex and choice are given: a reply has at most one constraint"),
    ],
)
def test_what_is_out_of_range_is_refused_with_what_is_allowed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SamplingParams(**wrong)


def test_later_changes_of_the_callers_lists_do_not_reach_in() -> None:
    bias, stops = {1: 1.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[2] = 5.0
    stops.append(4)
    assert (params.logit_bias, params.stop_token_ids) == ({1: 1.0}, (3,))


def test_parameters_are_frozen_hashable_and_travel() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_schema_is_kept_as_text_with_its_keys_in_their_order() -> None:
    schema = {"type": "object", "properties": {"z": {"const": "ü"}, "a": True}}
    text = '{"type":"object","properties":{"z":{"const":"ü"},"a":true}}'
    for given in (schema, text, json.dumps(schema, indent=2)):
        params = SamplingParams(json_schema=given)
        assert params.json_schema == text
        assert params.constraint == ("json_schema", text)
        assert params.but(n=2).constraint == params.constraint
        assert hash(params) == hash(SamplingParams(json_schema=schema))
    schema["type"] = "array"
    assert params.json_schema == text


def test_the_constraint_is_the_one_that_is_given() -> None:
    assert SamplingParams().constraint is None
    assert SamplingParams(choice="yes").constraint == ("choice", ("yes",))
    assert SamplingParams(regex="a+").constraint == ("regex", "a+")
    assert SamplingParams(grammar="start: /a/").constraint == ("grammar", "start: /a/")
    assert SamplingParams(json_schema=True).constraint == ("json_schema", "true")
    none: dict[str, Any] = dict.fromkeys(("json_schema", "regex", "grammar", "choice"))
    assert SamplingParams(**none).constraint is None
