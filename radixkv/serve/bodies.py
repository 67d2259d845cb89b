"""Read request bodies that are declared as Pydantic models: types, ranges and the OpenAPI schema have one source.

A wrong field raises ApiError 400 with one sentence that names the field, also in models that check rules between their
fields. Null counts as absent, 2.0 is a whole number, and "1" and true are not. Fields without effect are collected, so
that the response can name them; a strict server refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from radixkv.serve.errors import ApiError, bad_request
from radixkv.serve.fields import IgnoredFields, JsonObject, kind_of, shown

LENIENT, STRICT = "x-lenient", "x-strict"  # schemas of a field for the two kinds of servers
_MISSING = "missing_required_parameter"
_PLAIN = (str, NoneType, bool, int, float, dict, tuple)  # types of values without declared fields
_EXACT = {"exact": True}  # the context of a validation that refuses values without effect


class Body(BaseModel):
    """Declare an object in a body. Fields that it does not declare have no effect."""

    model_config = ConfigDict(strict=True)


class Unread(Body):
    """Declare an object whose other fields may have any value, and are not named as ignored."""

    @model_validator(mode="before")
    @classmethod
    def _declared_only(cls, given: Any) -> Any:
        return {name: given[name] for name in cls.model_fields if name in given} if isinstance(given, dict) else given


AnyBody = TypeVar("AnyBody", bound=Body)


def read(model: type[AnyBody], given: JsonObject, ignored: IgnoredFields | None) -> AnyBody:
    """Read a body; raise ApiError, which names the wrong field. O(bytes).

    Fields without effect are added to `ignored`; without it, they are refused. Only a body that has some is read twice.
    """
    try:
        return model.model_validate(given, extra="forbid", context=_EXACT)
    except ValidationError:
        pass
    try:
        body = model.model_validate(given, extra="allow")
    except ValidationError as error:
        raise _refusal(error) from None
    _collect(body, "", ignored)
    return body


def _collect(value: Body | list[Any], at: str, ignored: IgnoredFields | None) -> None:
    """Add the fields of a body that have no effect; raise ApiError for the first one without `ignored`. O(bytes)."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            if type(each) not in _PLAIN:
                _collect(each, f"{at}[{number}]", ignored)
        return
    fields = vars(value)
    for name, only in _restricted(type(value)).items():
        if not only.accepts(fields[name]):
            without_effect(joined((name,), at), only.refusal, ignored)
    for name, each in fields.items():
        if type(each) not in _PLAIN:
            _collect(each, f"{at}.{name}" if at else name, ignored)
    for name, each in (value.model_extra or {}).items():
        path = joined((name,), at)
        if ignored is None:
            raise bad_request(f"unknown field {path}: remove it, or check its spelling", path, "unknown_parameter")
        if each is not None:
            ignored.add(path)


@cache
def _restricted(model: type[Body]) -> Mapping[str, Only]:
    fields = model.model_fields.items()
    return {name: each for name, field in fields for each in field.metadata if isinstance(each, Only)}


def joined(place: Sequence[str | int], at: str = "") -> str:
    """Return the path of a field from its names and indices, after the path `at`; numbers below 0 are left out.

    >>> joined(("messages", 2, -1, "role"))
    'messages[2].role'
    """
    for part in place:
        if isinstance(part, int):
            at += f"[{part}]" if part >= 0 else ""
        else:
            name = shown(part).strip('"')
            at = f"{at}.{name}" if at else name
    return at


def refuse(path: str, why: str, code: str = "invalid_value") -> ApiError:
    """Return the error for a field whose value is not allowed; `why` is the rest of a sentence that its path begins."""
    return bad_request(f"{path} {why}", path, code)


def without_effect(path: str, why: str, ignored: IgnoredFields | None) -> None:
    """Add a field to the ignored ones; a strict server refuses it."""
    if ignored is None:
        raise refuse(path, why)
    ignored.add(path)


def broken(field: str, why: str, code: str = "invalid_value") -> PydanticCustomError:
    """Return the error of a validator of a model, about one of its fields."""
    return PydanticCustomError(code, "{why}", {"field": field, "why": why})


def needs(field: str, why: str, code: str) -> Any:
    """Return a validator for a model whose required field is not merely missing when it is absent or null."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and given.get(field) is None:
            raise broken(field, why, code)
        return given

    return model_validator(mode="before")(check)


# ---- types of fields


Anything = Annotated[Any, Field(description="Taken, and without effect.")]
SessionKey = Annotated[
    str, Field(description="Names the session of the request for the monitor. It does not isolate cached prefixes.")
]
CacheSalt = Annotated[
    str, Field(description="Names the namespace of the cache, as the header `X-RadixKV-Namespace` does.")
]
NotEmpty = Annotated[str, Field(min_length=1)]
"""A required text; an empty one counts as absent."""


def optional(about: str) -> Any:
    """Return the default of an optional field, which is null, with the field's description."""
    return Field(default=None, description=about)


def taking(*without_effect: str, **restricted: Only) -> Callable[[type[AnyBody]], type[AnyBody]]:
    """Return a decorator that adds optional fields that no code reads: for any value, or for a restricted one."""
    fields: dict[str, Any] = dict.fromkeys(without_effect, (Anything, None))
    fields |= {name: (Annotated[Any, only], None) for name, only in restricted.items()}
    return lambda model: create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


@dataclass(frozen=True)
class Whole:
    """Annotate a whole number from `low` to `high`, which may be written with a point."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a strict integer after a conversion."""
        number = core_schema.int_schema(strict=True, ge=self.low, le=self.high)
        return core_schema.no_info_before_validator_function(_whole, number)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class OneError:
    """Annotate a type whose errors, at any depth, are one sentence about the whole field.

    A value of another JSON type than `kind`, such as "an object", is a wrong type; without it, only a wrong value.
    """

    why: str
    kind: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the type with its errors replaced."""
        about: dict[str, Any] = {"why": self.why} | ({"kind": self.kind} if self.kind else {})
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="one", custom_error_message="{why}", custom_error_context=about
        )


@dataclass(frozen=True)
class AtLeastOne:
    """Annotate a list that is not empty; `why` is the sentence about an empty one."""

    why: str
    code: str = "invalid_value"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the list's schema with the check after it."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        """Return the schema for the OpenAPI document."""
        return {**handler(schema), "minItems": 1}

    def _check(self, value: list[Any]) -> list[Any]:
        if not value:
            raise broken("", self.why, self.code)
        return value


class Only:
    """Annotate a field that has no other values than `allowed` and null; `why` explains the refusal of others.

    In a `lenient` field other values are ignored, and only a strict server refuses them. The OpenAPI document of a
    lenient server has the first of `schemas`, and of a strict server the second.
    """

    def __init__(
        self, *allowed: Any, why: str, lenient: bool = False, schemas: tuple[JsonObject, JsonObject] | None = None
    ) -> None:
        """Without `allowed`, no value is accepted, or none has an effect."""
        self._allowed, self._lenient = allowed, lenient
        values = {"enum": [*allowed, None]} if allowed else {"type": "null"}
        self._schemas = schemas or (IGNORED if lenient else values, values)
        choices = " or ".join(map(json.dumps, allowed))
        self.refusal = f"can only be {choices} here: {why}" if allowed else f"is not supported: {why}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that refuses other values, in a lenient field only in an exact validation."""
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        """Return both schemas, from which the document takes one."""
        return dict(zip((LENIENT, STRICT), self._schemas, strict=True))

    def accepts(self, value: Any) -> bool:
        """Whether a value is null or allowed. Types are compared too: true is not 1."""
        return value is None or any(value == each and type(value) is type(each) for each in self._allowed)

    def _check(self, value: Any, about: core_schema.ValidationInfo[Any]) -> Any:
        if self.accepts(value) or (self._lenient and about.context is not _EXACT):
            return value
        raise broken("", self.refusal)


Prefer = partial(Only, lenient=True)


def other_values(field: str, *models: type[Body]) -> tuple[JsonObject, JsonObject]:
    """Return the schemas of a field whose values no model declares: a strict server takes none of them."""
    known = [
        value for model in models for value in _literals(model.model_fields[field].annotation) if value is not None
    ]
    return {"not": {"enum": [*known, None]}}, {"not": {}}


IGNORED: JsonObject = {"description": "Ignored, and named in the answer's `Warning` if it asks for more than there is."}


# ---- lists and unions

T = TypeVar("T")


@dataclass(frozen=True)
class _FirstError:
    """Annotate a list that fails at its first wrong item; Pydantic's own FailFast cannot be part of a generic type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the list."""
        return core_schema.list_schema(handler.generate_schema(get_args(source)[0]), strict=True, fail_fast=True)


Several = Annotated[list[T], _FirstError()]
"""A list that fails at its first wrong item."""


@dataclass(frozen=True)
class ByField:
    """Annotate a union of objects; the text in `field` chooses one.

    Each object declares its values as a Literal, perhaps with None for an absent field. An object without a Literal
    takes all other values.
    """

    field: str
    why: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a union whose error is about the field."""
        branches: dict[Any, int] = {}
        other: int | None = None
        for branch, model in enumerate(_branches(source), 1):
            values = _literals(model.model_fields[self.field].annotation)
            branches |= dict.fromkeys(values, -branch)
            other = other if values else -branch
        names = ", ".join(filter(None, branches))

        def branch_of(given: Any) -> int | None:
            if not isinstance(given, dict):
                return None
            value = given.get(self.field)
            if value is None:
                return branches.get(None)
            return branches.get(value, other) if isinstance(value, str) else other

        why = f"must be one of {names}" + (self.why and f": {self.why}")
        return _tagged(source, handler, branch_of, field=self.field, why=why, kind="an object")


def _literals(annotation: Any) -> list[Any]:
    """Return the values of a Literal, with None if it may be null."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    inside = [_literals(each) for each in get_args(annotation) if each is not NoneType]
    return [*inside[0], None] if inside and inside[0] else []


@dataclass(frozen=True)
class ByType:
    """Annotate a union of JSON types: the type of a value chooses the branch; `what` names them all."""

    what: str
    error: str = "union_type"  # another name makes it the error of a wrong value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a union whose error is about the field itself."""
        branches = {_json_type(each): -branch for branch, each in enumerate(_branches(source), 1)}
        why = f"must be {self.what}"
        return _tagged(source, handler, lambda given: branches.get(type(given)), why=why, error=self.error)


def _json_type(annotation: Any) -> type:
    """Return the Python type of the JSON that an annotation takes; unions of objects are objects."""
    if get_origin(annotation) is Annotated:
        return _json_type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return str
    kind = get_origin(annotation) or annotation
    return kind if kind in (str, bool, list) else dict


def _branches(source: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the only one."""
    return get_args(source) if get_origin(source) in (Union, UnionType) else (source,)


def _tagged(
    source: Any, handler: GetCoreSchemaHandler, branch_of: Callable[[Any], int | None], error: str = "tag", **about: str
) -> CoreSchema:
    """Return a union whose branches are numbers below 0, which no index in the path of an error can be."""
    choices = {-branch: handler.generate_schema(each) for branch, each in enumerate(_branches(source), 1)}
    return core_schema.tagged_union_schema(
        choices, branch_of, custom_error_type=error, custom_error_message="{why}", custom_error_context={**about}
    )


# ---- errors

_CODES = ("invalid_value", "invalid_type", _MISSING)


def _refusal(error: ValidationError) -> ApiError:
    """Return the first error of a validation as one sentence about its field, in Pydantic's words or a validator's."""
    first = error.errors(include_url=False)[0]
    kind, given, about, place = first["type"], first["input"], first.get("ctx", {}), first["loc"]
    own = "be an object" if kind in ("model_type", "dict_type") else first["msg"].partition(" should ")[2]
    why = about.get("why", f"must {own}")
    mistyped = about.get("kind", kind_of(given)) != kind_of(given)
    if isinstance(given, dict) and about.get("field"):
        place, given = (*place, about["field"]), given.get(about["field"])
    if kind in _CODES:
        return refuse(joined(place), why, kind)
    if kind in ("missing", "string_too_short") or (given is None and isinstance(place[-1], str)):
        return refuse(joined(place), "is required", _MISSING)
    if mistyped:
        return refuse(joined(place), f"must be {about['kind']}", "invalid_type")
    too_large = kind == "float_type" and kind_of(given) == "a number"
    return refuse(joined(place), why, "invalid_type" if kind.endswith("_type") and not too_large else "invalid_value")
