"""The caller's end of a request, and the mailbox between it and the engine's thread.

Knows: how chunks and the final result cross threads without anybody polling. Knows no scheduling and no model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from radixkv.engine.outputs import Chunk, Completion
from radixkv.errors import RequestCancelled


class Outlet:
    """A one-way mailbox: the engine's thread puts chunks in and ends it once; a caller's thread takes them out."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        self._ended = threading.Event()
        self._result: Completion | None = None
        self._error: Exception | None = None

    def put(self, chunk: Chunk) -> None:
        """Hand one chunk over."""
        self._chunks.put(chunk)

    def finish(self, completion: Completion) -> None:
        """End with a result."""
        self._end(completion, None)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._end(None, error)

    def _end(self, completion: Completion | None, error: Exception | None) -> None:
        assert not self._ended.is_set(), "an outlet ends once"
        self._result, self._error = completion, error
        self._ended.set()
        self._chunks.put(None)

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self._ended.is_set()

    def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk; None at the end. Raises the request's error, cancellation excepted."""
        chunk = self._chunks.get()
        if chunk is None:
            self._chunks.put(None)  # whoever asks again sees the end again
            if self._error is not None and not isinstance(self._error, RequestCancelled):
                raise self._error
        return chunk

    def wait(self, timeout: float | None = None) -> Completion:
        """Wait for the result; raises the request's error, or TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request did not finish within {timeout} s; it still runs: cancel() ends it")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Handle:
    """A submitted request: iterate it for chunks as they are computed, or wait for `result()`."""

    def __init__(self, outlet: Outlet, cancel: Callable[[], None]) -> None:
        """Wrap an outlet; `cancel` asks the engine to stop."""
        self._outlet = outlet
        self._cancel = cancel

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks in the order of the engine's steps; blocks between them.

        A cancelled request just ends. Raises RequestFailed or EngineClosed. Each chunk is handed out once.
        """
        while (chunk := self._outlet.next_chunk()) is not None:
            yield chunk

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion, `timeout` seconds at most; may be called often, and beside iteration.

        Raises RequestCancelled, RequestFailed, EngineClosed or TimeoutError.
        """
        return self._outlet.wait(timeout)

    def cancel(self) -> None:
        """Ask the engine to stop at the next step boundary; what was computed stays cached. Does nothing at the end."""
        if not self._outlet.ended:
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the request finished, failed or was cancelled."""
        return self._outlet.ended
