"""The check of a schema's keywords: what is enforced, what is an annotation, and what is refused with its place."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import SamplingParams
from radixkv.errors import InvalidConstraint, InvalidInput
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.json_schema import MOST_DEPTH, MOST_PROPERTIES, MOST_VALUES, checked_schema
from tests.grammar.engines import STOP, tokenizer

INTEGER = {"type": "integer"}
KEYWORDS = [
    *(
        "a",
        "type",
        "enum",
        "const",
        "$ref",
        "$defs",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "items",
        "prefixItems",
        "format",
    ),
    *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxItems", "minLength"),
    *("pattern", "minimum", "exclusiveMaximum", "multipleOf", "uniqueItems", "$schema", "x-guidance", "title"),
]


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"not": INTEGER}, "/not", "not cannot be enforced"),
        ({"properties": {"a": {"contains": INTEGER}}}, "/properties/a/contains", "contains cannot be enforced"),
        ({"properties": {"a/b~c": {"if": {}}}}, "/properties/a~1b~0c/if", "if cannot"),
        ({"anyOf": [{}, {"propertyNames": {"maxLength": 3}}]}, "/anyOf/1/propertyNames", "propertyNames cannot"),
        ({"prefixItems": [{"unevaluatedItems": False}]}, "/prefixItems/0/unevaluatedItems", "cannot be enforced"),
        ({"format": "json-pointer"}, "/format", "'json-pointer' cannot be enforced; these can: date, date-time"),
        ({"format": ["uuid"]}, "/format", "format is a text, not a list"),
        ({"type": "text"}, "/type", "type is one of array, boolean"),
        ({"enum": 3}, "/enum", "a list of values, not a number"),
        ({"const": 2**60}, "/const", "beyond 2\\*\\*53"),
        ({"enum": [{"a": [2**60]}]}, "/enum", "beyond 2\\*\\*53"),
        ({"maximum": 2**60}, "/maximum", "beyond 2\\*\\*53"),
        ({"multipleOf": 0}, "/multipleOf", "above 0"),
        ({"multipleOf": 999_983}, "/multipleOf", "digits up to 10000"),
        ({"minItems": -1}, "/minItems", "an integer >= 0, not -1"),
        ({"maxLength": 1.5}, "/maxLength", "an integer >= 0, not 1.5"),
        ({"minProperties": 3}, "/minProperties", "a name may come twice"),
        ({"required": "a"}, "/required", "a list of names"),
        ({"anyOf": {"a": INTEGER}}, "/anyOf", "a list of schemas, not a number"),
        ({"properties": {"a": None}}, "/properties/a", "an object or a boolean, not null"),
        ({"$ref": "https://example.com/s"}, "/$ref", "leads into the same schema"),
        ({"$ref": "#/$defs/x"}, "/$ref", "leads nowhere"),
        ({"$schema": "https://example.com/own"}, "/$schema", "unknown draft"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "/oneOf", "use anyOf"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance", "the options are item_separator"),
        ({"items": {"x-guidance": {}}}, "/items/x-guidance", "stands in the whole schema only"),
        ({"properties": dict.fromkeys(map(str, range(MOST_PROPERTIES + 1)), True)}, "/properties", "at most 1000"),
        ({"enum": list(range(MOST_VALUES + 1))}, "/enum", "more than 10000 values"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, place: str, reason: str) -> None:
    with pytest.raises(InvalidConstraint, match=reason) as refused:
        checked_schema(schema)
    assert (refused.value.parameter, refused.value.place) == ("json_schema", place)
    assert f"at #{place}: " in str(refused.value)
    assert isinstance(refused.value, InvalidInput)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_depth_is_limited() -> None:
    assert checked_schema(nested(MOST_DEPTH))
    with pytest.raises(InvalidConstraint, match="inside each other") as refused:
        checked_schema(nested(MOST_DEPTH + 1))
    assert refused.value.place == "/items" * (MOST_DEPTH + 1)


@pytest.mark.parametrize(
    "annotation",
    [
        {"title": "T", "description": "D", "default": 3, "examples": [1]},
        {"$id": "https://example.com/x", "$comment": "c", "$anchor": "a"},
        {"readOnly": True, "writeOnly": True, "deprecated": True},
        {"contentEncoding": "base64", "contentMediaType": "image/png"},
        {"format": "int32"},
        {"discriminator": {"propertyName": "kind"}},
        {"nullable": True},
        {"unevaluatedProperties": True},
        {"x-order": 5, "enumNames": ["a"]},
    ],
)
def test_annotations_change_nothing(annotation: dict[str, Any]) -> None:
    assert checked_schema({"properties": {"a": {**INTEGER, **annotation}}}) == {"properties": {"a": INTEGER}}


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"type": "object", "properties": {"not": INTEGER, "title": {"type": "string"}, "format": True}}
    assert checked_schema(schema) == schema


def test_an_enforced_format_stays() -> None:
    assert checked_schema({"type": "string", "format": "uuid"}) == {"type": "string", "format": "uuid"}


def pet(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}, **more}, "required": ["kind"]}


@pytest.mark.parametrize(
    "branches",
    [
        [INTEGER, {"type": "string"}, {"type": ["null", "boolean"]}],
        [{"const": 1}, {"const": "1"}, {"enum": [2, 3]}],
        [pet("cat"), pet("dog", name={"type": "string"})],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        [{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": 3}],
        [
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
        ],
        [False, INTEGER],
    ],
)
def test_one_of_schemas_that_exclude_each_other_is_any_of_them(branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": {"cat": pet("cat"), "dog": pet("dog")}}
    checked = checked_schema(schema)
    assert "oneOf" not in checked and len(checked["anyOf"]) == len(branches)


@pytest.mark.parametrize(
    "branches",
    [
        [pet("cat"), pet("cat", name={"type": "string"})],
        [{"type": "object", "properties": {"a": INTEGER}}, {"type": "object", "properties": {"a": {"type": "string"}}}],
        [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"type": "object", "required": ["b"]}],
        [{"const": 1}, {"const": 1.0}],
        [True, INTEGER],
        [{"$ref": "#"}, INTEGER],
    ],
)
def test_one_of_schemas_that_may_overlap_is_refused(branches: list[Any]) -> None:
    with pytest.raises(InvalidConstraint, match="use anyOf"):
        checked_schema({"oneOf": branches})


@lru_cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), len(tokenizer()), {STOP})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES | st.sampled_from(["#", "#/$defs/a", "object", "uuid"])))
def test_nothing_but_a_refusal_is_raised(schema: dict[str, Any]) -> None:
    with suppress(InvalidConstraint):
        checked = checked_schema(schema)
        assert checked_schema(checked) == checked and "oneOf" not in checked
    with suppress(InvalidInput):
        assert compiler().matcher(SamplingParams(json_schema=schema)) is not None


def test_true_is_any_value_and_false_none() -> None:
    assert checked_schema(True) == {}
    assert checked_schema(False) == {"enum": []}


def test_the_target_of_each_reference_is_checked() -> None:
    limited = {"type": "array", "uniqueItems": True}
    with pytest.raises(InvalidConstraint, match="#/components/schemas/x/uniqueItems"):
        checked_schema({"$ref": "#/components/schemas/x", "components": {"schemas": {"x": limited}}})
    for place in ("#/properties/a/const", "#/default", "#/properties"):
        with pytest.raises(InvalidConstraint, match="leads to no schema"):
            checked_schema({"properties": {"a": {"const": limited}, "b": {"$ref": place}}, "default": limited})
    parts = {"x": {"items": {"$ref": "#/parts/y/0"}}, "y": [{"oneOf": [{"const": 1}, {"const": 2}]}, 5]}
    schema = {"$ref": "#/parts/x", "parts": parts}
    before = json.dumps(schema)
    assert checked_schema(schema)["parts"]["y"] == [{"anyOf": [{"const": 1}, {"const": 2}]}, 5]
    assert json.dumps(schema) == before
    with pytest.raises(InvalidConstraint, match="unknown keyword of another"):
        checked_schema({"anyOf": [{"$ref": "#/x"}, {"$ref": "#/x/y/z"}], "x": {"y": {"z": INTEGER}}})
    checked_schema({"items": {"$ref": "#"}, "prefixItems": [{"$ref": "#/items"}, {"$ref": "#/prefixItems/0"}]})
