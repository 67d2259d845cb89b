"""Pieces of JSON schemas for the OpenAPI document: types, objects and the sampling parameters."""

from __future__ import annotations

from typing import Any

from radixkv.sampling.params import (
    EarlyStopping,
    Integer,
    Number,
    Parameter,
    SamplingParams,
    Texts,
    TokenBias,
    TokenIds,
    parameters,
)
from radixkv.serve.fields import JsonObject

BOOLEAN: JsonObject = {"type": ["boolean", "null"]}
STRING: JsonObject = {"type": ["string", "null"]}
ANYTHING: JsonObject = {"description": "Taken, and without effect."}
IGNORED: JsonObject = {"description": "Ignored, and named in the answer's `Warning` if it asks for more than there is."}
COUNT: JsonObject = {"type": "integer", "minimum": 0}
TEXT: JsonObject = {"type": "string"}
TOKEN_ID: JsonObject = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
NOT_EMPTY: JsonObject = {"type": "string", "minLength": 1}
SESSION_KEY: JsonObject = {
    "type": ["string", "null"],
    "description": "Names the session of the request for the monitor. It does not isolate cached prefixes.",
}


def obj(properties: JsonObject, *required: str) -> JsonObject:
    """An object with these properties, and perhaps others, which are ignored."""
    return {"type": "object", "properties": properties, "required": list(required)}


def closed(schema: object) -> Any:
    """Return a schema whose objects have their listed properties only, as a strict server takes them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: closed(each) for name, each in schema.items()}
    return {**whole, "additionalProperties": False} if "properties" in whole and "required" in whole else whole


def array(items: JsonObject, *, least: int = 0, most: int | None = None) -> JsonObject:
    """An array of `least` to `most` items."""
    bounds = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bounds}


def maybe(schema: JsonObject) -> JsonObject:
    """A schema, or null, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def integer(low: int, high: int) -> JsonObject:
    """A whole number, or null."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def ref(name: str) -> JsonObject:
    """A reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def answer(properties: JsonObject, **optional: JsonObject) -> JsonObject:
    """An object with all of these properties, perhaps some of the optional ones, and perhaps others."""
    return {"type": "object", "properties": {**properties, **optional}, "required": list(properties)}


def sampling() -> JsonObject:
    """The sampling parameters of all endpoints, under their own names."""
    declared = {name: each for name, each in parameters(SamplingParams).items() if each.on_wire}
    others = [name for name in declared if name not in (*_FIRST, *_LAST)]
    return {name: _parameter(declared[name]) for name in (*_FIRST, *others, *_LAST)}


def _parameter(declared: Parameter) -> JsonObject:
    """A sampling parameter's type, with its range for HTTP clients."""
    schema = BOOLEAN
    match declared:
        case Integer():
            schema = integer(*declared.wire)
        case Number():
            low, high = declared.wire
            schema = maybe(
                {"type": "number", "exclusiveMinimum" if declared.above else "minimum": low, "maximum": high}
            )
        case TokenBias():
            bias = {"type": "number", "minimum": declared.low, "maximum": declared.high}
            schema = maybe({"type": "object", "patternProperties": {_TOKEN: bias}, "additionalProperties": False})
        case Texts():
            text = {"type": "string", "minLength": 1, "maxLength": declared.wire_longest}
            schema = maybe({"anyOf": [text, array(text, most=declared.wire_most)]})
        case TokenIds():
            schema = maybe(array(TOKEN_ID))
        case EarlyStopping():
            schema = {"enum": [True, False, "never", None]}
    return {**schema, "description": declared.description} if declared.description else schema


# The order in the document: these first and last, the others between them as declared.
_FIRST, _LAST = ("n", "temperature", "top_p"), ("min_tokens", "ignore_eos")
_TOKEN = "^[0-9]{1,10}$"
