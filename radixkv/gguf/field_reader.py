"""Read the fields of a GGUF header in order: numbers, strings and arrays, each checked against the bytes that are left.

The file is untrusted. A length is compared with the rest of the file, and with limits far above any real header, before
memory is allocated for it. So a broken file costs bounded time and memory. Only a window of the file is in memory.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from radixkv.errors import InvalidInput

MOST_BYTES = 128 * 2**20  # of a header; one with a vocabulary of 262,144 tokens and their merges takes 20 MB
MOST_VALUES = 5_000_000  # in all arrays of a header
_ARRAY_COST = 16  # an empty array counts as this number of values, so that nested arrays keep the limit on time too
_DEPTH = 4  # of nested arrays
_LONGEST_NAME = 65_535  # bytes of a key or of a tensor's name
_WINDOW = 2**20  # bytes read at once

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: Struct("<" + code) for kind, code in _NUMBERS.items()}
_U32, _U64 = Struct("<I"), Struct("<Q")


class FieldReader:
    """Read little-endian fields from the current position of a file of `size` bytes.

    Every method raises InvalidInput, with the position, if the field is broken or does not fit into the file.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._window, self._at = b"", 0
        self._start = file.tell()  # position of the window in the file
        self._values = 0

    @property
    def position(self) -> int:
        """Bytes from the start of the file to the next field."""
        return self._start + self._at

    @property
    def left(self) -> int:
        """Bytes from the next field to the end of the file, or to the limit on the size of a header."""
        return min(self._size, MOST_BYTES) - self.position

    def broken(self, reason: str) -> InvalidInput:
        """Return the error for a field that cannot be read, with the position up to which the header was read."""
        return InvalidInput(
            f"{self._path} is truncated or broken at byte {self.position:,} of {self._size:,}: {reason}: "
            "fetch or copy it again"
        )

    def u32(self) -> int:
        """Return an unsigned number of 32 bits."""
        at = self._take(4)
        return int(_U32.unpack_from(self._window, at)[0])

    def u64(self) -> int:
        """Return an unsigned number of 64 bits."""
        at = self._take(8)
        return int(_U64.unpack_from(self._window, at)[0])

    def count(self, things: str, least: int, most: int) -> int:
        """Return the number of `things` that follow; each takes at least `least` bytes."""
        number = self.u64()
        if number > most or number * least > self.left:
            raise self.broken(f"{number:,} {things} do not fit into the {self.left:,} bytes left for the header")
        return number

    def name(self) -> str:
        """Return a key or a tensor's name: not empty, UTF-8, printable."""
        length = self.u64()
        if not 0 < length <= _LONGEST_NAME:
            raise self.broken(f"a name of {length:,} bytes")
        at = self._take(length)
        name = self._window[at : at + length].decode("utf-8", "replace")
        if not name.isprintable() or "\ufffd" in name:
            raise self.broken(f"the name {name[:80]!r} is not printable UTF-8")
        return name

    def value(self) -> Any:
        """Return a metadata value, preceded by its type: a number, a bool, a string, or a list of one of these.

        Bytes of a string that are not UTF-8 become lone surrogates ("surrogateescape"). Some vocabularies have such
        tokens, and `text.encode("utf-8", "surrogateescape")` returns their exact bytes.
        """
        return self._value(self.u32(), 0)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array(depth + 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.broken(f"unknown value type {kind}")
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > _DEPTH:
            raise self.broken(f"arrays nested more than {_DEPTH} deep")
        kind = self.u32()
        least = _SCALARS[kind].size if kind in _SCALARS else 8 if kind == _STRING else 12
        number = self.count("array values", least, MOST_VALUES)
        self._values += number + _ARRAY_COST
        if self._values > MOST_VALUES:
            raise self.broken(f"more than {MOST_VALUES:,} array values")
        if kind == _STRING:
            return self._strings(number)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(number)]
        if kind not in _SCALARS:
            raise self.broken(f"unknown array type {kind}")
        return self._numbers(kind, number)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        size = _SCALARS[kind].size * count
        at = self._take(size)
        found = Struct(f"<{count}{_NUMBERS[kind]}").unpack_from(self._window, at)
        if kind != _BOOL:
            return list(found)
        if any(each > 1 for each in found):
            raise self.broken("a truth value that is neither 0 nor 1")
        return [each == 1 for each in found]

    def _strings(self, count: int) -> list[str]:
        """Return strings; the inner loop reads those that lie completely in the window."""
        found: list[str] = []
        append, unpack = found.append, _U64.unpack_from
        while len(found) < count:
            self._have(8)
            window, at = self._window, self._at
            (length,) = unpack(window, at)
            if length > self.left - 8:
                raise self.broken(f"a string of {length:,} bytes, with {self.left - 8:,} left")
            self._have(8 + length)
            window, at, end = self._window, self._at, len(self._window)
            for _ in range(count - len(found)):
                if at + 8 > end:
                    break
                (length,) = unpack(window, at)
                stop = at + 8 + length
                if stop > end:
                    break
                append(window[at + 8 : stop].decode("utf-8", "surrogateescape"))
                at = stop
            self._at = at
        return found

    def _take(self, count: int) -> int:
        """Advance by `count` bytes, and return the index of the first one in the window."""
        self._have(count)
        self._at += count
        return self._at - count

    def _have(self, count: int) -> None:
        """Move the window so that it has the next `count` bytes."""
        if self._at + count <= len(self._window):
            return
        if count > self.left:
            raise self.broken(f"a field of {count:,} bytes, with {max(self.left, 0):,} left")
        rest = self._window[self._at :]
        self._start, self._at = self.position, 0
        self._window = rest + self._file.read(max(count - len(rest), _WINDOW))
        if len(self._window) < count:
            raise self.broken("the file ended while it was read")
