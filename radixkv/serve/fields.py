"""Parse the JSON of a request, and collect the names of fields without effect, so that the response can name them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from radixkv.chat.calls.tools import too_deep
from radixkv.chat.calls.values import DEEPEST
from radixkv.serve.errors import ApiError, bad_request
from radixkv.settings.kinds import json_reason

JsonObject = dict[str, Any]

MOST_FIELDS = 100_000  # of all objects in a body: to check more would keep the event loop waiting
_MOST_PATHS = 16  # ignored fields that a response names
_LONGEST_PATH = 64  # characters of each
_INDEX = re.compile(r"\[[0-9]+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def parse_object(body: bytes) -> JsonObject:
    """Parse a body that is one JSON object; raise ApiError for another value, NaN, or a text outside Unicode.

    A body with too many fields is refused while it is parsed, and before if it is written in the usual form.
    """
    hook = None
    if body.count(b":") > MOST_FIELDS:
        hook = _FieldCount(body.count(b'":') - body.count(b'\\":')).add
    try:
        parsed = json.loads(body, parse_constant=_no_number, object_hook=hook)
        if b"\\u" in body:  # only an escape can bring half of a surrogate pair
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError as error:
        raise bad_request(f"the body is nested more than {DEEPEST} deep", code="invalid_json") from error
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {json_reason(error)}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise bad_request(f"the body must be a JSON object, not {kind_of(parsed)}", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > DEEPEST:
        for name, value in parsed.items():
            if too_deep(value):
                field = shown(name).strip('"')
                raise bad_request(f"{field} is nested more than {DEEPEST} deep", field, "invalid_value")
    return parsed


class _FieldCount:
    """Count the fields of a body's objects as they are parsed."""

    def __init__(self, least: int) -> None:
        """Start without fields; raise ApiError if the body has too many because it has `least`."""
        self._fields = 0
        self._check(least)

    def add(self, parsed: JsonObject) -> JsonObject:
        """Return an object unchanged; raise ApiError if there are too many fields with it."""
        self._fields += len(parsed)
        self._check(self._fields)
        return parsed

    def _check(self, fields: int) -> None:
        if fields > MOST_FIELDS:
            message = f"the body's objects have more than {MOST_FIELDS} fields: send fewer messages, parts or tools"
            raise bad_request(message, code="invalid_value")


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
