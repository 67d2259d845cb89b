"""The pieces that the OpenAPI document's schemas are made of. Knows no endpoint and no field."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject
from radixkv.serve.schemas import BIGGEST

BOOLEAN: JsonObject = {"type": ["boolean", "null"]}
STRING: JsonObject = {"type": ["string", "null"]}
ANYTHING: JsonObject = {"description": "Taken, and without effect."}
COUNT: JsonObject = {"type": "integer", "minimum": 0}
TEXT: JsonObject = {"type": "string"}


def obj(properties: JsonObject, *required: str) -> JsonObject:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: JsonObject, *, least: int = 0, most: int | None = None) -> JsonObject:
    """A list."""
    bounds = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bounds}


def maybe(schema: JsonObject) -> JsonObject:
    """The schema, or null, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def integer(low: int, high: int = BIGGEST) -> JsonObject:
    """A whole number, or null."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def number(low: float, high: float) -> JsonObject:
    """A number."""
    return {"type": "number", "minimum": low, "maximum": high}


def ref(name: str) -> JsonObject:
    """One of the document's own schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def answer(properties: JsonObject, **optional: JsonObject) -> JsonObject:
    """An object that has all of these properties, perhaps some of the optional ones, and may have more."""
    return {"type": "object", "properties": {**properties, **optional}, "required": list(properties)}
