"""Read the fields of a JSON object from a client, and check their types and ranges.

A wrong field raises ApiError 400 with one sentence that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from radixkv.chat.tool_call_formats import DEEPEST, too_deep
from radixkv.serve.errors import ApiError, bad_request

JsonObject = dict[str, Any]


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


class Fields:
    """Read the fields of one object, each once; null counts as absent, and `close` refuses the fields left over.

    `at` is the path of the object, such as "messages[2]", for error messages.
    """

    def __init__(self, values: object, at: str = "") -> None:
        """Raise ApiError unless `values` is an object."""
        if not isinstance(values, dict):
            raise bad_request(f"{at} must be an object, not {kind_of(values)}", at, "invalid_type")
        self._left: JsonObject = dict(values)
        self._at = at

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
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            choices = " or ".join(json.dumps(each) for each in allowed)
            self.refuse(name, f"can only be {choices} here: {why}" if allowed else f"is not supported: {why}")

    def ignore(self, *names: str) -> None:
        """Accept fields with any value, without effect."""
        for name in names:
            self._left.pop(name, None)

    def close(self) -> None:
        """Refuse the fields that were not read."""
        for name in self._left:
            path = self.path(shown(name).strip('"'))
            raise bad_request(f"unknown field {path}: remove it, or check its spelling", path, "unknown_parameter")

    def wrong(self, name: str, wanted: str, value: object) -> NoReturn:
        """Raise for a value of the wrong type."""
        message = f"{self.path(name)} must be {wanted}, not {kind_of(value)}"
        raise bad_request(message, self.path(name), "invalid_type")

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise for a value that is not allowed."""
        raise bad_request(f"{self.path(name)} {why}", self.path(name), "invalid_value")


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
