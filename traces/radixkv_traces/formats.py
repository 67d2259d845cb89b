"""Read a recorded workload of any format: a format is one entry of FORMAT_TABLE, recognised by its first object.

The readers are in `mooncake` (block ids, and radixkv's own recordings) and `chats` (text). Files may be gzipped. They
are read line by line, so only one line is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from typing import TypeAlias

from radixkv.errors import InvalidInput
from radixkv_traces import chats, json_array, mooncake
from radixkv_traces.chats import ChatRequest
from radixkv_traces.mooncake import decoded, parse
from radixkv_traces.records import Line, Named, TraceError, TraceRequest
from radixkv_traces.trace_file import Lines, Pieces, Source, opened

__all__ = [
    "FORMATS",
    "FORMAT_TABLE",
    "ChatRequest",
    "Format",
    "Source",
    "TraceError",
    "TraceRequest",
    "open_trace",
    "parse",
    "read",
    "sample",
]

Request: TypeAlias = "TraceRequest | ChatRequest"


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its reader, the fields by which its first object is recognised, and the facts that its files lack."""

    read: Callable[[Iterator[Named]], Iterator[Request]]
    signs: tuple[tuple[str, ...], ...]  # the first object has all fields of one of these
    lacks: tuple[str, ...] = ()


FORMAT_TABLE: dict[str, Format] = {
    "bailian": Format(mooncake.bailian, (("chat_id", "hash_ids"), ("chat_id", "hash_ranges"))),
    "mooncake": Format(mooncake.requests, (("hash_ids",), ("hash_ranges",))),
    "chat": Format(chats.conversations, (("messages",),)),
    "taubench": Format(chats.trajectories, (("traj",),)),
}
"""The formats by name, in the order in which they are tried."""

FORMATS = ("auto", *FORMAT_TABLE)
SAMPLES = {"conversation": "jsonl", "cc_agent": "jsonl", "chat": "jsonl", "taubench": "json", "recording": "jsonl"}


def open_trace(trace: Source, format: str = "auto") -> Iterator[Request]:
    """Read the requests of a file in file order: of block ids (TraceRequest) or of text (ChatRequest).

    "-" is standard input; gzip is recognised by its first bytes. Raises TraceError when it reaches a bad line, and
    InvalidInput for an unknown format.

    >>> next(open_trace(sample("taubench"))).messages[0]["role"]
    'system'
    """
    if format not in FORMATS:
        raise InvalidInput(f"format {format!r}: allowed are {', '.join(FORMATS)}")
    return _requests(trace, format)


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


def _requests(trace: Source, format: str) -> Iterator[Request]:
    name = "<stdin>" if trace == "-" else str(trace)
    with opened(trace) as file:
        objects = _objects(Lines(file, name))
        first = next(objects, None)
        if first is not None:
            chosen = _detect(first[1]) if format == "auto" else format
            yield from FORMAT_TABLE[chosen].read(chain([first], objects))


def _objects(lines: Lines) -> Iterator[Named]:
    """Return the objects of a file, each with the name of a session that has no other."""
    head = lines.head()
    if head.lstrip().startswith(b"["):
        array = json_array.elements(Pieces(head, lines), lines.name, lines.number)
        yield from ((f"conversation {number}", line) for number, line in enumerate(array, 1))
    elif head:
        texts = (text for text in chain([lines.whole(head)], lines) if text.strip())
        objects = (decoded(text, lines.name, lines.number) for text in texts)
        yield from ((f"line {line.line}", line) for line in objects)


def _detect(first: Line) -> str:
    """Return the format of a file with this first object."""
    for name, format in FORMAT_TABLE.items():
        if any(all(field in first.fields for field in sign) for sign in format.signs):
            return name
    if "role" in first.fields:
        raise first.wrong(None, 'this begins with a message: a conversation is an object, {"messages": [...]}')
    known = ", ".join(dict.fromkeys(sign[-1] for format in FORMAT_TABLE.values() for sign in format.signs))
    raise first.wrong(None, f"this begins like no trace: there is none of {known}; --format names one")
