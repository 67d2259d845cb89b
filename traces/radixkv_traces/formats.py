"""Read a recorded workload of any format: a format is one entry of FORMAT_TABLE, recognised by its first object.

The readers of block ids, of radixkv's own recordings, and of lengths are in `mooncake`. All others read text. Files may
be gzipped. They are read line by line, so only one line is in memory. The rows of a Parquet file are read like lines.

A writer that was killed leaves a file whose last line is cut. All other lines are read, and a warning is logged.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from typing import TypeAlias

from radixkv.errors import InvalidInput
from radixkv_traces import agent_logs, chats, mooncake
from radixkv_traces.chats import ChatRequest
from radixkv_traces.mooncake import decoded, parse
from radixkv_traces.records import Line, Named, TraceError, TraceRequest
from radixkv_traces.trace_file import PARQUET_MAGIC, Lines, Pieces, Source, array_elements, opened, parquet_rows

__all__ = [
    "FORMATS",
    "FORMAT_TABLE",
    "ChatRequest",
    "Format",
    "Source",
    "TraceError",
    "TraceReader",
    "TraceRequest",
    "open_trace",
    "parse",
    "read",
    "sample",
]

_log = logging.getLogger(__name__)
_LAST_WORDS = ("true", "false", "null", "NaN", "-Infinity", ".", "e+", "e-", "E+", "E-")
"""A value that is cut ends in the beginning of one of these; so does a number after its digits."""

Request: TypeAlias = "TraceRequest | ChatRequest"


Reader: TypeAlias = "Callable[[Iterator[Named]], Iterator[Request]]"


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its reader, the fields by which its first object is recognised, and the facts that its files lack.

    Facts that some files of the format have, such as times, are not listed here: `import` looks for them.
    """

    read: Reader
    signs: tuple[tuple[str, ...], ...]  # the first object has all fields of one of these
    lacks: tuple[str, ...] = ()


_PROMPTS = "the prompts, and with them all shared prefixes"
_SYSTEM = "system prompts, which begin each prompt"
_TOOLS = "the definitions of tools, which begin each prompt"
_THINKING = "the thinking that was sent again"

FORMAT_TABLE: dict[str, Format] = {
    "bailian": Format(mooncake.bailian, (("chat_id", "hash_ids"), ("chat_id", "hash_ranges"))),
    "mooncake": Format(mooncake.requests, (("hash_ids",), ("hash_ranges",))),
    "taubench": Format(chats.trajectories, (("traj",),), (_TOOLS,)),
    "openai-batch": Format(chats.openai_batch, (("custom_id", "body"),)),
    "sharegpt": Format(chats.sharegpt, (("conversations",),), (_SYSTEM,)),
    "chat-logs": Format(
        chats.chat_logs,
        (("conversation", "conversation_id"), ("conversation", "conversation_hash")),
        (_SYSTEM, "times of requests (WildChat has those of the answers)"),
    ),
    "claude-code": Format(
        agent_logs.claude_code,
        (("parentUuid", "sessionId"), ("type", "leafUuid"), ("type", "snapshot"), ("type", "sessionId")),
        (_SYSTEM, _TOOLS, _THINKING),
    ),
    "codex": Format(agent_logs.codex, (("type", "payload"),), (_TOOLS, _THINKING)),
    "azure": Format(mooncake.azure, (("TIMESTAMP", "ContextTokens", "GeneratedTokens"),), (_PROMPTS,)),
    "burstgpt": Format(mooncake.burstgpt, (("Timestamp", "Request tokens", "Response tokens"),), (_PROMPTS,)),
    "chat": Format(chats.conversations, (("messages",),)),
}
"""The formats by name, in the order in which they are tried."""

FORMATS = ("auto", *FORMAT_TABLE)
TEXT_FORMATS = tuple(name for name, format in FORMAT_TABLE.items() if format.read.__module__ != mooncake.__name__)
SAMPLES = {"conversation": "jsonl", "cc_agent": "jsonl", "chat": "jsonl", "taubench": "json", "recording": "jsonl"}


class TraceReader(Iterator[Request]):
    """The requests of a file in file order. `format` is the format's name, once the first request was read."""

    def __init__(self, trace: Source, format: str) -> None:
        self.format = format
        self._requests = self._read(trace)

    def __next__(self) -> Request:
        return next(self._requests)

    def _read(self, trace: Source) -> Iterator[Request]:
        name = "<stdin>" if trace == "-" else str(trace)
        with opened(trace) as file:
            objects = _objects(Lines(file, name))
            first = next(objects, None)
            if first is not None:
                self.format = _detect(first[1]) if self.format == "auto" else self.format
                yield from FORMAT_TABLE[self.format].read(chain([first], objects))


def open_trace(trace: Source, format: str = "auto") -> TraceReader:
    """Read the requests of a file in file order: of block ids (TraceRequest) or of text (ChatRequest).

    "-" is standard input; gzip is recognised by its first bytes. Raises TraceError when it reaches a bad line, and
    InvalidInput for an unknown format. A last line that is cut is left out, and a warning is logged.

    >>> next(open_trace(sample("taubench"))).messages[0]["role"]
    'system'
    """
    if format not in FORMATS:
        raise InvalidInput(f"format {format!r}: allowed are {', '.join(FORMATS)}")
    return TraceReader(trace, format)


def read(trace: Source) -> Iterator[TraceRequest]:
    """Read the requests of a file of block ids. Blank lines are skipped; a bad one raises TraceError.

    >>> sum(len(request.blocks) for request in read(sample("conversation"))) > 5000
    True
    """
    for request in open_trace(trace, "mooncake"):
        assert isinstance(request, TraceRequest)
        yield request


def sample(name: str) -> Traversable:
    """Return a small trace shipped with the package; the README in its folder describes each.

    "conversation" (512-token blocks), "cc_agent" (64) and "recording" (16, of an engine) are chains of blocks, "chat"
    and "taubench" are text.
    """
    if name not in SAMPLES:
        raise InvalidInput(f"sample {name!r}: there are {', '.join(map(repr, SAMPLES))}")
    return resources.files("radixkv_traces").joinpath("data", f"{name}.{SAMPLES[name]}")


def _objects(lines: Lines) -> Iterator[Named]:
    """Return the objects of a file, each with the name of a session that has no other."""
    head = lines.head()
    if head.startswith(PARQUET_MAGIC):
        yield from ((f"row {line.line}", line) for line in parquet_rows(lines.file, lines.name))
    elif head.lstrip().startswith(b"["):
        array = array_elements(Pieces(head, lines), lines.name, lines.number)
        yield from ((f"conversation {number}", line) for number, line in enumerate(array, 1))
    elif head and (names := _columns(head)):
        lines.whole(head)
        yield from _each(lines, lambda text: _row(text, names, lines), lambda text: text.count(",") < len(names) - 1)
    elif head:
        first = decoded(lines.whole(head), lines.name, lines.number)
        yield f"line {first.line}", first
        yield from _each(lines, lambda text: decoded(text, lines.name, lines.number), _is_cut)


def _each(lines: Lines, read: Callable[[str], Line], is_cut: Callable[[str], bool]) -> Iterator[Named]:
    """Read the lines after the first one, except a last one that `read` refuses and that `is_cut`."""
    for text in lines:
        if not text.strip():
            continue
        try:
            line = read(text)
        except TraceError:
            if text.endswith("\n") or not is_cut(text):
                raise
            _log.warning("%s:%d: the last line is cut, and is left out", lines.name, lines.number)
            return
        yield f"line {line.line}", line


def _is_cut(text: str) -> bool:
    """Whether a line that is not JSON is the beginning of JSON: then the first fault is at its end.

    >>> [_is_cut(text) for text in ('{"a": [1, "x', '{"a": tru', '{"a": 2.', '{"a": what', '{"a": 1}')]
    [True, True, True, False, False]
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as fault:
        rest = text[fault.pos :]
        escape = fault.msg.startswith("Invalid \\u") and len(rest) < 6
        return escape or fault.msg.startswith("Unterminated") or any(each.startswith(rest) for each in _LAST_WORDS)
    return False


def _columns(head: bytes) -> list[str]:
    """Return the names of a CSV file's columns, if its first line has all columns of a format; else nothing."""
    names = [name.strip() for name in head.decode("utf-8", "replace").strip().split(",")]
    known = [sign for format in FORMAT_TABLE.values() for sign in format.signs if len(sign) > 2]
    return names if any(set(sign) <= set(names) for sign in known) else []


def _row(text: str, names: list[str], lines: Lines) -> Line:
    """Return a line of a CSV file as an object of strings."""
    values = next(csv.reader([text]))
    if len(values) != len(names):
        raise TraceError(lines.name, lines.number, None, f"{len(values)} values for {len(names)} columns")
    return Line(lines.name, lines.number, dict(zip(names, values, strict=True)))


def _detect(first: Line) -> str:
    """Return the format of a file with this first object."""
    for name, format in FORMAT_TABLE.items():
        if any(all(field in first.fields for field in sign) for sign in format.signs):
            return name
    if "filetype" in first.fields:
        raise first.wrong(None, "this describes how to generate conversations, it has none")
    if "role" in first.fields:
        raise first.wrong(None, 'this begins with a message: a conversation is an object, {"messages": [...]}')
    known = ", ".join(dict.fromkeys(sign[0] for format in FORMAT_TABLE.values() for sign in format.signs))
    raise first.wrong(None, f"this begins like no trace: there is none of {known}; --format names one")
