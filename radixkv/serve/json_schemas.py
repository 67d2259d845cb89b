"""JSON schemas for the OpenAPI document: of bodies, from their models, and pieces for the schemas of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from radixkv.serve.bodies import LENIENT, STRICT, Body
from radixkv.serve.fields import JsonObject

STRING: JsonObject = {"type": ["string", "null"]}
COUNT: JsonObject = {"type": "integer", "minimum": 0}
TEXT: JsonObject = {"type": "string"}
_REFERENCE = "#/components/schemas/{model}"


# ---- bodies


def bodies(models: Sequence[type[Body]], *, strict: bool) -> JsonObject:
    """Return the schemas of bodies and of their parts by name, for a strict or a lenient server."""
    wanted = [(model, "validation") for model in models]
    _, found = models_json_schema(wanted, ref_template=_REFERENCE, schema_generator=_Generator)  # type: ignore[arg-type]
    schemas: JsonObject = _for_server(found["$defs"], strict)
    return schemas


class _Generator(GenerateJsonSchema):
    """Leave out titles, which repeat the names of fields, and defaults, which are null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False for each field."""
        return False

    def default_schema(self, schema: Any) -> JsonObject:
        """Return the schema of a field without its default."""
        return self.generate_inner(schema["schema"])


def _for_server(schema: Any, strict: bool) -> Any:
    """Return a schema with the fields of one kind of server; objects of a strict one have declared fields only."""
    if isinstance(schema, list):
        return [_for_server(each, strict) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if LENIENT in schema:
        chosen = schema[STRICT if strict else LENIENT]
        return {**chosen, **{name: each for name, each in schema.items() if name not in (LENIENT, STRICT)}}
    whole = {name: _for_server(each, strict) for name, each in schema.items()}
    return {**whole, "additionalProperties": False} if strict and "properties" in whole else whole


def ref(name: str) -> JsonObject:
    """A reference to one of the document's schemas."""
    return {"$ref": _REFERENCE.format(model=name)}


# ---- responses


def array(items: JsonObject, *, least: int = 0) -> JsonObject:
    """An array of at least `least` items."""
    return {"type": "array", "items": items, "minItems": least}


def maybe(schema: JsonObject) -> JsonObject:
    """A schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def answer(properties: JsonObject, **optional: JsonObject) -> JsonObject:
    """An object with all of these properties, perhaps some of the optional ones, and perhaps others."""
    return {"type": "object", "properties": {**properties, **optional}, "required": list(properties)}
