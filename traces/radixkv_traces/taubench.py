"""Trajectories of tau-bench (Yao et al., 2024; github.com/sierra-research/tau-bench): a JSON array of tool-using
sessions.

Knows the array and the fields `task_id`, `trial` and `traj`. Knows no model. The array is read element by element, so
that a file may be larger than memory; its parts say in which line they begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from radixkv_traces.chats import ChatRequest, turns
from radixkv_traces.records import Line, TraceError

MAX_ELEMENT = 1 << 28  # characters of one session: what is longer is no trajectory, or a bracket that never closes
_CHUNK = 1 << 16
_SPACE = " \t\r\n"


class Text(Protocol):
    """What can be read piece by piece."""

    def read(self, size: int, /) -> str:
        """The next characters, at most `size`; "" at the end."""


def session(line: Line) -> Iterator[ChatRequest]:
    """The requests of one trajectory. Its last message is the user's goodbye, which no model was asked to answer."""
    task = line.required("task_id")
    if isinstance(task, bool) or not isinstance(task, int | str):
        raise line.wrong("task_id", f"a JSON {type(task).__name__} is no int and no string")
    trial = line.count("trial") if line.fields.get("trial") is not None else 0
    return turns(line, "traj", f"{task}.{trial}", 0.0)


def elements(text: Text, file: str, line: int = 1) -> Iterator[Line]:
    """The objects of a JSON array, each with the line in which it begins. Holds one at a time, and a little more."""
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
    """A window on the text, which moves on."""

    def __init__(self, text: Text, file: str, line: int) -> None:
        self._text = text
        self._file = file
        self._buffer = ""
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode
        self.line = line

    def next(self) -> str:
        """The next character that is no space, not consumed; "" at the end."""
        while True:
            rest = self._buffer.lstrip(_SPACE)
            self._consume(len(self._buffer) - len(rest))
            if rest or self._ended:
                return rest[:1]
            self._read(_CHUNK)

    def expect(self, character: str) -> None:
        """Consume this one."""
        found = self.next()
        if found != character:
            what = f"{found!r}" if found else "the end of the file"
            raise TraceError(self._file, self.line, None, f"not JSON: {what} where {character!r} is expected")
        self._consume(1)

    def value(self) -> tuple[int, Any]:
        """The next JSON value, and the line in which it begins."""
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
        """More text would not help: it is wrong well before the end of what was read."""
        return not error.msg.startswith("Unterminated string") and error.pos < len(self._buffer) - 16

    def _consume(self, count: int) -> None:
        self.line += self._buffer.count("\n", 0, count)
        self._buffer = self._buffer[count:]

    def _read(self, size: int) -> None:
        more = self._text.read(size)
        self._ended = not more
        self._buffer += more
