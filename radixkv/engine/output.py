"""Results of a request, and the channel that carries them from the engine's thread to the caller's.

Results are frozen. The engine's thread puts chunks into an `OutputChannel` and ends it once; callers read it through a
`Handle`. A channel with too many unread chunks asks the engine to pause the request until its reader has caught up.
"""

from __future__ import annotations

import logging
import math
import os
import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NoReturn

from radixkv.cache import Pin
from radixkv.errors import EngineClosed, RequestCancelled

if TYPE_CHECKING:
    from radixkv.sampling.params import TokenLogprobs

MAX_UNREAD = 64  # chunks of one stream; a few seconds of decoding on a CPU
WAIT_TURN = 1.0  # seconds after which a caller that waits handles a Ctrl-C at the latest
FinishReason = Literal["stop", "length"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of one stream, in tokens and seconds: `prompt_tokens` were given, `output_tokens` sampled or forced.

    `cached_tokens + computed_tokens` are all tokens that the stream holds KV for: the prompt and the sampled tokens
    except the last, which is never computed. Tokens that a constraint forces after the last one are not computed
    either. Streams 1..n-1 of a request fork after the prompt, so that the whole prompt counts as cached for them. Times
    are measured from `submit`: `ttft_s` to the first token, `total_s` to the end.
    `preemptions` counts how often the request was preempted. `recomputed_tokens` are tokens that were computed again
    because of that; `computed_tokens` counts them once. `host_tokens` were loaded from host memory in place of being
    computed: cached tokens, and tokens that a preempted request would otherwise compute again. `disk_tokens` were read
    from a disk into host memory while the request waited.
    `drafted_tokens` were verified before they were sampled, and `accepted_tokens` of them are tokens of the reply;
    `predicted_tokens` and `accepted_predicted_tokens` are the drafts among them from a prediction.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    preemptions: int = 0
    recomputed_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    predicted_tokens: int = 0
    accepted_predicted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token of the stream `index`, sampled or forced by a constraint, and the text that it released.

    `token_ids` has its id, and `logprobs` its log probability, if they were asked for.
    `text` is empty while it might turn out to be part of a stop string or of an unfinished character. Then the last
    `held` characters are withheld. `finish_reason` is set on the last chunk of a stream only, and `stop_text` is the
    stop string that ended the stream. The first chunk of a request has `prompt_logprobs`, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    held: int = 0
    stop_text: str | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of the stream `index`, and its cost, `usage`.

    `text` ends before a stop string or a stop token; `token_ids` has every sampled token, a stop token included.
    `finish_reason` is "stop" (a stop id, a stop string, or the end of a constrained text) or "length" (max_tokens, or
    the context was full).
    `stop_text` is the stop string that ended the text, if one did.
    With `n > 1`, `alternatives` has the completions of the streams 1..n-1. With a beam search it has the other beams,
    best first, and `score` is each beam's sum of log probabilities over its length to the power of `length_penalty`.
    `prompt_logprobs` has an entry for each token of the prompt, None for the first, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    alternatives: tuple[Completion, ...] = ()
    stop_text: str | None = None
    score: float | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    def __repr__(self) -> str:
        return brief(self, self.text, self.finish_reason, self.usage)


def brief(result: object, text: str, finish_reason: str, usage: Usage) -> str:
    """Return a short representation of a result with this text and cost."""
    cost = f"{usage.output_tokens} tokens, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    return f"<{type(result).__name__} {reprlib.repr(text)}, {finish_reason!r}: {cost}>"


class OutputChannel:
    """A one-way queue of chunks that ends once, with a completion or an error.

    `paused` is set while a caller iterates and `max_unread` chunks are unread. It is cleared when at most half of them
    are unread, when the iteration ends, and when a caller waits for the result, which needs no chunk to be read.
    Then `on_drained` is called on the caller's thread; it must not raise. `ended` is set once, at the end.

    In a process that was forked before the end, the callers' methods raise EngineClosed: the engine's thread is in the
    other process. After the end they work there, too.
    """

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        """Start empty and open."""
        self.on_drained: Callable[[], None] | None = None
        self.paused = False
        self.ended = False  # cheaper to read than the event, several times per token
        self._max_unread = max_unread
        self._pid = os.getpid()
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        self._end_event = threading.Event()
        self._result: Completion | None = None
        self._error: Exception | None = None
        # Guards `paused` and the four below. Reentrant: the garbage collector may close an iterator while it is held.
        self._rlock = threading.RLock()
        self._readers = 0
        self._waiters = 0
        self._chunk_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []

    # ---- the engine's side

    def put(self, chunk: Chunk) -> None:
        """Append a chunk; `notify` calls the listeners. Takes no lock while the reader keeps up."""
        self._chunks.put(chunk)
        if self._readers and not self.paused and self._chunks.qsize() >= self._max_unread:
            self._pause()

    def notify(self) -> None:
        """Call the listeners of chunks. A step does so once all its chunks are in their channels.

        A listener wakes another thread, which then competes with the engine's thread for the interpreter.
        """
        if self._chunk_listeners:
            self._notify()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.finish(None, error)

    def finish(self, completion: Completion | None, error: Exception | None = None) -> None:
        """End with a result, or with an error."""
        assert not self.ended, "a channel ends once"
        self._result, self._error = completion, error
        self._end_event.set()
        self.ended, self.paused = True, False
        self._chunks.put(None)
        if self._chunk_listeners or self._end_listeners:  # `listen` appends first and reads the event after that
            self._notify()

    def disable_backpressure(self) -> None:
        """Never pause the request from now on."""
        with self._lock:
            self._waiters += 1  # like a caller that waits for the end
        self._resume()

    # ---- the callers' side

    def check_process(self) -> None:
        """Raise EngineClosed in a process that was forked before the end."""
        if not self.ended and os.getpid() != self._pid:
            raise EngineClosed(f"this request runs in process {self._pid}, which was forked: read it there")

    def next_chunk(self, *, block: bool = True) -> Chunk | None:
        """Return the next chunk, None at the end; wait for it, or raise queue.Empty without `block`.

        Raises the request's error, cancellation excepted.
        """
        self.check_process()
        chunk = self._chunks.get(block)
        if chunk is None:
            self._chunks.put(None)  # for the next call
            if self._error is not None and not isinstance(self._error, RequestCancelled):
                raise self._error
        elif self.paused:
            self._resume()
        return chunk

    def wait(self, timeout: float | None = None) -> Completion:
        """Wait for the result; raises the request's error, or TimeoutError."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self.waiting():
            # In turns: Python handles a Ctrl-C that comes just before it blocks only once it wakes up.
            while not self.ended and not self._end_event.wait(min(until - time.monotonic(), WAIT_TURN)):
                if time.monotonic() >= until:
                    message = f"the request did not finish within {timeout} s; it still runs: cancel() ends it"
                    raise TimeoutError(message)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count unread chunks while a caller iterates in this context."""
        self.check_process()
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
        """Do not pause while a caller waits for the end in this context: a paused request would not reach it."""
        self.check_process()
        with self._lock:
            self._waiters += 1
        if self.paused:
            self._resume()
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def listen(self, callback: Callable[[], None], *, end: bool = False) -> None:
        """Call `callback` once there is a chunk or the end to take; with `end`, only at the end.

        It is called once, at once or on the engine's thread, which it must not delay. If it raises, that is logged.
        Chunks that were put count also before `notify` is called for them.
        """
        self.check_process()
        with self._lock:
            (self._end_listeners if end else self._chunk_listeners).append(callback)
        if self._end_event.is_set() or not (end or self._chunks.empty()):
            self._notify()

    # ---- inside

    @property
    def _lock(self) -> AbstractContextManager[object]:
        """The lock; none in a forked process, where a thread that no longer exists may hold it."""
        return nullcontext() if os.getpid() != self._pid else self._rlock

    def _may_resume(self) -> bool:
        return not self._readers or self._waiters > 0 or self._chunks.qsize() <= self._max_unread // 2

    def _pause(self) -> None:
        with self._lock:
            self.paused = True  # set before the check: a reader that takes a chunk in between sees it and resumes
            self.paused = not self._may_resume()

    def _resume(self) -> None:
        with self._lock:
            drained = self.paused and self._may_resume()
            if drained:
                self.paused = False
        if drained and self.on_drained is not None and not self.ended:
            self.on_drained()

    def _notify(self) -> None:
        with self._lock:
            listeners, self._chunk_listeners = self._chunk_listeners, []
            if self._end_event.is_set():
                listeners, self._end_listeners = listeners + self._end_listeners, []
        for callback in listeners:
            try:
                callback()
            except Exception:
                _log.exception("a listener raised")


class Handle:
    """A submitted request: iterate it for chunks as they are computed, or wait for `result()`.

    The request is cancelled when its handle is garbage. `warm` computes a prompt without reading a reply.
    """

    def __init__(self, channel: OutputChannel, cancel: Callable[[], None]) -> None:
        """Read from `channel`; `cancel` asks the engine to stop."""
        self.channel = channel
        self._cancel = cancel

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks in the order of the engine's steps; blocks between them.

        A cancelled request just ends. Each chunk is yielded once. The engine pauses the request for a slow iterator;
        after the loop was left, the request runs on. Raises RequestFailed, RequestTimedOut or EngineClosed.
        """
        with self.channel.reading():
            while (chunk := self.channel.next_chunk()) is not None:
                yield chunk

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion, `timeout` seconds at most; may be called repeatedly, and during iteration.

        Raises RequestCancelled, RequestTimedOut, RequestFailed, EngineClosed; or TimeoutError, and the request runs on.
        """
        return self.channel.wait(timeout)

    def __repr__(self) -> str:
        """Show the result or the error if it is there; waits for nothing."""
        if not self.done:
            return "<Handle: running>"
        try:
            return f"<Handle: {self.result()!r}>"
        except Exception as error:
            return f"<Handle: {error!r}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied. Raises TypeError."""
        raise TypeError("a handle cannot be pickled or copied, because it belongs to its engine: send its result()")

    def __del__(self) -> None:
        """Cancel the request, whose reply cannot be read any more."""
        if not self.channel.ended:
            with suppress(EngineClosed):  # in a forked process
                self.cancel()

    def cancel(self) -> None:
        """Ask the engine to stop at the next step boundary; computed tokens stay cached. No effect after the end.

        Raises EngineClosed in a process that was forked before the end.
        """
        if not self.channel.ended:
            self.channel.check_process()
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the request finished, failed, timed out or was cancelled."""
        return self.channel.ended


class Warmed:
    """The result of `warm`: its cost, and the pin if there is one, which lasts until `release` or its ttl."""

    def __init__(
        self, usage: Usage, pin: Pin | None = None, post: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        """Keep the pin; `post` runs its release on the engine's thread, which owns the cache."""
        self.usage = usage
        self._pin = pin
        self._post = post

    def __repr__(self) -> str:
        return f"<Warmed: {self.usage.prompt_tokens} tokens, {self.pinned_tokens} of them pinned>"

    @property
    def pinned_tokens(self) -> int:
        """Tokens that the pin holds; 0 without one."""
        return self._pin.length if self._pin is not None else 0

    def release(self) -> None:
        """Make the prompt evictable again at the next step boundary, without waiting for it.

        May be called twice, and after the engine was closed.
        """
        if self._pin is not None and self._post is not None:
            pin, self._pin = self._pin, None
            try:
                self._post(pin.release)
            except EngineClosed:
                return  # its pool is gone

    def __enter__(self) -> Warmed:
        """Use the pin in a `with` block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release the pin."""
        self.release()
