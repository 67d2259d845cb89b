"""Read a recorded workload of any format: files of block ids or of text, recognised by their first line.

The formats are in `mooncake` (block ids, and radixkv's own recordings) and `chats` (text). Files may be gzipped. They
are read line by line, so only one line is in memory.
"""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import IO, TypeAlias, cast

from radixkv.errors import InvalidInput
from radixkv_traces import chats, mooncake
from radixkv_traces.chats import ChatRequest
from radixkv_traces.mooncake import decoded, parse
from radixkv_traces.records import Line, TraceError, TraceRequest

__all__ = ["FORMATS", "ChatRequest", "TraceError", "TraceRequest", "open_trace", "parse", "read", "sample"]

Source: TypeAlias = "str | PathLike[str] | Traversable"
Request: TypeAlias = "TraceRequest | ChatRequest"

FORMATS = ("auto", "mooncake", "chat", "taubench")
SAMPLES = {"conversation": "jsonl", "cc_agent": "jsonl", "chat": "jsonl", "taubench": "json", "recording": "jsonl"}
_HEAD = 1 << 16  # bytes that are read to recognise a file's format


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
    with _opened(trace) as file:
        lines = _Lines(file, name)
        head = lines.head()
        if head.lstrip().startswith(b"["):
            array = enumerate(chats.elements(_Pieces(head, lines), name, lines.number), 1)
            yield from _by_object(((f"conversation {number}", line) for number, line in array), format)
        elif head:
            texts = (text for text in chain([lines.whole(head)], lines) if text.strip())
            objects = (decoded(text, name, lines.number) for text in texts)
            yield from _by_object(((f"line {line.line}", line) for line in objects), format)


def _by_object(objects: Iterator[tuple[str, Line]], format: str) -> Iterator[Request]:
    """Return the requests of a file's objects. A session without a name gets the number of its object."""
    for name, line in objects:
        format = _detect(line) if format == "auto" else format
        if format == "mooncake":
            yield mooncake.request(line)
        elif format == "chat":
            yield from chats.conversation(line, name)
        else:
            yield from chats.trajectory(line)


_SIGNS = {"hash_ids": "mooncake", "hash_ranges": "mooncake", "messages": "chat", "traj": "taubench"}


def _detect(first: Line) -> str:
    """Return the format of a file with this first object."""
    for field, format in _SIGNS.items():
        if field in first.fields:
            return format
    if "role" in first.fields:
        raise first.wrong(None, 'this begins with a message: a conversation is an object, {"messages": [...]}')
    known = ", ".join(_SIGNS)
    raise first.wrong(None, f"this begins like no trace: there is none of {known}; --format names one")


@contextmanager
def _opened(trace: Source) -> Iterator[IO[bytes]]:
    """Open the file's bytes, unzipped if needed; standard input stays open."""
    with ExitStack() as files:
        if trace == "-":
            raw: IO[bytes] = sys.stdin.buffer
        else:
            raw = files.enter_context((trace if isinstance(trace, Traversable) else Path(trace)).open("rb"))
        peek = getattr(raw, "peek", None)
        if peek is not None and peek(2)[:2] == b"\x1f\x8b":
            raw = cast(IO[bytes], files.enter_context(gzip.open(raw)))
        yield raw


@dataclass(slots=True)
class _Lines:
    """Counted lines of text; bytes that are not text raise TraceError."""

    file: IO[bytes]
    name: str
    number: int = 0  # of the last line read

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number += 1
        raw = self.next_bytes(self.file.readline)
        if not raw:
            raise StopIteration
        return self.text(raw)

    def head(self) -> bytes:
        """Return the beginning of the first line that is not blank; b"" if there is none."""
        while True:
            self.number += 1
            raw = self.next_bytes(self.file.readline, _HEAD)
            if self.number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip() or not raw:
                return raw

    def whole(self, head: bytes) -> str:
        """Return the whole line with this beginning."""
        return self.text(head if head.endswith(b"\n") else head + self.next_bytes(self.file.readline))

    def next_bytes(self, read: Callable[..., bytes], *size: int) -> bytes:
        """Read the next bytes of the file."""
        try:
            return read(*size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(self.name, self.number, None, f"the gzip file is damaged: {error}") from error

    def text(self, raw: bytes) -> str:
        """Decode bytes to text."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(self.name, self.number, None, f"not UTF-8: {error}") from error


class _Pieces:
    """A file as a stream of text, with or without line breaks."""

    def __init__(self, head: bytes, lines: _Lines) -> None:
        self._head = head
        self._lines = lines
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def read(self, size: int) -> str:
        """Return the next characters, at most `size`; "" at the end."""
        text = ""
        while not text:
            raw, self._head = self._head or self._lines.next_bytes(self._lines.file.read, size), b""
            try:
                text = self._decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise TraceError(self._lines.name, self._lines.number, None, f"not UTF-8: {error}") from error
            if not raw:
                break
        return text
