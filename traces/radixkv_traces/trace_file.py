"""The bytes of a trace: a file, gzipped or not, or standard input, as counted lines or as a stream of text."""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from os import PathLike
from pathlib import Path
from typing import IO, TypeAlias, cast

from radixkv_traces.records import TraceError

Source: TypeAlias = "str | PathLike[str] | Traversable"

HEAD = 1 << 16  # bytes that are read to recognise a file's format


@contextmanager
def opened(trace: Source) -> Iterator[IO[bytes]]:
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
class Lines:
    """Counted lines of text; bytes that are not text raise TraceError.

    Only the last line may lack its line break. If that one ends inside a character, it is returned up to there.
    """

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
            raw = self.next_bytes(self.file.readline, HEAD)
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
            if error.end == len(raw) and error.reason == "unexpected end of data":
                return raw[: error.start].decode("utf-8")
            raise TraceError(self.name, self.number, None, f"not UTF-8: {error}") from error


class Pieces:
    """A file as a stream of text, with or without line breaks."""

    def __init__(self, head: bytes, lines: Lines) -> None:
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
