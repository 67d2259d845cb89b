"""Read a JSON array element by element, so that a file may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from radixkv_traces.records import Line, TraceError

MAX_ELEMENT = 1 << 28  # characters of one session; a longer one is a bracket that never closes
_CHUNK = 1 << 16
_SPACE = " \t\r\n"


class Text(Protocol):
    """A source of text that can be read piece by piece."""

    def read(self, size: int, /) -> str:
        """Return the next characters, at most `size`; "" at the end."""


def elements(text: Text, file: str, line: int = 1) -> Iterator[Line]:
    """Return the objects of a JSON array, each with the line in which it begins. Holds about one object at a time."""
    array = _Array(text, file, line)
    array.expect("[")
    if array.next() == "]":
        array.expect("]")
    else:
        while True:
            at, value = array.value()
            if not isinstance(value, dict):
                raise TraceError(file, at, None, f"a JSON {type(value).__name__}, not an object")
            yield Line(file, at, value)
            if array.next() != ",":
                break
            array.expect(",")
        array.expect("]")
    if array.next():
        raise TraceError(file, array.line, None, "not JSON: something follows the array")


class _Array:
    """A moving window on a text."""

    def __init__(self, text: Text, file: str, line: int) -> None:
        self._text = text
        self._file = file
        self._buffer = ""
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode
        self.line = line

    def next(self) -> str:
        """Return the next character that is not a space, without consuming it; "" at the end."""
        while True:
            rest = self._buffer.lstrip(_SPACE)
            self._consume(len(self._buffer) - len(rest))
            if rest or self._ended:
                return rest[:1]
            self._read(_CHUNK)

    def expect(self, character: str) -> None:
        """Consume this character. Raises TraceError if another one is next."""
        found = self.next()
        if found != character:
            name = f"{found!r}" if found else "the end of the file"
            raise TraceError(self._file, self.line, None, f"not JSON: {name} where {character!r} is expected")
        self._consume(1)

    def value(self) -> tuple[int, Any]:
        """Return the next JSON value, and the line in which it begins."""
        self.next()
        line = self.line
        while True:
            try:
                value, end = self._decode(self._buffer)
            except json.JSONDecodeError as error:
                if self._ended or self._surely_wrong(error) or len(self._buffer) > MAX_ELEMENT:
                    at = line + self._buffer.count("\n", 0, error.pos)
                    raise TraceError(self._file, at, None, f"not JSON: {error.msg}") from error
                self._read(max(_CHUNK, len(self._buffer)))
            except (ValueError, RecursionError) as error:
                raise TraceError(self._file, line, None, f"not JSON: {error}") from error
            else:
                self._consume(end)
                return line, value

    def _surely_wrong(self, error: json.JSONDecodeError) -> bool:
        """Whether the error is well before the end of the window, so that more text cannot mend it."""
        return not error.msg.startswith("Unterminated string") and error.pos < len(self._buffer) - 16

    def _consume(self, count: int) -> None:
        self.line += self._buffer.count("\n", 0, count)
        self._buffer = self._buffer[count:]

    def _read(self, size: int) -> None:
        more = self._text.read(size)
        self._ended = not more
        self._buffer += more
