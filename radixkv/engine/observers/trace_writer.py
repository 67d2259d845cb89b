"""Writes down what requests asked for, as a trace that can be replayed: lengths, times and block ids, never a text.

Knows requests that ended, and a file. Knows no cache, model or step: the engine's thread hands over what there is to
know of a request when it ends, which costs an append, and a thread of its own hashes and writes.

A block id stands for the tokens of a block and all that came before them in its namespace, so equal ids mean equal
prefixes. It is a keyed hash (BLAKE2b), and the key is drawn for each file and never written: who has the file can tell
what was shared, but not what it was, nor try whether it was a text that he guesses.

Lines are in the Mooncake format. Each is written when its request ends, so that a process that is killed loses none of
those that had ended; `timestamp` says when a request came, and readers sort by it.
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

from radixkv.engine.observers import EngineObserver
from radixkv.errors import InvalidInput, RequestCancelled

if TYPE_CHECKING:
    from radixkv.engine.request import Request, TokenIds

_log = logging.getLogger(__name__)
BEHIND = 10_000
"""So many requests may wait to be written: beyond that the disk hangs, and recording ends."""
PATIENCE = 10.0
"""Seconds for which a closing engine waits for what is still to be written."""
NAMESPACES = 65_536
"""Of so many namespaces, those used last, it is known that their ids are the same as before."""


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
    """What is known of a request at its end. `namespace` counts them from 1; 0 is the one without a name."""

    submitted: float
    prompt: TokenIds
    root: bytes
    namespace: int
    output_length: int
    session: int | None
    stop: str


class TraceWriter(EngineObserver):
    """One engine's requests, in one new file that only its owner may read."""

    def __init__(self, path: Path, block_size: int) -> None:
        """Begin the file, in blocks of `block_size` tokens. Raises OSError."""
        self._path, self._file = path, _Whole(path)
        self._block_size, self._started = block_size, time.perf_counter()
        self._key = secrets.token_bytes(32)
        self._roots: OrderedDict[Hashable, tuple[int, bytes]] = OrderedDict()
        self._namespaces = 0
        self._inbox: SimpleQueue[_Ended | None] = SimpleQueue()
        self._stopped = False  # nothing more is taken: closed, or given up
        self._thread = threading.Thread(target=self._write_all, name="radixkv-record", daemon=True)
        self._thread.start()

    def ended(self, request: Request, error: Exception | None) -> None:
        """A request ended, with an error or without. On the engine's thread; O(streams), and raises nothing."""
        if self._stopped:
            return
        try:
            if not request.streams:
                return  # it never came in: what was not looked up in the cache is not in the trace
            if self._inbox.qsize() >= BEHIND:
                raise OSError(f"{BEHIND} requests wait to be written: the disk does not keep up")
            self._inbox.put(self._facts(request, error))
        except Exception as problem:
            self._give_up(problem)

    def close(self) -> None:
        """Write what is left, and wait for that, but not for ever for a disk that hangs. May be called twice."""
        self._stopped = True
        self._inbox.put(None)
        self._thread.join(PATIENCE)

    # ---- on the engine's thread

    def _facts(self, request: Request, error: Exception | None) -> _Ended:
        namespace, root = self._root(request.namespace)
        return _Ended(
            submitted=request.submitted,
            prompt=request.prompt,
            root=root,
            namespace=namespace,
            output_length=sum(stream.output_length for stream in request.streams),
            session=request.session,
            stop=_reason(request, error),
        )

    def _root(self, namespace: Hashable) -> tuple[int, bytes]:
        """A namespace's number, and the key of its ids."""
        if namespace is None:
            return 0, self._key
        if namespace not in self._roots:
            self._namespaces += 1
            self._roots[namespace] = self._namespaces, secrets.token_bytes(32)
            if len(self._roots) > NAMESPACES:
                self._roots.popitem(last=False)
        self._roots.move_to_end(namespace)
        return self._roots[namespace]

    # ---- on a thread of its own

    def _write_all(self) -> None:
        """Write until the end, or until something goes wrong, which is said once."""
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
                "recording to %s has ended, the engine goes on, and what was recorded is there: %s", self._path, problem
            )


def _line(ended: _Ended, block_size: int, started: float) -> str:
    """A request's line; `started` is when the recording began. O(tokens of its prompt)."""
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


class _Whole:
    """A new file that ends with a whole line whatever happens: what a full disk took in part is cut off again."""

    def __init__(self, path: Path) -> None:
        self._raw = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append all of it, or raise OSError and have appended nothing."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except OSError:
            self._raw.truncate(self._size)
            raise
        self._size += len(data)

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def block_ids(tokens: TokenIds, block_size: int, key: bytes) -> list[int]:
    """An id for each block, the last and part-filled one included: a hash of it and all before, below 2**63.

    O(tokens).
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
