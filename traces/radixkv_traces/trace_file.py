"""Read the contents of a trace: counted lines or a stream of text, the elements of a JSON array, the rows of Parquet.

The bytes come from a file, gzipped or not, or from standard input. A JSON array is read element by element, so that a
file may be larger than memory. Published sets of conversations, such as LMSYS-Chat-1M and WildChat, are Parquet files:
pyarrow reads them, which is the extra `parquet` and is imported only here.
"""

from __future__ import annotations

import codecs
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.resources.abc import Traversable
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from radixkv.errors import InvalidInput
from radixkv_traces.records import Line, TraceError

Source: TypeAlias = "str | PathLike[str] | Traversable"

HEAD = 1 << 16  # bytes that are read to recognise a file's format


@contextmanager
def opened(trace: Source) -> Iterator[IO[bytes]]:
    """Open the file's bytes, unzipped if needed; standard input stays open. Raises InvalidInput without access."""
    with ExitStack() as files:
        if trace == "-":
            raw: IO[bytes] = sys.stdin.buffer
        else:
            try:
                raw = files.enter_context((trace if isinstance(trace, Traversable) else Path(trace)).open("rb"))
            except OSError as error:
                raise InvalidInput(f"{trace}: {error.strerror}") from error
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
    """A file as a stream of text, with or without line breaks, that is read piece by piece."""

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


# ---- JSON arrays


MAX_ELEMENT = 1 << 28  # characters of one session; a longer one is a bracket that never closes
_CHUNK = 1 << 16
_SPACE = " \t\r\n"


def array_elements(text: Pieces, file: str, line: int = 1) -> Iterator[Line]:
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

    def __init__(self, text: Pieces, file: str, line: int) -> None:
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


# ---- Parquet


PARQUET_MAGIC = b"PAR1"
_BATCH = 64  # rows that are decoded at a time: a conversation may have a megabyte


def parquet_rows(file: IO[bytes], name: str) -> Iterator[Line]:
    """Yield the rows in file order; the number of a line is its row's, from 1. It takes the memory of a row group.

    Dates become texts as in ISO 8601. Raises InvalidInput without pyarrow, and TraceError for a damaged file and for
    one that cannot be read from its end, such as a pipe.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InvalidInput(f"{name} is a Parquet file: pip install 'radixkv[parquet]' adds its reader") from None
    if not file.seekable():
        raise TraceError(name, 1, None, "Parquet is read from its end: name the file instead of piping it")
    number = 0
    try:
        file.seek(0)
        for batch in ParquetFile(file).iter_batches(_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield Line(name, number, _plain(row))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TraceError(name, number + 1, None, f"the Parquet file is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value
