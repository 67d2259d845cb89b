"""A request, and the streams that continue its prompt."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.cache import Explanation, Hint, Sequence
from radixkv.engine.output import Chunk, Completion, FinishReason, OutputChannel, Usage
from radixkv.engine.text_stream import TextStream

if TYPE_CHECKING:
    from radixkv.engine.scoring import PromptLogprobs, Scoring
    from radixkv.sampling.params import SamplingParams, TokenLogprobs
    from radixkv.sampling.token_mask import TokenMatcher


TokenIds: TypeAlias = npt.NDArray[np.int32]


@dataclass(eq=False)
class Request:
    """One submitted prompt. It waits while it has no streams, and runs until all of them have finished.

    `max_tokens` is `params.max_tokens`, cut to the room of the context; 0 computes the prompt and samples nothing.
    `stop_ids` end a stream when they are sampled. `seed` belongs to the first stream. `deadline` is in seconds of
    time.perf_counter. `width` is the number of streams, forked or not. `computed_length` is the number of tokens that
    one stream computes at most; the last sampled token is never run through the model. `matcher` constrains the first
    stream, and is forked for the others. `reply_start` is the length of the part of the prompt that a later turn of the
    conversation repeats for sure: up to the end of the last message before the reply; 0 if unknown. `bad_words` are the
    token ids of `params.bad_words`. `unforked` means that the first stream computes the prompt for others, which `fork`
    makes. `candidates` is the number of next tokens that a beam search needs of each stream, else 0. `host_bound`
    means that the host must read each token before the next can be drawn. `scoring` has the scores of the prompt's
    tokens, if they are wanted.

    Set by the scheduler: `number` is its arrival and `admitted` its last admission, counted from 1. `overtaken` counts
    the later requests that were admitted before it. `prefix_wait` is its wait for a shared prefix. `guaranteed` means
    that all blocks that it may need were promised to it. `publish_late` means that it publishes nothing until a stream
    ends, which takes no block beyond its own. `counted` means that its prompt is in the engine's counters.

    For observers: `session` is the number of its conversation, `started_at` the time of its first admission.
    `coalesced` means that it waited for a shared prefix and hit more. `miss` explains why it did not hit all.
    """

    prompt: TokenIds
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    tokenizer: Any | None = None
    namespace: Hashable = None
    priority: int = 0
    deadline: float | None = None
    channel: OutputChannel = field(default_factory=OutputChannel)
    submitted: float = field(default_factory=time.perf_counter)
    streams: list[Stream] = field(default_factory=list)
    number: int = 0
    admitted: int = 0
    overtaken: int = 0
    preemptions: int = 0
    prefix_wait: PrefixWait | None = None
    waited_enough: bool = False
    guaranteed: bool = False
    publish_late: bool = False
    counted: bool = False
    session: int | None = None
    matcher: TokenMatcher | None = None
    started_at: float | None = None
    coalesced: bool = False
    miss: Explanation | None = None
    reply_start: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    host_bound: bool = False
    scoring: Scoring | None = None
    width: int = field(init=False)
    unforked: bool = field(init=False)
    candidates: int = field(init=False, default=0)
    computed_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.params.n if self.max_tokens else 1
        self.unforked = self.width > 1
        self.computed_length = len(self.prompt) + max(self.max_tokens - 1, 0)
        reads_words = any(len(word) > 1 for word in self.bad_words)  # the first token of a word excludes its last one
        self.host_bound = self.host_bound or reads_words or self.matcher is not None

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The sort key of requests: a higher priority, then a preempted request, then an earlier arrival."""
        return -self.priority, not self.preemptions, self.number

    @property
    def live(self) -> list[Stream]:
        """The streams that have not finished."""
        return [stream for stream in self.streams if stream.finish_reason is None]

    @property
    def suspended(self) -> list[Stream]:
        """The streams that wait, after a preemption, until the first one has computed the prompt again."""
        return [stream for stream in self.live if not stream.active]

    @property
    def streams_left(self) -> int:
        """The number of streams that have not finished, including those that are not forked yet."""
        return self.width - len(self.streams) + len(self.live)

    @property
    def known(self) -> TokenIds:
        """The tokens whose KV the first stream needs before it can sample: int32[n], the prompt at least."""
        return np.array(self.live[0].tokens, np.int32) if self.streams else self.prompt

    def most_hit(self, length: int) -> int:
        """Return how many of its first `length` tokens may be a hit.

        A full repeat computes one token again: its logits are needed, and a step has no empty chunks. Scores need the
        logits of more tokens.
        """
        return length - 1 if self.scoring is None else min(length - 1, self.scoring.hit_limit)

    @cached_property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log probabilities of the prompt's tokens, if they were asked for; only after the prompt is computed."""
        if self.scoring is None or self.params.prompt_logprobs is None:
            return None
        return self.scoring.prompt_logprobs()

    def start(self, sequence: Sequence) -> None:
        """Start or resume the first stream, which computes the prompt for all.

        If this raises, the caller still owns `sequence`.
        """
        sequence.snapshot_at(self.reply_start)
        if self.streams:
            self.live[0].resume(sequence)
        else:
            self.streams.append(self._stream(0, sequence))
            self.started_at = time.perf_counter()

    def fork(self) -> None:
        """Fork a sequence for every further stream, once the prompt is committed. O(blocks) per stream."""
        first = self.streams[0]
        for index in range(1, self.width):
            sequence = first.sequence.fork()
            try:
                self.streams.append(self._stream(index, sequence))
            except BaseException:
                sequence.close()
                raise
        self.unforked = False

    def _stream(self, index: int, sequence: Sequence) -> Stream:
        return Stream(self, index, sequence)

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that the streams have computed, each counted once."""
        return sum(stream.reached - stream.cached_tokens for stream in self.streams)

    def completion(self) -> Completion:
        """Return the result of all streams, which have finished."""
        first, *others = [stream.completion() for stream in self.streams]
        return replace(first, alternatives=tuple(others))


@dataclass(frozen=True)
class PrefixWait:
    """A wait until `leader` has computed `shared` tokens, or until step `until`; `cached` tokens were cached before."""

    leader: Request
    shared: int
    until: int
    cached: int


class Stream:
    """One continuation of a request's prompt: its sequence in the cache, its tokens and its text."""

    def __init__(self, request: Request, index: int, sequence: Sequence) -> None:
        """Continue `request` on `sequence`, which this stream owns and closes."""
        self.request = request
        self.index = index
        self.sequence = sequence
        self.cached_tokens = sequence.length
        self.tokens = array("i", request.prompt.tobytes())
        self.seed = request.seed if index == 0 else derive_seed(request.seed, index)
        self.text = TextStream(request.tokenizer, self.tokens[-8:], request.params.stop)
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None  # counted by `TokenTimes`
        self.finished_at: float | None = None
        self.in_flight = 0  # tokens of the sequence whose step has not finished: an overlapped engine launches ahead
        self.reached = sequence.length  # tokens that were computed or hit at least once
        self._uncounted_hits = sequence.length if index == 0 else 0
        # For `AlignedReuse`: the length up to which every request with these tokens would compute the same KV, and
        # whether another request has published some of it first.
        self.common_length: int = sequence.length if index == 0 else request.streams[0].common_length
        self.diverged = False
        self.recomputed_tokens = 0
        self.host_tokens = 0
        self.host_hits = 0
        self.matcher = request.matcher  # None unless the reply is constrained
        if self.matcher is not None and index:
            self.matcher = self.matcher.fork()

    @property
    def pending(self) -> int:
        """The number of tokens without KV: the rest of the prompt, or the last sampled token."""
        return len(self.tokens) - self.sequence.length

    @property
    def computed_length(self) -> int:
        """The number of tokens with KV from steps that have finished."""
        return self.sequence.length - self.in_flight

    @property
    def active(self) -> bool:
        """Whether the stream has an open sequence; from a preemption until it resumes it has none."""
        return not self.sequence.closed

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt, or tokens lost to a preemption, are not computed yet."""
        return self.sequence.length < len(self.request.prompt) or self.pending > 1

    @property
    def output_length(self) -> int:
        """The number of tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    def accept(self, token: int, logprobs: TokenLogprobs | None, *, finished: bool = False) -> Chunk:
        """Append a token, and set `finish_reason` if it ends the stream; returns the text that it releases.

        `finished` says that a constraint allows no further token.
        """
        self.tokens.append(token)
        scores = None
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
            scores = None if self.index else self.request.prompt_logprobs
        if logprobs is not None:
            self.logprobs.append(logprobs)
        request, length = self.request, self.output_length
        may_stop = length >= request.params.min_tokens
        if may_stop and token in request.stop_ids:
            self.finish_reason = "stop"
            text = self.text.flush()
        else:
            text = self.text.push(token, watch=may_stop)
            if self.text.stopped_by:
                self.finish_reason = "stop"
            elif finished or length >= request.max_tokens:
                self.finish_reason = "stop" if finished else "length"
                text += self.text.flush()
        stop_text = self.text.stopped_by
        return Chunk(text, (token,), self.index, logprobs, self.finish_reason, len(self.text.held), stop_text, scores)

    def accept_constrained(self, token: int, logprobs: TokenLogprobs | None) -> Iterator[Chunk]:
        """Append a sampled token, then the tokens that the constraint forces after it; yields the chunk of each.

        With log probabilities no token is forced, since each needs logits. A stop token of the request is never forced
        either: it would end an incomplete text. Raises InvalidConstraint if the constraint
        has become too expensive to follow.
        """
        matcher, request = self.matcher, self.request
        assert matcher is not None
        forced: list[int] = []
        finished = False
        if token not in request.stop_ids:
            matcher.consume([token])
            if request.params.logprobs is None:
                forced = list(takewhile(lambda each: each not in request.stop_ids, matcher.forced()))
                matcher.consume(forced)
            finished = matcher.finished
        tokens = [token, *forced]
        for place, each in enumerate(tokens, 1):
            yield self.accept(each, logprobs, finished=finished and place == len(tokens))
            if self.finish_reason is not None:
                return

    def resume(self, sequence: Sequence, common_length: int | None = None) -> None:
        """Go on after a preemption, on a sequence with a cached prefix or one forked from another stream."""
        assert not self.active
        self.sequence = sequence
        self._add_hits(sequence.length)  # another request computed these
        self.common_length = sequence.length if common_length is None else common_length
        self.diverged = False

    def count_computed(self, start: int, count: int) -> tuple[int, int]:
        """Record that [start, start + count) were computed; returns how many for the first time, and uncounted hits.

        The hits are the cached tokens that no earlier call returned.
        """
        new = min(max(start + count - self.reached, 0), count)
        self.reached += new
        self.recomputed_tokens += count - new
        hits, self._uncounted_hits = self._uncounted_hits, 0
        return new, hits

    def count_loaded(self, start: int, count: int) -> None:
        """Record that [start, start + count) were loaded from the host; those that are new are hits."""
        before = self.cached_tokens
        self.host_tokens += count
        self._add_hits(start + count)
        self.host_hits += self.cached_tokens - before

    def cut_hit(self, length: int) -> None:
        """Drop the end of a hit before the stream computes anything: it goes on at `length`."""
        lost = self.sequence.length - length
        uncounted = min(lost, self._uncounted_hits) if self.reached == self.sequence.length else 0
        self.sequence.truncate(length)
        self.common_length = length
        self.cached_tokens -= uncounted
        self._uncounted_hits -= uncounted
        self.reached -= uncounted

    def _add_hits(self, end: int) -> None:
        """Count the tokens up to `end` that the stream has neither computed nor hit before."""
        gained = max(end - self.reached, 0)
        self.cached_tokens += gained
        self._uncounted_hits += gained
        self.reached += gained

    def close(self) -> None:
        """Release the blocks, with a hint for eviction; published tokens stay cached. May be called twice."""
        if self.finished_at is None:
            self.finished_at = time.perf_counter()
        self.sequence.close(Hint(kind=self.finish_reason, output_length=self.output_length))

    def completion(self) -> Completion:
        """Return the result of this stream, which has finished and is closed."""
        assert self.finish_reason is not None and self.finished_at is not None
        request = self.request
        output = tuple(self.tokens[len(request.prompt) :])
        first = self.finished_at if self.first_token_at is None else self.first_token_at
        usage = Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached_tokens,
            computed_tokens=self.reached - self.cached_tokens,
            output_tokens=len(output),
            ttft_s=first - request.submitted,
            total_s=self.finished_at - request.submitted,
            preemptions=request.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            host_tokens=self.host_tokens,
        )
        logprobs = tuple(self.logprobs) if self.logprobs else None
        text = self.text
        return Completion(
            text.text,
            output,
            self.finish_reason,
            usage,
            logprobs,
            self.index,
            stop_text=text.stopped_by,
            prompt_logprobs=request.prompt_logprobs,
        )


def derive_seed(seed: int, number: int) -> int:
    """Derive the `number`-th seed from `seed`; independent of platform and process."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Return the length of the common prefix of two prompts. O(tokens)."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
