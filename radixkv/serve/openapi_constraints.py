"""Fields that constrain a reply, for the OpenAPI document; constraints.py does the checks that they describe."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.sampling.params import MOST_CHOICES
from radixkv.serve.constraints import FORMATS, OPTIONS_OF_OUTPUTS
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import ANYTHING, BOOLEAN, NOT_EMPTY, STRING, TEXT, array, maybe, obj

_SCHEMA: JsonObject = {"type": "object", "description": "A JSON schema."}
_NAMED: JsonObject = {"name": STRING, "description": STRING, "strict": BOOLEAN}


def guided() -> JsonObject:
    """vLLM's fields; a request has one constraint at most."""
    schema = {"anyOf": [_SCHEMA, {"type": "string", "description": "The text of a JSON schema."}, {"type": "null"}]}
    choices = maybe(array(NOT_EMPTY, least=1, most=MOST_CHOICES))
    grammar = {**maybe(NOT_EMPTY), "description": "In Lark's notation as llguidance reads it, or in GBNF."}
    kinds = {"json": schema, "regex": maybe(NOT_EMPTY), "choice": choices, "grammar": grammar}
    others = {"json_object": BOOLEAN, "structural_tag": {"type": "null"}, **dict.fromkeys(OPTIONS_OF_OUTPUTS, ANYTHING)}
    return {
        **{f"guided_{name}": each for name, each in kinds.items()},
        "structured_outputs": maybe(obj({**kinds, **others})),
    }


def response_format() -> JsonObject:
    """OpenAI's `response_format`."""
    text, anything, schema = ({"const": name} for name in FORMATS)
    forms = [
        obj({"type": text}, "type"),
        obj({"type": anything, "schema": maybe(_SCHEMA), **_NAMED}, "type"),
        obj({"type": schema, "json_schema": obj({"schema": _SCHEMA, **_NAMED}, "schema")}, "type", "json_schema"),
    ]
    return maybe({"anyOf": forms})


def text_format(kinds: Sequence[str] = FORMATS) -> JsonObject:
    """A format whose schema is a field of it, as in the Responses and Messages APIs."""
    forms = {
        "text": obj({"type": {"const": "text"}}, "type"),
        "json_object": obj({"type": {"const": "json_object"}, "schema": maybe(_SCHEMA), **_NAMED}, "type"),
        "json_schema": obj({"type": {"const": "json_schema"}, "schema": _SCHEMA, **_NAMED}, "type", "schema"),
    }
    return maybe({"anyOf": [forms[kind] for kind in kinds]})


def tool_choice(*, nested: bool) -> JsonObject:
    """OpenAI's `tool_choice`; in a `nested` one the name of a function is in an object of its own."""
    kind: JsonObject = {"const": "function"}
    named = {"function": obj({"name": TEXT}, "name")} if nested else {"name": TEXT}
    tools = array(obj({"type": {"enum": ["function", None]}, **named}, *named), least=1)
    allowed: JsonObject = {"mode": {"enum": ["auto", "required"]}, "tools": tools}
    fields = {"allowed_tools": obj(allowed, *allowed)} if nested else allowed
    return {
        "anyOf": [
            {"enum": ["auto", "none", "required", None]},
            obj({"type": kind, **named}, "type", *named),
            obj({"type": {"const": "allowed_tools"}, **fields}, "type", *fields),
        ]
    }
