"""Write the chat requests of a server to a file that `radixkv-replay lint` reads: their texts, one line of JSON each.

The event loop queues a request at its end, and a second thread writes it. An error, such as a full disk, is logged once
and ends the record, never a request.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from radixkv.chat.messages import Message
from radixkv.engine.observers.trace_writer import LineFile
from radixkv.serve.history import Tools

_log = logging.getLogger(__name__)
_MOST_WAITING = 1000  # requests; with more of them the disk is too slow, and the record ends


class TextRecord(Protocol):
    """Takes the chat requests of a server when they end."""

    def add(
        self,
        began: float,
        namespace: Hashable,
        session: int,
        messages: Sequence[Message],
        tools: Tools,
        output_length: int,
    ) -> None:
        """Record a request that arrived at `began`, in seconds of time.monotonic, and its reply of so many tokens."""

    def close(self) -> None:
        """Write the queued requests."""


def text_record(path: str | None) -> TextRecord:
    """Return the record in a new file at `path`; with None, one that writes nothing. Raises OSError."""
    return NoRecord() if path is None else TextFile(Path(path))


class NoRecord:
    """The record of a server that writes no texts."""

    def add(self, *_: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TextFile:
    """Write requests to a new file that only its owner may read. Call `add` on one thread."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises FileExistsError and OSError."""
        self._path, self._file, self._started = path, LineFile(path), time.monotonic()
        self._thread = ThreadPoolExecutor(1, "radixkv-record-text")
        self._salt = secrets.token_bytes(16)
        self._queued = self._taken = 0
        self._ended = self._closed = False
        _log.warning("the texts of all chat requests are written to %s, which only its owner may read", path)

    def add(
        self,
        began: float,
        namespace: Hashable,
        session: int,
        messages: Sequence[Message],
        tools: Tools,
        output_length: int,
    ) -> None:
        """Queue a request. A namespace becomes a number, which tells nothing of its tenant. O(1)."""
        if self._ended or self._closed:
            return
        if self._queued - self._taken >= _MOST_WAITING:
            self._end(OSError(f"{_MOST_WAITING} requests wait to be written: the disk does not keep up"))
            return
        fields: dict[str, Any] = {"timestamp": max(round((began - self._started) * 1e3), 0), "session": str(session)}
        if namespace is not None:
            fields["namespace"] = str(abs(hash((self._salt, namespace))))
        if tools:
            fields["tools"] = tools
        self._queued += 1
        self._thread.submit(self._write, {**fields, "messages": messages, "output_length": output_length})

    def close(self) -> None:
        """Write the queued requests, and wait for that. May be called twice."""
        self._closed = True
        self._thread.shutdown()
        with self._file:  # closes it
            pass

    # ---- on the writing thread

    def _write(self, fields: dict[str, Any]) -> None:
        self._taken += 1
        if self._ended:
            return
        try:
            self._file.write(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        except Exception as problem:
            self._end(problem)

    def _end(self, problem: Exception) -> None:
        self._ended = True
        _log.warning("the record of texts in %s has ended, and the file keeps its lines: %s", self._path, problem)
