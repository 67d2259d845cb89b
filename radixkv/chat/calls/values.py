"""Read values that models write in JSON, as Python literals, or with quotes of their own, and write them as JSON.

A value is passed on piece by piece: the pieces are always the beginning of valid JSON, because each is checked first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from radixkv.chat.calls.source import NotACall, Reading, Source, end_of

DEEPEST = 100  # deeper nesting is not a call: JSON readers and writers have recursion limits not far above
Take: TypeAlias = Callable[[str], None]
"""Takes more JSON text of a value."""

_CONSTANTS = {"true": "true", "false": "false", "null": "null"}
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {**dict(zip("bfnrt", "\b\f\n\r\t", strict=True)), **dict(zip("\"'\\/", "\"'\\/", strict=True))}
_RUNS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}  # of a string with escapes
_HEX = "[0-9a-fA-F]"
_UNPAIRED = f"(?![dD][89a-fA-F]){_HEX}{{4}}"
_CODE = rf"u{_UNPAIRED}|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_OF_JSON = re.compile(rf"""\\(?:["'\\/bfnrt]|{_CODE})""")
_LONG_CODE = f"U(?:0000{_UNPAIRED}|00(?:0[1-9a-fA-F]|10){_HEX}{{4}})"
_OF_PYTHON_TOO = re.compile(rf"\\(?:[^uxU]|{_CODE}|x{_HEX}{{2}}|{_LONG_CODE})", re.DOTALL)
_BEGUN = re.compile(rf"\\(?:x{_HEX}?|U{_HEX}{{0,7}}|u(?:{_HEX}{{0,3}}|{_HEX}{{4}}(?:\\(?:u{_HEX}{{0,3}})?)?))?\Z")
_BARE = re.compile(r"[\w.+-]*", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_written = json.JSONEncoder(ensure_ascii=False).encode  # without a new encoder for each piece
_MOST_DIGITS = 4000  # Python refuses to read numbers that are not much longer


@dataclass(frozen=True)
class Dialect:
    """A way to write values: with quotes of its `own`, keys are bare, and no backslash escapes."""

    quotes: tuple[str, ...]
    constants: Mapping[str, str] = field(default_factory=lambda: _CONSTANTS | _OF_PYTHON)
    own: bool = False


JSON = Dialect(('"',), _CONSTANTS)
PYTHON = Dialect(('"', "'"))  # and JSON


def value(source: Source, take: Take, dialect: Dialect) -> Reading[None]:
    """Read one value; raises NotACall if it is not valid, or nested more than DEEPEST deep. O(characters)."""
    closing: list[str] = []
    while True:
        first = yield from source.space()
        if first and first in "{[":
            if len(closing) == DEEPEST:
                raise NotACall
            source.at += 1
            take(first)
            closing.append("}" if first == "{" else "]")
            first = yield from source.space()
            if first != closing[-1]:
                if closing[-1] == "}":
                    yield from _key(source, take, dialect)
                continue
        else:
            yield from _scalar(source, take, dialect)
        while closing:
            found = yield from source.next(closing[-1], ",")
            if found == ",":
                take(", ")
                if closing[-1] == "}":
                    yield from _key(source, take, dialect)
                break
            take(closing.pop())
        else:
            return


def _key(source: Source, take: Take, dialect: Dialect) -> Reading[None]:
    yield from source.space()
    if quote := (yield from source.follows(*dialect.quotes)):
        yield from _string(source, take, dialect, quote)
    elif dialect.own:
        take(json.dumps((yield from source.word(":")), ensure_ascii=False))
    else:
        raise NotACall
    yield from source.next(":")
    take(": ")


def _scalar(source: Source, take: Take, dialect: Dialect) -> Reading[None]:
    if quote := (yield from source.follows(*dialect.quotes)):
        yield from _string(source, take, dialect, quote)
        return
    while (end := end_of(_BARE, source.text, source.at)) == len(source.text) and not source.final:
        if end - source.at > _MOST_DIGITS:
            raise NotACall
        yield
    word = source.text[source.at : end]
    take(dialect.constants.get(word) or _number(word))
    source.at = end


def _number(word: str) -> str:
    if len(word) > _MOST_DIGITS or not (found := _NUMBER.fullmatch(word)):
        raise NotACall
    if (found[2] or found[3]) and not math.isfinite(float(word)):
        raise NotACall
    return word


def _string(source: Source, take: Take, dialect: Dialect, quote: str) -> Reading[None]:
    """Read a string in quotes; a line break in it counts as an escaped one."""
    source.at += len(quote)
    take('"')
    if dialect.own:
        yield from source.until((quote,), lambda text: take(escaped(text)))
    else:
        while True:
            end = end_of(_RUNS[quote], source.text, source.at)
            take(escaped(source.text[source.at : end]))
            source.at = end
            if end == len(source.text):
                yield from _more(source)
            elif source.text[end] == quote:
                source.at += 1
                break
            else:
                take(escaped((yield from _escape(source, dialect))))
    take('"')


def _escape(source: Source, dialect: Dialect) -> Reading[str]:
    """Read a backslash and what it escapes; one that escapes nothing, as in a path of Windows, is itself."""
    pattern = _OF_JSON if dialect is JSON else _OF_PYTHON_TOO
    while not (found := pattern.match(source.text, source.at)) and _BEGUN.match(source.text, source.at):
        yield from _more(source)
    text = found[0] if found else "\\"
    source.at += len(text)
    if text[1:2] == "u":
        return str(json.loads(f'"{text}"'))
    return chr(int(text[2:], 16)) if len(text) > 2 else _ESCAPES.get(text[1:], text)


def _more(source: Source) -> Reading[None]:
    if source.final:
        raise NotACall
    yield


def escaped(text: str) -> str:
    """Return a text as it stands within the quotes of JSON."""
    return _written(text)[1:-1]


def string(source: Source) -> Reading[str]:
    """Read one string of JSON, and return it; raises NotACall for other values."""
    pieces: list[str] = []
    if (yield from source.space()) != '"':
        raise NotACall
    yield from _string(source, pieces.append, JSON, '"')
    return str(json.loads("".join(pieces)))


def as_json(text: str, dialect: Dialect = PYTHON) -> str | None:
    """Return the JSON text of a value; None if the text is no value.

    >>> as_json("{'a': None}")
    '{"a": null}'
    """
    pieces: list[str] = []
    source = Source(text, final=True)
    try:
        list(value(source, pieces.append, dialect))
    except NotACall:
        return None
    return None if text[source.at :].strip() else "".join(pieces)


# ---- the types of a schema

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MOST_SCHEMAS = 100  # parts of a schema that are read for its types


def parts_of(schema: Any, whole: Any) -> list[Mapping[str, Any]]:
    """Return a schema and those that `anyOf`, `oneOf` and `$ref` in it name; `whole` has the definitions."""
    waiting = [schema]
    for each in islice(waiting, _MOST_SCHEMAS):  # which grows
        match each:
            case {"anyOf": [*among]} | {"oneOf": [*among]}:
                waiting += among
            case {"$ref": str(reference)}:
                target = whole
                for name in reference.removeprefix("#/").split("/"):
                    target = target.get(name) if isinstance(target, Mapping) else None
                waiting.append(target)
    return [each for each in waiting if isinstance(each, Mapping)]


def types_of(schema: Any, whole: Any) -> frozenset[str]:
    """Return the types that a JSON schema names; none if it names no type. `whole` has the definitions.

    >>> sorted(types_of({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Size"}]}, {"$defs": {"Size": {"enum": [1]}}}))
    ['integer', 'string']
    """
    found: set[str] = set()
    for each in parts_of(schema, whole):
        named, values = each.get("type"), each.get("enum", [each["const"]] if "const" in each else [])
        types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        found |= types or {_kind(value) for value in (values if isinstance(values, list) else [])}
    return frozenset(found)


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def typed(text: str, types: Collection[str]) -> str:
    """Return the JSON text of a value that has one of some types: a text, unless it is a value of another type.

    >>> typed("12", ["integer"]), typed("12", ["string"]), typed("a few", ["integer"]), typed("12", [])
    ('12', '"12"', '"a few"', '12')
    """
    found = None if types == frozenset({"string"}) else as_json(text)
    if found is not None and "string" in types:
        kind = _kind(json.loads(found))
        if kind == "string" or not {kind, "number" if kind == "integer" else kind} & {*types}:
            found = None
    return json.dumps(text, ensure_ascii=False) if found is None else found
