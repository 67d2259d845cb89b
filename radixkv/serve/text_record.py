"""Write the texts of a server's chat requests to a file that `radixkv-replay lint` reads, one line of JSON each.

The event loop queues a request at its end, and a second thread writes it. An error, such as a full disk, is logged once
and ends the record, never a request.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from radixkv.chat.messages import Message
from radixkv.engine.observers.trace_writer import LineFile
from radixkv.serve.conversations import ChatPrompt

_log = logging.getLogger(__name__)
_MOST_WAITING = 1000  # requests; with more of them the disk is too slow, and the record ends


class TextRecord:
    """Write requests to a new file that only its owner may read; without a path, write nothing."""

    def __init__(self, path: str | None) -> None:
        """Create the file. Raises FileExistsError and OSError."""
        self._path, self._salt, self._started = path, secrets.token_bytes(16), time.monotonic()
        self._thread = ThreadPoolExecutor(1, "radixkv-record-text")
        self._queued = self._taken = 0
        self._file = None if path is None else LineFile(Path(path))
        self._takes = path is not None
        if path is not None:
            _log.warning("the texts of all chat requests are written to %s, which only its owner may read", path)

    def add(self, began: float, model: str, prompt: ChatPrompt, messages: Sequence[Message], output: int) -> None:
        """Queue a request that arrived at `began` of time.monotonic; a number stands for model and namespace. O(1)."""
        if not self._takes:
            return
        if self._queued - self._taken >= _MOST_WAITING:
            self._end(OSError(f"{_MOST_WAITING} requests wait to be written: the disk does not keep up"))
        fields = {
            "timestamp": max(round((began - self._started) * 1e3), 0),
            "session": str(prompt.session),
            "namespace": str(abs(hash((self._salt, model, prompt.namespace)))),
            "tools": prompt.tools or [],
            "messages": messages,
            "output_length": output,
        }
        self._queued += 1
        self._thread.submit(self._write, fields)

    def close(self) -> None:
        """Write the queued requests, and wait for that. May be called twice."""
        self._takes = False
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    def _write(self, fields: dict[str, Any]) -> None:
        self._taken += 1
        assert self._file is not None
        try:
            self._file.write(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        except Exception as problem:
            self._end(problem)

    def _end(self, problem: Exception) -> None:
        if self._takes:
            self._takes = False
            _log.warning("the record of texts in %s has ended, and the file keeps its lines: %s", self._path, problem)
