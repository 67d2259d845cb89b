"""What a trace is made of: one recorded request, and the error that says where a file is wrong. Knows no format."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidInput


class TraceError(InvalidInput):
    """A line of a trace cannot be read: `file`, `line` (from 1) and `field` (None: the line as a whole) say where."""

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
    stop: str | None = None  # why it ended: "tool_use", "end_turn", ...
    namespace: str | None = None  # the tenant: prompts of two never share
    block_tokens: int | None = None  # tokens a block, if the line says so


@dataclass(frozen=True, slots=True)
class Line:
    """A decoded JSON object, and where it stands: its fields, or a TraceError that names the one that is wrong."""

    file: str
    line: int
    fields: dict[str, Any]

    def wrong(self, field: str | None, problem: str) -> TraceError:
        """The error to raise."""
        return TraceError(self.file, self.line, field, problem)

    def required(self, field: str) -> Any:
        """Its value, whatever that is."""
        if field not in self.fields:
            raise self.wrong(field, "missing")
        return self.fields[field]

    def time(self, field: str = "timestamp") -> float:
        """Milliseconds."""
        value = self.required(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
            raise self.wrong(field, f"{shown(value)} is not a number of milliseconds >= 0")
        return float(value)

    def count(self, field: str) -> int:
        """An int >= 0."""
        value = self.required(field)
        if not is_count(value):
            raise self.wrong(field, f"{shown(value)} is not an int >= 0")
        return int(value)

    def text(self, field: str) -> str | None:
        """A string, or None if there is none."""
        value = self.fields.get(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, f"{shown(value)} is not a string")
        return value

    def name(self, *fields: str) -> str | None:
        """Whose it is: the first of these fields that is there, a string, or an int as text."""
        for field in fields:
            value = self.fields.get(field)
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
                return str(value)
            if value is not None and not isinstance(value, str):
                raise self.wrong(field, f"{shown(value)} is no string and no int of 64 bits")
            if value is not None:
                return str(value)
        return None

    def namespace(self) -> str | None:
        """The field "namespace", or "tenant", which means the same."""
        names = [self.name(field) for field in ("namespace", "tenant")]
        if None not in names and names[0] != names[1]:
            raise self.wrong("tenant", f"{shown(names[1])} beside another namespace")
        return names[0] if names[0] is not None else names[1]


def is_count(value: Any) -> bool:
    """Whether it is an int, 0 <= value < 2**63."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def shown(value: Any) -> str:
    """A value as an error names it: never long."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python will print
        return "a huge int"
    return text if len(text) <= 60 else f"{text[:57]}..."
