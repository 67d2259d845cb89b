"""Schemas over every keyword that can be enforced, made from a table of keywords and values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

# For each type: keywords, alone and together, with the values to try.
STRINGS: list[Schema] = [
    {},
    {"minLength": 3},
    {"maxLength": 4},
    {"minLength": 2, "maxLength": 2},
    {"pattern": "b"},
    {"pattern": "^a.*z$", "maxLength": 8},
    {"pattern": r"^\d{2,4}-\w+$", "maxLength": 12},
    {"pattern": '^[^"\\\\/]*$', "maxLength": 5},
    {"pattern": "^(?:ä|ö|日本|🙂)+$", "maxLength": 3},
    {"const": ""},
    {"const": "日本 🙂 ä"},
    {"enum": ["red", "green", "blue", "redder", "", "🙂"]},
    {"enum": ["a/b", "a\\b", 'a"b', "{", "}", "[", "null", "1"]},
]
FORMATS = ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
INTEGERS: list[Schema] = [
    {"minimum": 0, "maximum": 9},
    {"minimum": 3, "maximum": 3},
    {"minimum": -5, "maximum": 5},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 2},
    {"minimum": 10**6, "maximum": 10**6 + 17},
    {"minimum": 1, "maximum": 100, "multipleOf": 7},
    {"minimum": 0, "maximum": 10_000, "multipleOf": 250},
    {"multipleOf": 3, "minimum": -30, "maximum": 30},
    {"const": 0},
    {"enum": [1, 10, 100, -1]},
    {"minimum": 0.5, "maximum": 2.5},
]
NUMBERS: list[Schema] = [
    {"minimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"minimum": 3.14, "maximum": 3.15},
    {"const": 1.5},
    {"enum": [0.1, 0.25, 3]},
    {"minimum": 0, "maximum": 10, "multipleOf": 0.25},
    {"minimum": 0, "maximum": 1, "multipleOf": 0.01},
]
OTHERS: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"const": None},
    {"enum": [None, False, 0, "", "x"]},
    {"const": {"a": [1, {"b": None}], "c": "d"}},
    {"const": []},
    {"const": {}},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    {"type": ["string", "boolean"], "maxLength": 3},
]
SHORT: Schema = {"type": "string", "maxLength": 4}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
ARRAYS: list[Schema] = [
    {"items": DIGIT, "maxItems": 3},
    {"items": DIGIT, "minItems": 2, "maxItems": 4},
    {"maxItems": 0},
    {"items": False},
    {"prefixItems": [DIGIT, SHORT], "items": False},
    {"prefixItems": [{"const": "x"}], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"prefixItems": [DIGIT, DIGIT, DIGIT], "minItems": 1, "maxItems": 2},
    {"items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
    {"items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
]
OBJECTS: list[Schema] = [
    {"properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
    {"properties": {"a": DIGIT, "b": SHORT, "c": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
    {"properties": {"z": DIGIT, "a": DIGIT}, "required": ["a", "z"], "additionalProperties": False},
    {"properties": {"a": DIGIT}, "required": ["a", "b"], "additionalProperties": DIGIT, "maxProperties": 3},
    {"additionalProperties": DIGIT, "maxProperties": 2},
    {"maxProperties": 0},
    {"additionalProperties": False},
    {"patternProperties": {"^n": DIGIT, "^s": SHORT}, "additionalProperties": False, "maxProperties": 3},
    {
        "properties": {"x1": SHORT},
        "patternProperties": {"^y": DIGIT},
        "additionalProperties": False,
        "maxProperties": 2,
        "required": ["x1"],
    },
    {
        "properties": {'quote"d': DIGIT, "sl/ash": DIGIT, "ü": DIGIT, "": DIGIT},
        "required": ['quote"d', "sl/ash", "ü", ""],
        "additionalProperties": False,
    },
    {"properties": {"never": False, "a": DIGIT}, "required": ["a"], "additionalProperties": False},
    {"properties": {"any": True}, "required": ["any"], "additionalProperties": False},
]
CAT: Schema = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": DIGIT},
    "required": ["kind", "lives"],
    "additionalProperties": False,
}
DOG: Schema = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": SHORT},
    "required": ["kind", "name"],
    "additionalProperties": False,
}
COMBINED: list[Schema] = [
    {"anyOf": [DIGIT, SHORT, {"type": "null"}]},
    {"anyOf": [CAT, DOG]},
    {"anyOf": [{"const": "a"}, {"const": "ab"}, {"const": "abc"}]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [{"const": 1}, {"const": "1"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 6}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"properties": {"b": SHORT}, "required": ["b"], "maxProperties": 2},
        ]
    },
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    {
        "$defs": {"a b": SHORT, "c/d": DIGIT},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/a%20b"}, {"$ref": "#/$defs/c~1d"}],
        "items": False,
        "minItems": 2,
    },
    {
        "definitions": {
            "pet": {"oneOf": [{"$ref": "#/definitions/cat"}, {"$ref": "#/definitions/dog"}]},
            "cat": CAT,
            "dog": DOG,
        },
        "$ref": "#/definitions/pet",
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {
        "type": "object",
        "properties": {"v": DIGIT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v", "children"],
        "additionalProperties": False,
    },
    {
        "$defs": {"d": DIGIT},
        "type": "array",
        "items": {"$ref": "#/$defs/d", "maximum": 4},
        "minItems": 1,
        "maxItems": 3,
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [DIGIT, SHORT],
        "additionalItems": False,
        "minItems": 2,
    },
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/x",
        "type": "integer",
        "minimum": 1,
        "maximum": 2,
    },
]
ANNOTATED: list[Schema] = [
    {**DIGIT, "title": "Digit", "description": "One digit.", "default": 5, "examples": [1, 2], "$comment": "x"},
    {**SHORT, "format": "password", "readOnly": True, "deprecated": True, "x-order": 1},
    {"type": "array", "items": DIGIT, "maxItems": 2, "uniqueItems": False},
]


def schemas() -> Iterator[tuple[str, Schema]]:
    """Yield (name, schema): each keyword alone, in arrays, in objects, and as one of two alternatives."""
    leaves: list[tuple[str, Schema]] = []
    for type_, table in (("string", STRINGS), ("integer", INTEGERS), ("number", NUMBERS)):
        leaves += [(f"{type_} {_keys(each)} {n}", {"type": type_, **each}) for n, each in enumerate(table)]
    leaves += [(f"format {name}", {"type": "string", "format": name}) for name in FORMATS]
    for label, table in (("other", OTHERS), ("combined", COMBINED), ("annotated", ANNOTATED)):
        leaves += [(f"{label} {_keys(each)} {n}", each) for n, each in enumerate(table)]
    leaves += [(f"array {_keys(each)} {n}", {"type": "array", **each}) for n, each in enumerate(ARRAYS)]
    leaves += [(f"object {_keys(each)} {n}", {"type": "object", **each}) for n, each in enumerate(OBJECTS)]
    yield from leaves
    inner = [(name, schema) for name, schema in leaves if not _is_whole(schema)]
    for name, schema in inner:
        yield f"items: {name}", {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
    for name, schema in inner[::2]:
        properties = {"first": schema, "second": DIGIT}
        yield (
            f"property: {name}",
            {"type": "object", "properties": properties, "required": ["first", "second"]} | CLOSED,
        )
    for (one, first), (other, second) in list(combinations(inner, 2))[::37]:
        yield f"anyOf: {one} | {other}", {"anyOf": [first, second]}


CLOSED: Schema = {"additionalProperties": False}


def _keys(schema: Schema) -> str:
    return "+".join(schema) or "alone"


def _is_whole(schema: Schema) -> bool:
    """Whether references or drafts bind a schema to the top."""
    return any(key in schema for key in ("$ref", "$defs", "definitions", "$schema")) or "'$ref'" in str(schema)
