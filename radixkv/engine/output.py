"""What a request gives back, and the channel that carries it from the engine's thread to a caller's.

Results are frozen. A channel hands chunks over without a lock while the reader keeps up, and pauses its request when
too many chunks are unread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from radixkv.errors import RequestCancelled

if TYPE_CHECKING:
    from radixkv.sampling.params import TokenLogprobs


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one stream cost, in tokens and seconds.

    `cached_tokens + computed_tokens` is every token that the stream holds KV for: the prompt and what was sampled,
    without the last sampled token, which nobody had to compute. Streams 1..n-1 of a request fork behind the prompt, so
    the whole prompt counts as cached for them. Times are measured from `submit`.
    `preemptions` is how often the request gave way to others, `recomputed_tokens` what that cost: tokens that were
    computed again, and are not in `computed_tokens` a second time.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of one stream: a sampled token and the text that it released.

    `text` is empty while the text might still turn out to be part of a stop string or of an unfinished character.
    `finish_reason` is set on a stream's last chunk only. `held` characters are known behind `text`, and kept back.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    held: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """All that one stream produced, and what it cost.

    `text` ends before a stop string or a stop token; `token_ids` holds every sampled token, a stop token included.
    `finish_reason` is "stop" (a stop id or stop string) or "length" (max_tokens, or the context was full).
    With `n > 1`, `alternatives` holds the completions of the streams 1..n-1.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    alternatives: tuple[Completion, ...] = ()


MAX_UNREAD = 64  # chunks of one stream; a few seconds of decoding on a CPU
_log = logging.getLogger(__name__)


class OutputChannel:
    """A one-way mailbox: the engine's thread puts chunks in and ends it once; callers' threads take them out.

    It is `paused` from when somebody iterates and has `max_unread` chunks unread until at most half of them are, the
    iteration ends, or somebody waits for the result, who needs no chunk read. `on_drained` is then called, by whichever
    thread it was that caught up; it must not raise.
    """

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        """Start empty and open."""
        self.on_drained: Callable[[], None] | None = None
        self._max_unread = max_unread
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        self._ended = threading.Event()
        self._is_ended = False  # set behind the event, and cheaper to ask: the engine does, several times a token
        self._result: Completion | None = None
        self._error: Exception | None = None
        # For the five below. Reentrant: a forgotten iterator leaves whenever garbage is collected, here also.
        self._lock = threading.RLock()
        self._readers = 0
        self._waiters = 0
        self._paused = False
        self._chunk_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []

    # ---- the engine's side

    def put(self, chunk: Chunk) -> None:
        """Hand one chunk over. Takes no lock while the reader keeps up."""
        self._chunks.put(chunk)
        if self._readers and not self._paused and self._chunks.qsize() >= self._max_unread:
            self._pause()
        if self._chunk_listeners:
            self._notify()

    def finish(self, completion: Completion) -> None:
        """End with a result."""
        self._end(completion, None)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._end(None, error)

    def _end(self, completion: Completion | None, error: Exception | None) -> None:
        assert not self._ended.is_set(), "a channel ends once"
        self._result, self._error = completion, error
        self._ended.set()
        self._is_ended = True
        self._chunks.put(None)
        self._notify()

    @property
    def paused(self) -> bool:
        """Whether the engine had better compute nothing more for this one now."""
        return self._paused and not self._is_ended

    def disable_backpressure(self) -> None:
        """Let unread chunks pile up from now on."""
        with self._lock:
            self._waiters += 1  # as if somebody waited for the end
        self._resume()

    # ---- the callers' side

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self._is_ended

    def next_chunk(self, *, block: bool = True) -> Chunk | None:
        """The next chunk, None at the end; waits for it, or raises queue.Empty without `block`.

        Raises the request's error, cancellation excepted.
        """
        chunk = self._chunks.get(block)
        if chunk is None:
            self._chunks.put(None)  # whoever asks again sees the end again
            if self._error is not None and not isinstance(self._error, RequestCancelled):
                raise self._error
        elif self._paused:
            self._resume()
        return chunk

    def wait(self, timeout: float | None = None) -> Completion:
        """Wait for the result; raises the request's error, or TimeoutError."""
        with self.waiting():
            if not self._ended.wait(timeout):
                raise TimeoutError(f"the request did not finish within {timeout} s; it still runs: cancel() ends it")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While somebody takes chunks one by one, unread ones count."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
            self._resume()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While somebody waits for the end, unread chunks do not count: holding the engine up could hold him up."""
        with self._lock:
            self._waiters += 1
        self._resume()
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def listen(self, callback: Callable[[], None], *, end: bool = False) -> None:
        """Have `callback` called once there is a chunk, or the end, to take; with `end`, not before the end.

        It is called once, at once or on the engine's thread, which it must not hold up. If it raises, that is logged.
        """
        with self._lock:
            (self._end_listeners if end else self._chunk_listeners).append(callback)
        if self._ended.is_set() or not (end or self._chunks.empty()):
            self._notify()

    # ---- inside

    def _may_resume(self) -> bool:
        return not self._readers or self._waiters > 0 or self._chunks.qsize() <= self._max_unread // 2

    def _pause(self) -> None:
        with self._lock:
            self._paused = True  # first, then look again: who takes a chunk between the two sees it, and looks too
            self._paused = not self._may_resume()

    def _resume(self) -> None:
        with self._lock:
            drained = self._paused and self._may_resume()
            if drained:
                self._paused = False
        if drained and self.on_drained is not None and not self._ended.is_set():
            self.on_drained()

    def _notify(self) -> None:
        with self._lock:
            listeners, self._chunk_listeners = self._chunk_listeners, []
            if self._ended.is_set():
                listeners, self._end_listeners = listeners + self._end_listeners, []
        for callback in listeners:
            try:
                callback()
            except Exception:  # a listener's trouble is its own
                _log.exception("a listener raised")


class Handle:
    """A submitted request: iterate it for chunks as they are computed, or wait for `result()`."""

    def __init__(self, channel: OutputChannel, cancel: Callable[[], None]) -> None:
        """Wrap a channel; `cancel` asks the engine to stop."""
        self._channel = channel
        self._cancel = cancel

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks in the order of the engine's steps; blocks between them.

        A cancelled request just ends. Each chunk is handed out once. The engine waits for an iterator that falls far
        behind; leaving the loop lets the request run on, unread. Raises RequestFailed, RequestTimedOut or EngineClosed.
        """
        with self._channel.reading():
            while (chunk := self._channel.next_chunk()) is not None:
                yield chunk

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion, `timeout` seconds at most; may be called often, and beside iteration.

        Raises RequestCancelled, RequestTimedOut, RequestFailed, EngineClosed; or TimeoutError, and the request runs on.
        """
        return self._channel.wait(timeout)

    def cancel(self) -> None:
        """Ask the engine to stop at the next step boundary; what was computed stays cached. Does nothing at the end."""
        if not self._channel.ended:
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the request finished, failed, ran out of time or was cancelled."""
        return self._channel.ended
