"""Recorded requests in the Mooncake line format: one JSON object a line, prompts as chains of block ids instead of
text.

Knows the fields and what is allowed in them. Knows no cache. A block id stands for `block_tokens` tokens *and all
that came before them*, so equal ids mean equal prefixes; how many tokens a block has is a property of the file, not
of a line.

    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
    {"timestamp": 9, "input_length": 1700, "output_length": 10, "hash_ranges": [[0, 2], [7, 1]], "session": "a"}

The format is Mooncake's (Qin et al., FAST 2025); `hash_ranges` ([first, count], ...) says the same in fewer bytes,
and `session`, `turn` and `stop` are extra fields of agent traces.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from os import PathLike
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput

MAX_BLOCKS = 1 << 24  # of one prompt: a range with more is a typing error, not a prompt


class TraceError(InvalidInput):
    """A line of a trace cannot be read: `file`, `line` (from 1) and `field` (None: the line as a whole) say where."""

    def __init__(self, file: str, line: int, field: str | None, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem if field is None else f'{field}: {problem}'}")
        self.file = file
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    timestamp: float  # milliseconds since the trace began
    input_length: int  # tokens of the prompt
    output_length: int  # tokens generated
    blocks: array[int]  # the prompt's block ids, typecode "q"
    session: str | None = None
    turn: int | None = None
    stop: str | None = None  # why it ended: "tool_use", "end_turn", ...


def read(trace: str | PathLike[str] | Traversable) -> Iterator[TraceRequest]:
    """The requests of a JSONL file in file order, read as you go. Blank lines are skipped; a bad one raises
    TraceError.

    >>> sum(len(request.blocks) for request in read(sample("conversation"))) > 5000
    True
    """
    file = trace if isinstance(trace, Traversable) else Path(trace)
    with file.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield parse(text, str(trace), number)


def sample(name: str) -> Traversable:
    """A small trace shipped with the package: "conversation" (512-token blocks) or "cc_agent" (64-token blocks)."""
    file = resources.files("radixkv_traces").joinpath("data", f"{name}.jsonl")
    if not file.is_file():
        raise InvalidInput(f"sample {name!r}: there are 'conversation' and 'cc_agent'")
    return file


def parse(text: str, file: str = "<line>", line: int = 1) -> TraceRequest:
    """One line. O(blocks).

    >>> parse('{"timestamp": 0, "input_length": 90, "output_length": 5, "hash_ranges": [[3, 2], [9, 1]]}').blocks
    array('q', [3, 4, 9])
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise TraceError(file, line, None, f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(file, line, None, f"a JSON {type(fields).__name__}, not an object")
    return _Line(file, line, fields).request()


@dataclass(frozen=True, slots=True)
class _Line:
    """A decoded line, and where it stands."""

    file: str
    line: int
    fields: dict[str, Any]

    def request(self) -> TraceRequest:
        return TraceRequest(
            self._time(),
            self._count("input_length"),
            self._count("output_length"),
            self._ids() if "hash_ids" in self.fields else self._ranges(),
            self._text("session"),
            self._count("turn") if self.fields.get("turn") is not None else None,
            self._text("stop"),
        )

    def _wrong(self, field: str, problem: str) -> TraceError:
        return TraceError(self.file, self.line, field, problem)

    def _required(self, field: str) -> Any:
        if field not in self.fields:
            raise self._wrong(field, "missing")
        return self.fields[field]

    def _time(self) -> float:
        value = self._required("timestamp")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._wrong("timestamp", f"{value!r} is not a number of milliseconds >= 0")
        return float(value)

    def _count(self, field: str) -> int:
        value = self._required(field)
        if not _is_count(value):
            raise self._wrong(field, f"{value!r} is not an int >= 0")
        return int(value)

    def _text(self, field: str) -> str | None:
        value = self.fields.get(field)
        if value is not None and not isinstance(value, str):
            raise self._wrong(field, f"{value!r} is not a string")
        return value

    def _ids(self) -> array[int]:
        if "hash_ranges" in self.fields:
            raise self._wrong("hash_ranges", "given beside hash_ids")
        values = self.fields["hash_ids"]
        if not isinstance(values, list):
            raise self._wrong("hash_ids", f"{values!r} is not a list")
        for value in values:
            if not _is_count(value):
                raise self._wrong("hash_ids", f"{value!r} is not an int, 0 <= id < 2**63")
        return array("q", values)

    def _ranges(self) -> array[int]:
        values = self.fields.get("hash_ranges")
        if values is None:
            raise self._wrong("hash_ids", "missing (and no hash_ranges either)")
        if not isinstance(values, list):
            raise self._wrong("hash_ranges", f"{values!r} is not a list")
        blocks = array("q")
        for pair in values:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_count, pair)):
                raise self._wrong("hash_ranges", f"{pair!r} is not [first >= 0, count >= 0]")
            first, count = pair
            if len(blocks) + count > MAX_BLOCKS or first + count > 1 << 63:
                raise self._wrong("hash_ranges", f"{pair!r} makes more than {MAX_BLOCKS} blocks or ids >= 2**63")
            blocks.extend(range(first, first + count))
        return blocks


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
