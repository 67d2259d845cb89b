"""Read the fields of a JSON object from a client, and check their types and ranges.

A wrong field raises ApiError 400 with one sentence that names it. The names of unknown fields are collected, so that
the response can name them; a strict server refuses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from radixkv.chat.tool_call_formats import DEEPEST, too_deep
from radixkv.serve.errors import ApiError, bad_request

JsonObject = dict[str, Any]

_MOST_PATHS = 16  # ignored fields that a response names
_LONGEST_PATH = 64  # characters of each
_INDEX = re.compile(r"\[[0-9]+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def parse_object(body: bytes) -> JsonObject:
    """Parse a body that is one JSON object; raise ApiError for another value, NaN, or a text outside Unicode."""
    try:
        parsed = json.loads(body, parse_constant=_no_number)
        if b"\\u" in body:  # only an escape can bring half of a surrogate pair
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError as error:
        raise bad_request(f"the body is nested more than {DEEPEST} deep", code="invalid_json") from error
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise bad_request(f"the body must be a JSON object, not {kind_of(parsed)}", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > DEEPEST:
        for name, value in parsed.items():
            if too_deep(value):
                field = shown(name).strip('"')
                raise bad_request(f"{field} is nested more than {DEEPEST} deep", field, "invalid_value")
    return parsed


class IgnoredFields:
    """Collect the paths of fields without effect, in the order in which they are read.

    Of the same field in several entries of an array only the first counts. At most 16 paths are stored.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._paths: dict[str, str] = {}  # path without indices -> path
        self._more = False

    def __bool__(self) -> bool:
        """Whether any field was ignored."""
        return bool(self._paths)

    def add(self, path: str) -> None:
        """Add the path of a field, such as "messages[2].mood"."""
        general = _INDEX.sub("[]", path[:_LONGEST_PATH])
        if general in self._paths:
            return
        if len(self._paths) < _MOST_PATHS:
            self._paths[general] = _UNSAFE.sub("?", path[:_LONGEST_PATH])
        else:
            self._more = True

    def text(self, separator: str = ", ") -> str:
        """Return the paths, each of at most 64 letters, digits and `_.[]-`, for a header or a log.

        >>> ignored = IgnoredFields()
        >>> for path in ("mood", "messages[0].id", "messages[1].id", 'a"b'):
        ...     ignored.add(path)
        >>> ignored.text()
        'mood, messages[0].id, a?b'
        """
        return separator.join([*self._paths.values(), *(["..."] if self._more else [])])


class Fields:
    """Read the fields of one object, each once; null counts as absent, and `close` finds the fields left over.

    `at` is the path of the object, such as "messages[2]", for error messages. Fields left over are added to `ignored`;
    without it, they are refused.
    """

    def __init__(self, values: object, at: str = "", ignored: IgnoredFields | None = None) -> None:
        """Raise ApiError unless `values` is an object."""
        if not isinstance(values, dict):
            raise bad_request(f"{at} must be an object, not {kind_of(values)}", at, "invalid_type")
        self._left: JsonObject = dict(values)
        self._at, self._ignored = at, ignored

    def nested(self, values: object, path: str) -> Fields:
        """Return the fields of an object inside this one, whose full path is `path`; they share `ignored`."""
        return Fields(values, path, self._ignored)

    def path(self, name: str) -> str:
        """Return a field's name with the path of its object."""
        return f"{self._at}.{name}" if self._at else name

    def take(self, name: str) -> Any:
        """Return a field of any type, None if it is absent."""
        return self._left.pop(name, None)

    def need(self, name: str) -> Any:
        """Return a required field of any type."""
        value = self.take(name)
        if value is None:
            raise bad_request(f"{self.path(name)} is required", self.path(name), "missing_required_parameter")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, None if it is absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            self.wrong(name, "a string", value)
        return value

    def needed_text(self, name: str, *, empty: bool = True) -> str:
        """Return a required string. An empty one counts as absent unless `empty`."""
        value = self.need(name)
        if not isinstance(value, str):
            self.wrong(name, "a string", value)
        return value if value or empty else str(self.need(name))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false, `default` if it is absent."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number from `low` to `high`, None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # 2.0 is a whole number in JSON
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(name, "a whole number", value)
        if not low <= value <= high:
            self.refuse(name, f"must be from {low} to {high}, not {shown(value)}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number from `low` to `high`, None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(name, "a number", value)
        if not low <= value <= high:
            self.refuse(name, f"must be from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def list(self, name: str) -> list[Any] | None:
        """Return an array, None if it is absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            self.wrong(name, "an array", value)
        return value

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Accept a field only with one of the `allowed` values; `why` explains the refusal of others."""
        value = self.take(name)
        if value is not None and not _among(value, allowed):
            choices = " or ".join(json.dumps(each) for each in allowed)
            self.refuse(name, f"can only be {choices} here: {why}" if allowed else f"is not supported: {why}")

    def prefer(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Accept a field as `only` does, but ignore other values unless the server is strict."""
        if self._ignored is None:
            self.only(name, allowed, why)
        elif (value := self.take(name)) is not None and not _among(value, allowed):
            self._ignored.add(self.path(name))

    def has_no_effect(self, name: str, why: str) -> None:
        """Add a field that was read to the ignored ones; refuse it if the server is strict."""
        if self._ignored is None:
            self.refuse(name, why)
        self._ignored.add(self.path(name))

    def ignore(self, *names: str) -> None:
        """Accept fields with any value, without effect."""
        for name in names:
            self._left.pop(name, None)

    def close(self) -> None:
        """Add the fields that were not read to the ignored ones; raise ApiError for them without `ignored`."""
        for name, value in self._left.items():
            path = self.path(shown(name).strip('"'))
            if self._ignored is None:
                raise bad_request(f"unknown field {path}: remove it, or check its spelling", path, "unknown_parameter")
            if value is not None:
                self._ignored.add(path)

    def wrong(self, name: str, wanted: str, value: object) -> NoReturn:
        """Raise for a value of the wrong type."""
        message = f"{self.path(name)} must be {wanted}, not {kind_of(value)}"
        raise bad_request(message, self.path(name), "invalid_type")

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise for a value that is not allowed."""
        raise bad_request(f"{self.path(name)} {why}", self.path(name), "invalid_value")


def _among(value: object, allowed: Sequence[Any]) -> bool:
    return any(value == each and type(value) is type(each) for each in allowed)


def kind_of(value: object) -> str:
    """Return the JSON type of a value.

    >>> [kind_of(value) for value in (None, True, 1, 1.5, "a", [], {})]
    ['null', 'a boolean', 'a number', 'a number', 'a string', 'an array', 'an object']
    """
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
    return "an array"


def shown(value: object) -> str:
    """Return a value as JSON for a message, shortened."""
    try:
        text = json.dumps(value)
    except ValueError:  # an int of more digits than Python prints
        return "a very large number"
    return text if len(text) <= 60 else text[:60] + "..."


def _no_number(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not a JSON number", code="invalid_json")
