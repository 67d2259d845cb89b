"""Write a trace of requests that can be replayed: lengths, times and block ids, never a text.

The engine's thread queues a few facts of each request at its end; a second thread hashes and writes.

A block id stands for the tokens of a block and all tokens before them in the namespace: equal ids mean equal prefixes.
It is a keyed hash (BLAKE2b) with a random key for each file. The key is never written, so a reader of the file can see
which prefixes were shared, but cannot test a guess of their text.

Lines are in the Mooncake format. Each is written when its request ends, so that a killed process loses no ended
request. `timestamp` is the arrival of a request, and readers sort by it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv import private_files
from radixkv.engine.observers import EngineObserver
from radixkv.errors import InvalidInput, RequestCancelled

if TYPE_CHECKING:
    from radixkv.engine.request import Request, TokenIds

_log = logging.getLogger(__name__)
MAX_QUEUED = 10_000
"""Requests that may wait to be written; with more of them the disk is too slow, and recording ends."""
CLOSE_TIMEOUT = 10.0
"""Seconds that a closing engine waits for requests to be written."""
MAX_NAMESPACES = 65_536
"""Namespaces whose keys are kept; the one unused for longest loses its key, and gets a new one if it is used again."""


def check_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of a new file, None for none. Raises InvalidInput if it exists, or its folder does not."""
    if path is None:
        return None
    file = Path(path)
    if file.exists():
        raise InvalidInput(f"record={str(path)!r} exists, and its block ids have another key: name a new file")
    if not file.parent.is_dir():
        raise InvalidInput(f"record={str(path)!r}: there is no folder {str(file.parent)!r}")
    return file


@dataclass(frozen=True, slots=True)
class _Ended:
    """The facts of a request at its end. `namespace` counts namespaces from 1; 0 is the one without a name."""

    submitted: float
    prompt: TokenIds
    root: bytes
    namespace: int
    output_length: int
    session: int | None
    stop: str


class TraceWriter(EngineObserver):
    """Writes the requests of one engine to one new file that only its owner may read."""

    def __init__(self, path: Path, block_size: int) -> None:
        """Create the file, for blocks of `block_size` tokens. Raises OSError."""
        self._path, self._file = path, LineFile(path)
        self._block_size, self._started = block_size, time.perf_counter()
        self._key = secrets.token_bytes(32)
        self._roots: OrderedDict[Hashable, tuple[int, bytes]] = OrderedDict()
        self._namespaces = 0
        self._inbox: SimpleQueue[_Ended | None] = SimpleQueue()
        self._stopped = False  # closed, or ended by an error
        self._thread = threading.Thread(target=self._write_all, name="radixkv-record", daemon=True)
        self._thread.start()

    def ended(self, request: Request, error: Exception | None) -> None:
        """Queue the facts of a request that ended. O(streams); raises nothing."""
        if self._stopped:
            return
        try:
            if not request.streams:
                return  # it was never admitted, so that its prompt was not looked up in the cache
            if self._inbox.qsize() >= MAX_QUEUED:
                raise OSError(f"{MAX_QUEUED} requests wait to be written: the disk does not keep up")
            self._inbox.put(self._facts(request, error))
        except Exception as problem:
            self._give_up(problem)

    def crashed(self, error: BaseException) -> None:
        """Do nothing: the trace has each request when it ends."""

    def close(self) -> None:
        """Write the queued requests, and wait at most `CLOSE_TIMEOUT` seconds for that. May be called twice."""
        self._stopped = True
        self._inbox.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    # ---- on the engine's thread

    def _facts(self, request: Request, error: Exception | None) -> _Ended:
        namespace, root = self._root(request.namespace)
        return _Ended(
            submitted=request.reported.submitted,
            prompt=request.prompt,
            root=root,
            namespace=namespace,
            output_length=sum(stream.output_length for stream in request.streams),
            session=request.session,
            stop=_reason(request, error),
        )

    def _root(self, namespace: Hashable) -> tuple[int, bytes]:
        """Return the number of a namespace and the key of its block ids."""
        if namespace is None:
            return 0, self._key
        if namespace not in self._roots:
            self._namespaces += 1
            self._roots[namespace] = self._namespaces, secrets.token_bytes(32)
            if len(self._roots) > MAX_NAMESPACES:
                self._roots.popitem(last=False)
        self._roots.move_to_end(namespace)
        return self._roots[namespace]

    # ---- on the writing thread

    def _write_all(self) -> None:
        """Write until the end, or until an error, which is logged once."""
        try:
            with self._file:
                while (ended := self._inbox.get()) is not None:
                    self._file.write(_line(ended, self._block_size, self._started).encode())
        except Exception as problem:
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        if not self._stopped:
            self._stopped = True
            self._inbox.put(None)
            _log.warning(
                "recording to %s has ended; the engine goes on, and the file keeps its lines: %s", self._path, problem
            )


def _line(ended: _Ended, block_size: int, started: float) -> str:
    """Return the line of a request; `started` is the beginning of the recording. O(tokens of the prompt)."""
    fields: dict[str, Any] = {
        "timestamp": max(round((ended.submitted - started) * 1e3), 0),
        "input_length": len(ended.prompt),
        "output_length": ended.output_length,
        "hash_ids": block_ids(ended.prompt, block_size, ended.root),
        "stop": ended.stop,
        "block_size": block_size,
    }
    if ended.session is not None:
        fields["session"] = str(ended.session)
    if ended.namespace:
        fields["namespace"] = str(ended.namespace)
    return json.dumps(fields, separators=(",", ":")) + "\n"


class LineFile:
    """A new file of whole lines: a line that a full disk took in part is truncated."""

    def __init__(self, path: Path) -> None:
        self._raw = private_files.create(path, buffering=0)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append all of the data, or raise OSError and append nothing."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except OSError:
            self._raw.truncate(self._size)
            raise
        self._size += len(data)

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. May be called twice. Raises OSError."""
        private_files.close(self._raw)


def block_ids(tokens: TokenIds, block_size: int, key: bytes) -> list[int]:
    """Return an id below 2**63 for each block, a part-filled last one included. O(tokens).

    The id is a hash of the block and of all blocks before it.
    """
    raw = np.asarray(tokens, np.int32).tobytes()
    before, ids = b"", []
    for start in range(0, len(raw), 4 * block_size):
        before = blake2b(before + raw[start : start + 4 * block_size], digest_size=16, key=key).digest()
        ids.append(int.from_bytes(before[:8], "little") >> 1)
    return ids


def _reason(request: Request, error: Exception | None) -> str:
    if error is not None:
        return "cancelled" if isinstance(error, RequestCancelled) else "failed"
    return request.streams[0].finish_reason or "length"
