"""Check a JSON schema before it is compiled: every keyword is enforced, an annotation, or refused with its place.

Keywords of JSON Schema that the compiler cannot enforce are refused, since a reply could contradict them. Annotations
and keywords that no draft of JSON Schema defines change nothing, as the standard says. `format` is enforced where the
standard defines it, and is an annotation otherwise: "password" or "binary" say nothing about the text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote

from radixkv.errors import InvalidConstraint

Schema: TypeAlias = Mapping[str, Any] | bool

MOST_DEPTH = 64
"""Nested schemas; the compiler recurses over them."""

MOST_SCHEMAS = 10_000
MOST_PROPERTIES = 1_000  # of one object: the compiler takes O(n * n) for optional ones
MOST_ALTERNATIVES = 2_000  # of one anyOf, oneOf or allOf: the compiler refuses objects of which there are more
MOST_VALUES = 10_000  # of all enums together
MOST_WORK = 5 * 10**7  # values x characters of the arrays and objects in enums: the compiler takes 10 ns for each
MOST_PATTERNS = 10  # that apply to one text: the compiler takes O(2 ** n)
MOST_MULTIPLE = 10_000  # of the digits of `multipleOf`: the compiler makes a state for each remainder
MOST_COMPARISONS = 20_000  # of two schemas of a `oneOf`
_MOST_STEPS = 16
_YIELD = 500  # schemas after which other threads may run
_EXACT = 2**53  # the compiler reads numbers as floats

_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_UNSUPPORTED = frozenset({
    "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
_ENFORCED_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
_OTHER_FORMATS = frozenset({
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
})  # fmt: skip
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # without 0000
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns for formats that the compiler enforces too loosely: its dates have 29 February in every year, and year 0."""

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_DRAFTS = frozenset({
    "http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema", "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
})  # fmt: skip
_ANNOTATIONS = frozenset({"$id", "id", "$anchor", "$comment", "title", "description", "default", "examples"})
_OPTIONS = "x-guidance"
_ALLOWED_OPTIONS = frozenset({"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"})


def checked_schema(schema: Schema) -> Mapping[str, Any]:
    """Return the schema as the compiler takes it; raise InvalidConstraint, with a JSON pointer, for one it cannot.

    O(size of the schema), and O(n * n) comparisons for a `oneOf` of n schemas.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    checked = _Check(schema).whole()
    _Patterns(checked).check()
    return checked


def refusal(place: str, reason: str) -> InvalidConstraint:
    """Return the error for a part of a schema; `place` is a JSON pointer, empty for the whole schema."""
    return InvalidConstraint(f"json_schema, at #{place}: {reason}", parameter="json_schema", place=place)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside a checked one, each with its JSON pointer from there."""
    for key, value in schema.items():
        if key in _MAPS:
            yield from ((f"/{_escaped(key)}/{_escaped(name)}", each) for name, each in value.items())
        elif key in _LISTS or (key in _ONE and isinstance(value, list)):
            yield from ((f"/{key}/{at}", each) for at, each in enumerate(value))
        elif key in _ONE:
            yield f"/{key}", value


@dataclass
class _Check:
    root: Mapping[str, Any]
    schemas: int = 0
    values: int = 0
    comparisons: int = 0
    work: int = 0
    outside: set[str] = field(default_factory=set)  # references into keywords of the whole schema that are unknown

    def whole(self) -> Mapping[str, Any]:
        """Return the whole schema as `schema` does, with the targets of all references."""
        checked: dict[str, Any] = self.schema(self.root, "", 0)
        done: set[str] = set()
        while left := sorted(self.outside - done):
            for reference in left:
                *path, name = _parts(reference)
                target = self.schema(_target(self.root, reference), reference[1:], 1)
                if not done:  # the caller's own object is not changed
                    checked = json.loads(json.dumps(checked))
                done.add(reference)
                holder = _target(checked, "/".join(reference.split("/")[:-1])) if len(path) else checked
                if isinstance(holder, dict):
                    holder[name] = target
                elif isinstance(holder, list):
                    holder[int(name)] = target
                else:  # inside the target of another reference, which has a copy without it
                    raise refusal(reference[1:], "a reference leads into an unknown keyword of another one's target")
        return checked

    def schema(self, schema: Any, place: str, depth: int) -> Any:
        """Return a copy with the keywords that the compiler enforces."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise refusal(place, f"a schema is an object or a boolean, not {_kind(schema)}")
        self.schemas += 1
        if depth > MOST_DEPTH or self.schemas > MOST_SCHEMAS:
            raise refusal(place, f"more than {MOST_DEPTH} schemas inside each other, or {MOST_SCHEMAS} in all")
        if self.schemas % _YIELD == 0:
            time.sleep(0)
        found: dict[str, Any] = {}
        for key, value in schema.items():
            found.update(self._keyword(key, value, f"{place}/{_escaped(key)}", depth))
        if (stricter := _STRICTER.get(found.get("format", ""))) and "pattern" not in found:
            del found["format"]
            found["pattern"] = stricter
        least = schema.get("minProperties", 0)
        if least > max(1, len(schema.get("required", ()))):
            reason = "above 1 it cannot be enforced beyond the required properties, since a name may come twice"
            raise refusal(f"{place}/minProperties", reason)
        return found

    def _keyword(self, key: str, value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the keyword to enforce and its value; nothing for an annotation."""
        if key in _UNSUPPORTED:
            if not _is_void(key, value):
                raise refusal(place, f"{key} cannot be enforced")
        elif key in _ONE and not isinstance(value, list):
            yield key, self.schema(value, place, depth + 1)
        elif key in _LISTS or key in _ONE:
            yield self._alternatives(key, value, place, depth)
        elif key in _MAPS:
            if not isinstance(value, Mapping):
                raise refusal(place, f"{key} is an object of schemas, not {_kind(value)}")
            if len(value) > MOST_PROPERTIES and "roperties" in key:
                raise refusal(place, f"{len(value)} properties: at most {MOST_PROPERTIES} are allowed")
            yield key, {name: self.schema(each, f"{place}/{_escaped(name)}", depth + 1) for name, each in value.items()}
        elif key in _CHECKS:
            _CHECKS[key](self, key, value, place)
            yield key, value
        elif key == "format":
            if not isinstance(value, str):
                raise refusal(place, f"format is a text, not {_kind(value)}")
            if value in _OTHER_FORMATS:
                raise refusal(
                    place, f"the format {value!r} cannot be enforced; these can: {_listed(_ENFORCED_FORMATS)}"
                )
            if value in _ENFORCED_FORMATS:
                yield key, value
        elif depth == 0 and key not in _ANNOTATIONS:
            yield key, value  # a reference may lead into it

    def _alternatives(self, key: str, value: Any, place: str, depth: int) -> tuple[str, Any]:
        if not isinstance(value, list):
            raise refusal(place, f"{key} is a list of schemas, not {_kind(value)}")
        if len(value) > MOST_ALTERNATIVES:
            reason = f"{len(value)} schemas: at most {MOST_ALTERNATIVES} are allowed; write constants as one enum"
            raise refusal(place, reason)
        checked = [self.schema(each, f"{place}/{at}", depth + 1) for at, each in enumerate(value)]
        if key == "oneOf":
            if not self._all_disjoint(value):
                reason = "oneOf cannot be enforced, since two of its schemas may allow the same value: use anyOf"
                raise refusal(place, reason)
            key = "anyOf"
        return key, checked

    # ---- keywords with a value of their own

    def reference(self, key: str, value: Any, place: str) -> None:
        """Refuse a reference that leads outside the schema, or nowhere."""
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise refusal(place, "a reference leads into the same schema: #, or # and a JSON pointer")
        if _target(self.root, value) is None:
            raise refusal(place, f"the reference {value!r:.100} leads nowhere")
        parts = _parts(value)
        if parts and parts[0] not in _KEYWORDS:
            self.outside.add(value)
        elif not _is_schema_place(parts):
            raise refusal(place, f"the reference {value!r:.100} leads to no schema")

    def values_of(self, key: str, value: Any, place: str) -> None:
        """Check the values of `enum` and `const`."""
        if key == "enum" and not isinstance(value, list):
            raise refusal(place, f"enum is a list of values, not {_kind(value)}")
        self.values += sum(1 for _ in _leaves(value))
        if self.values > MOST_VALUES:
            raise refusal(place, f"the schema has more than {MOST_VALUES} values of enum and const")
        for each in value if key == "enum" else [value]:
            if isinstance(each, Mapping | list):
                self.work += sum(1 for _ in _leaves(each)) * len(json.dumps(each))
        if self.work > MOST_WORK:
            raise refusal(place, "the arrays and objects of enum and const are too long")
        if any(isinstance(number, int) and abs(number) > _EXACT for number in _leaves(value)):
            raise refusal(place, "an integer beyond 2**53 cannot be enforced exactly")

    def count_of(self, key: str, value: Any, place: str) -> None:
        """Check a number of characters, items or properties."""
        if not _is_number(value) or value < 0 or value != int(value):
            raise refusal(place, f"{key} is an integer >= 0, not {value!r:.100}")

    def number_of(self, key: str, value: Any, place: str) -> None:
        """Check a bound or a divisor of numbers."""
        if isinstance(value, bool) and key.startswith("exclusive"):
            return  # of draft 4
        if not _is_number(value):
            raise refusal(place, f"{key} is a number, not {value!r:.100}")
        if isinstance(value, int) and abs(value) > _EXACT:
            raise refusal(place, "an integer beyond 2**53 cannot be enforced exactly")
        if key == "multipleOf" and not 0 < _digits(value) <= MOST_MULTIPLE:
            raise refusal(place, f"multipleOf is above 0, with digits up to {MOST_MULTIPLE}")

    def text_of(self, key: str, value: Any, place: str) -> None:
        """Check a regular expression."""
        if not isinstance(value, str):
            raise refusal(place, f"{key} is a text, not {_kind(value)}")

    def type_of(self, key: str, value: Any, place: str) -> None:
        """Check the names of types."""
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
            raise refusal(place, f"type is one of {_listed(_TYPES)}, or a list of them; not {value!r:.100}")

    def required(self, key: str, value: Any, place: str) -> None:
        """Check the names of required properties."""
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise refusal(place, f"required is a list of names, not {value!r:.100}")
        if len(value) > MOST_PROPERTIES:
            raise refusal(place, f"{len(value)} properties: at most {MOST_PROPERTIES} are allowed")

    def draft(self, key: str, value: Any, place: str) -> None:
        """Check the draft of JSON Schema, which decides how arrays are described."""
        if not isinstance(value, str) or value.rstrip("#") not in _DRAFTS:
            raise refusal(place, f"unknown draft {value!r:.100}; these are known: {_listed(_DRAFTS)}")

    def options(self, key: str, value: Any, place: str) -> None:
        """Check the separators of a reply."""
        if place != f"/{_OPTIONS}":
            raise refusal(place, f"{_OPTIONS} stands in the whole schema only")
        if not isinstance(value, Mapping) or not value.keys() <= _ALLOWED_OPTIONS:
            raise refusal(place, f"the options are {_listed(_ALLOWED_OPTIONS)}")

    # ---- schemas that exclude each other

    def _resolved(self, schema: Any) -> Any:
        """Follow a schema that is only a reference."""
        for _ in range(_MOST_STEPS):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            target = _target(self.root, reference)
            if not isinstance(target, Mapping):
                return schema
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**target, **rest}  # keywords of both are enforced: either side may be the one that excludes
        return schema

    def _all_disjoint(self, schemas: list[Any]) -> bool:
        """Return whether no value can be valid for two of these schemas; False if that cannot be shown."""
        values = [_values_of(each) if isinstance(each, Mapping) else None for each in map(self._resolved, schemas)]
        known = [each for each in values if each is not None]
        if len(known) == len(schemas):
            return len(set[str]().union(*known)) == sum(map(len, known))
        return all(self._disjoint(one, other) for at, one in enumerate(schemas) for other in schemas[:at])

    def _disjoint(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Return whether no value can be valid for both; False if that cannot be shown. O(properties)."""
        self.comparisons += 1
        if self.comparisons > MOST_COMPARISONS or depth > _MOST_STEPS:
            return False
        first, second = self._resolved(first), self._resolved(second)
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return False
        for one, other in ((first, second), (second, first)):
            for key in ("anyOf", "oneOf"):
                branches = one.get(key)
                if isinstance(branches, list) and all(self._disjoint(each, other, depth + 1) for each in branches):
                    return True
        types = _types_of(first), _types_of(second)
        if types[0].isdisjoint(types[1]):
            return True
        values = _values_of(first), _values_of(second)
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if types[0] | types[1] != {"object"}:
            return False
        required = [each["required"] for each in (first, second) if isinstance(each.get("required"), list)]
        names = {name for each in required for name in each if isinstance(name, str)}
        return any(self._disjoint(_property(first, name), _property(second, name), depth + 1) for name in names)


_Counts: TypeAlias = dict[str, int]
_ANY_NAME = "*"


class _Patterns:
    """Count the patterns that `allOf`, `anyOf` and references apply to one text."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets: dict[str, _Counts] = {}

    def check(self) -> None:
        """Raise InvalidConstraint if there are too many."""
        try:
            self._at(self._root, "")
        except RecursionError as error:
            raise refusal("", "too many references lead to each other in a row") from error

    def _at(self, schema: Any, place: str) -> _Counts:
        """Return a bound for the value itself, with the key "", and for each of its parts."""
        counts: _Counts = {}
        if not isinstance(schema, Mapping):
            return counts
        counts[""] = int("pattern" in schema) + int("format" in schema)
        branches: _Counts = {}
        for pointer, each in subschemas(schema):
            key, _, name = pointer[1:].partition("/")
            found = self._at(each, place + pointer)
            if key == "allOf":
                _add(counts, found)
            elif key in ("anyOf", "oneOf"):
                for part, count in found.items():
                    branches[part] = max(branches.get(part, 0), count)
            elif key not in ("$defs", "definitions"):
                part = f"/{name}" if key == "properties" else _ANY_NAME
                counts[part] = max(counts.get(part, 0), _most(found))
        _add(counts, branches)
        _add(counts, self._referenced(schema.get("$ref")))
        if _most(counts) > MOST_PATTERNS:
            raise refusal(place, f"more than {MOST_PATTERNS} patterns or formats apply to one text")
        return counts

    def _referenced(self, reference: Any) -> _Counts:
        if not isinstance(reference, str):
            return {}
        if reference not in self._targets:
            self._targets[reference] = {}  # meanwhile, for a schema that contains itself
            self._targets[reference] = self._at(_target(self._root, reference), unquote(reference[1:]))
        return self._targets[reference]


def _add(counts: _Counts, more: _Counts) -> None:
    for part, count in more.items():
        counts[part] = counts.get(part, 0) + count


def _most(counts: _Counts) -> int:
    named = [count for part, count in counts.items() if part != _ANY_NAME]
    return max(named, default=0) + counts.get(_ANY_NAME, 0)


def _parts(reference: str) -> list[str]:
    """Return the names in a reference, # or # and a JSON pointer."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]]


def _is_schema_place(parts: list[str]) -> bool:
    """Whether a pointer leads from schema to schema, and not into a constant or a default."""
    at = 0
    while at < len(parts):
        key, name = parts[at], parts[at + 1] if at + 1 < len(parts) else None
        if key not in _MAPS | _LISTS | _ONE or (name is None and key not in _ONE):
            return False
        at += 1 if key in _ONE and not (name or "").isdecimal() else 2
    return True


def _target(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names, None if there is none."""
    found = root
    for name in _parts(reference):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


_CHECKS: Mapping[str, Callable[[_Check, str, Any, str], None]] = {
    "$ref": _Check.reference,
    "$schema": _Check.draft,
    _OPTIONS: _Check.options,
    "const": _Check.values_of,
    "enum": _Check.values_of,
    "pattern": _Check.text_of,
    "required": _Check.required,
    "type": _Check.type_of,
    **dict.fromkeys(_COUNTS, _Check.count_of),
    **dict.fromkeys(_NUMBERS, _Check.number_of),
}


_KEYWORDS = frozenset(_CHECKS) | _ONE | _LISTS | _MAPS | _UNSUPPORTED | _ANNOTATIONS | {"format"}


def _is_void(key: str, value: Any) -> bool:
    """Whether a keyword of the table of refused ones has a value that changes nothing."""
    return value is False if key == "uniqueItems" else value is True and key.startswith("unevaluated")


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of the values that a schema may allow."""
    given = schema.get("type", list(_TYPES))
    types = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if isinstance(values, list):
        types &= {_type_of(value) for value in values} | ({"integer"} if "integer" in types else set())
    return {"number" if name == "integer" else name for name in types}


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", type(None): "null"}
    return kinds.get(type(value), "object")


def _values_of(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values of `const` or `enum` in one spelling, None without them."""
    if "const" in schema:
        return {_spelled(schema["const"])}
    return {_spelled(value) for value in schema["enum"]} if isinstance(schema.get("enum"), list) else None


def _spelled(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a property, True if anything is allowed."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values inside a JSON value that contain no other."""
    if isinstance(value, Mapping | list) and value:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value


def _digits(number: float) -> int:
    """Return the digits of a number as an int, without zeros at its end: 1500 and 0.15 give 15."""
    digits = "".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))
    return -int(digits) if number < 0 else int(digits)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null", bool: "a boolean"}.get(type(value), "a number")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
