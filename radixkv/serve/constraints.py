"""Declare the fields that constrain a reply: the formats of each API, and vLLM's names for constraints.

A request has at most one constraint on its text. Without the extra `radixkv[grammar]` it is refused later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from radixkv.errors import InvalidInput
from radixkv.sampling.params import MOST_CHOICES, SamplingParams, parameters
from radixkv.serve.bodies import (
    Body,
    ByField,
    ByType,
    OneError,
    Only,
    Several,
    Unread,
    broken,
    optional,
    taking,
)
from radixkv.serve.errors import bad_request

ANY_OBJECT = '{"type":"object"}'
_PARAMETERS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class ReplyConstraint:
    """A sampling parameter that constrains the reply, its checked value, and the field that gave it."""

    parameter: str
    value: Any
    field: str


# ---- types


def _checked(parameter: str) -> AfterValidator:
    """Annotate a value that a sampling parameter checks, and that becomes the value of the parameter."""
    kind = parameters(SamplingParams)[parameter].kind

    def check(value: Any) -> Any:
        try:
            return kind.checked(parameter, value)
        except InvalidInput as error:
            raise broken("", str(error).removeprefix(parameter).strip()) from error

    return AfterValidator(check)


_NOT_EMPTY: Any = Field(json_schema_extra={"minLength": 1})
Regex = Annotated[str, _NOT_EMPTY, _checked("regex")]
Grammar = Annotated[
    str, _NOT_EMPTY, _checked("grammar"), Field(description="In Lark's notation as llguidance reads it, or in GBNF.")
]
Choice = Annotated[
    Annotated[Several[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)],
    OneError(f"must be an array of 1 to {MOST_CHOICES} strings, none of them empty"),
    _checked("choice"),
]
Schema = Annotated[dict[str, Any], _checked("json_schema"), Field(description="A JSON schema.")]
SchemaOrText = Annotated[
    dict[str, Any] | str, ByType("a JSON schema (an object, or its text)"), _checked("json_schema")
]


# ---- formats


class NamedSchema(Body):
    """A schema in OpenAI's form."""

    schema_: Schema = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = optional("Without effect: every schema is enforced.")


class TextFormat(Unread):
    """A reply without a constraint."""

    type: Literal["text"]


class ObjectFormat(Body):
    """A reply that is a JSON object, of a schema if there is one."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class NestedSchemaFormat(Body):
    """A reply that follows a schema, as in OpenAI's `response_format`."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class SchemaFormat(NamedSchema):
    """A reply that follows a schema, as in the Responses and Messages APIs."""

    type: Literal["json_schema"]


AnyFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, ByField("type")]
NestedFormat = Annotated[TextFormat | ObjectFormat | NestedSchemaFormat, ByField("type")]


def of_format(given: Any, path: str) -> ReplyConstraint | None:
    """Return the constraint of a format, which is the field `path`; None for text."""
    match given:
        case NestedSchemaFormat():
            return ReplyConstraint("json_schema", given.json_schema.schema_, f"{path}.json_schema.schema")
        case ObjectFormat() | SchemaFormat():
            return ReplyConstraint("json_schema", given.schema_ or ANY_OBJECT, f"{path}.schema")
    return None


# ---- vLLM's fields


@taking(
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    structural_tag=Only(why="use tools, whose calls are constrained, or a grammar"),
)
class StructuredOutputs(Body):
    """The constraint of a reply in vLLM's form."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    regex: Regex | None = None
    choice: Choice | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class Guided(Body):
    """Constraints of a reply in vLLM's forms; a request has at most one."""

    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choice | None = None
    guided_grammar: Grammar | None = None
    structured_outputs: StructuredOutputs | None = None


def constraint_of(body: Guided, own: ReplyConstraint | None) -> ReplyConstraint | None:
    """Return the constraint of a body; `own` is the constraint that a field of the API gives.

    Raises ApiError for two constraints.
    """
    fields = vars(body)
    given = [(parameter, fields[f"guided_{kind}"], f"guided_{kind}") for kind, parameter in _PARAMETERS.items()]
    if (outputs := body.structured_outputs) is not None:
        values = (outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        paths = (f"structured_outputs.{kind}" for kind in _PARAMETERS)
        given += zip(_PARAMETERS.values(), values, paths, strict=True)
        given.append(("json_schema", ANY_OBJECT if outputs.json_object else None, "structured_outputs.json_object"))
    found = [] if own is None else [own]
    found += [ReplyConstraint(*each) for each in given if each[1] is not None]
    if len(found) > 1:
        message = f"{found[0].field} and {found[1].field} are given: a reply has at most one constraint"
        raise bad_request(message, found[1].field, "invalid_value")
    return found[0] if found else None
