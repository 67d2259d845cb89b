"""The recorded request of a trace, and the error that locates a fault in a file."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from radixkv.errors import InvalidInput


class TraceError(InvalidInput):
    """A line of a trace is invalid: `file`, `line` (from 1) and `field` (None: the whole line) locate the fault."""

    def __init__(self, file: str, line: int, field: str | None, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem if field is None else f'{field}: {problem}'}")
        self.file = file
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request: its prompt as a chain of block ids."""

    timestamp: float  # milliseconds since the trace began
    input_length: int  # tokens of the prompt
    output_length: int  # tokens generated
    blocks: array[int]  # the prompt's block ids, typecode "q"
    session: str | None = None
    turn: int | None = None
    stop: str | None = None  # reason of the end: "tool_use", "end_turn", ...
    namespace: str | None = None  # the tenant: prompts of two tenants share nothing
    block_tokens: int | None = None  # tokens of a block, if the line states it


@dataclass(frozen=True, slots=True)
class Line:
    """A decoded JSON object and its place in a file. Its methods return checked fields, or raise TraceError."""

    file: str
    line: int
    fields: dict[str, Any]

    def wrong(self, field: str | None, problem: str) -> TraceError:
        """Return the error to raise."""
        return TraceError(self.file, self.line, field, problem)

    def required(self, field: str) -> Any:
        """Return the field's value, unchecked."""
        if field not in self.fields:
            raise self.wrong(field, "missing")
        return self.fields[field]

    def time(self, field: str = "timestamp") -> float:
        """Return a time in milliseconds."""
        value = self.required(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
            raise self.wrong(field, f"{short_repr(value)} is not a number of milliseconds >= 0")
        return float(value)

    def count(self, field: str) -> int:
        """Return an int >= 0."""
        value = self.required(field)
        if not is_count(value):
            raise self.wrong(field, f"{short_repr(value)} is not an int >= 0")
        return int(value)

    def objects(self, field: str, within: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return a list of objects, which may be missing `within` an object."""
        values = self.required(field) if within is None else within.get(field, [])
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            raise self.wrong(field, f"{short_repr(values)} is not a list of objects")
        return values

    def text(self, field: str) -> str | None:
        """Return a string, or None if there is none."""
        value = self.fields.get(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, f"{short_repr(value)} is not a string")
        return value

    def name(self, *fields: str) -> str | None:
        """Return a name: the first of these fields that is present, a string, or an int as text."""
        for field in fields:
            value = self.fields.get(field)
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
                return str(value)
            if value is not None and not isinstance(value, str):
                raise self.wrong(field, f"{short_repr(value)} is no string and no int of 64 bits")
            if value is not None:
                return str(value)
        return None

    def namespace(self) -> str | None:
        """Return the field "namespace", or its synonym "tenant"."""
        names = [self.name(field) for field in ("namespace", "tenant")]
        if None not in names and names[0] != names[1]:
            raise self.wrong("tenant", f"{short_repr(names[1])} differs from the field namespace")
        return names[0] if names[0] is not None else names[1]


Named: TypeAlias = tuple[str, Line]
"""An object of a file, after the name of a session that has no other."""


class Delays:
    """The times of requests that state a `timestamp`, or AIPerf's `delay` after the preceding one of their session."""

    def __init__(self) -> None:
        self._last: dict[str | None, float] = {}

    def time(self, line: Line, session: str | None) -> float:
        """Return the time of a session's next request in milliseconds.

        A delay begins at the preceding request, as if its answer took no time. The first request of a session of AIPerf
        may have neither field; it begins at 0. Raises TraceError for a delay without a session.
        """
        if line.fields.get("timestamp") is not None or session is None:
            if "timestamp" not in line.fields and line.fields.get("delay") is not None:
                raise line.wrong("timestamp", "missing: a delay needs a session whose preceding request it follows")
            now = line.time()
        elif line.fields.get("delay") is not None:
            now = self._last.get(session, 0.0) + line.time("delay")
        elif "session_id" in line.fields and session not in self._last:
            now = 0.0
        else:
            now = line.time()  # raises: it is missing
        self._last[session] = now
        return now


class Epoch:
    """Dates as milliseconds since the first one that was read; an earlier one is negative."""

    def __init__(self) -> None:
        self._first: float | None = None

    def since(self, line: Line, field: str, value: Any) -> float:
        """Convert a date as `unix_milliseconds` does, and count it from the first one."""
        now = unix_milliseconds(line, field, value)
        self._first = now if self._first is None else self._first
        return now - self._first


def unix_milliseconds(line: Line, field: str, value: Any) -> float:
    """Return an ISO 8601 date (UTC without a zone), or milliseconds, as milliseconds since 1970. Raises TraceError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return float(value)
    try:
        date = datetime.fromisoformat(value.strip())
        return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp() * 1000
    except (AttributeError, ValueError, OverflowError):
        raise line.wrong(field, f"{short_repr(value)} is no date as in ISO 8601 and no milliseconds") from None


def is_count(value: Any) -> bool:
    """Whether it is an int, 0 <= value < 2**63."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def short_repr(value: Any) -> str:
    """Return a short repr of a value for an error message."""
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return "a huge int"
    return text if len(text) <= 60 else f"{text[:57]}..."
