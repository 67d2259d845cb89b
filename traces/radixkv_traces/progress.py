"""How far a command is, on one line of stderr; nothing where stderr is no terminal. Knows no command."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

_PERIOD = 0.1  # seconds between two drawings


class Progress:
    """A line that is drawn over; leaving it wipes the line."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._on = self._stream.isatty()
        self._drawn = 0.0
        self._width = 0

    def __call__(self, done: int, total: int | None = None) -> None:
        """Say that `done` of `total` are done; O(1), drawn ten times a second at most."""
        if not self._on or (now := time.monotonic()) - self._drawn < _PERIOD:
            return
        self._drawn = now
        share = f"{done:,}" if not total else f"{done:,} of {total:,} ({done / total:.0%})"
        line = f"{self._what}: {share} requests"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def counted(self, each: Iterable[T]) -> Iterator[T]:
        """The same, counted as they pass."""
        for number, item in enumerate(each):
            self(number)
            yield item

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
