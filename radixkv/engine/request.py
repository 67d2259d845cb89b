"""A request, and the streams that continue its prompt.

A stream has one `Continuation`. It sets the mask and the candidates of the next draw, and whether the host must read
each token before the next draw. Then it takes the drawn token. A request has one `Replies` object, which forks the
streams and makes the result. `Samples` and `SampledTokens` are the default, `ConstrainedTokens` follow a grammar,
`DraftedTokens` verify drafts, and `beams` has a search.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.cache import Hint, Sequence
from radixkv.engine.output import Chunk, Completion, FinishReason, OutputChannel, Usage
from radixkv.engine.request_facts import NO_ORIGIN, WHOLE, Origin, PromptParts, Reported, StreamTimes
from radixkv.engine.scores import NO_SCORES, Scores
from radixkv.engine.text_stream import Decode, TextStream
from radixkv.errors import PrefixGone
from radixkv.turns import Group

if TYPE_CHECKING:
    from radixkv.sampling.params import Candidates, SamplingParams, TokenLogprobs
    from radixkv.sampling.token_mask import ConstrainedRow


TokenIds: TypeAlias = npt.NDArray[np.int32]


BadWords = tuple[tuple[int, ...], ...]


class Drawn(NamedTuple):
    """The draw of one row: a token, or for a row with `candidates` the most likely ones."""

    token: int
    logprobs: TokenLogprobs | None
    candidates: Candidates | None


class Continuation(Protocol):
    """The rules for the next token of one stream."""

    @property
    def host_bound(self) -> bool:
        """Whether the host must read a token before the next one can be drawn."""

    @property
    def mask(self) -> ConstrainedRow | None:
        """The constraint of the next token; None if it has none."""

    @property
    def has_text(self) -> bool:
        """Whether the text is needed while tokens are drawn."""

    @property
    def candidates(self) -> int:
        """The number of most likely tokens to find for the next one; 0 if it is sampled."""

    @property
    def bad_words(self) -> BadWords:
        """The token ids of each text that the reply must not contain."""

    def take(self, stream: Stream, drawn: Drawn) -> SequenceOf[Chunk]:
        """Take a draw; returns a chunk for each token that it adds to the stream.

        The tokens after the first were forced. Raises the error with which the request fails.
        """
        ...

    def fork(self) -> Continuation:
        """Return the continuation of another stream, which has the same tokens."""
        ...


class Replies(Protocol):
    """The number of streams that continue a request's prompt, when they fork, and their result.

    Errors name the sampling `parameter` that sets the width, and the `kind` of streams.
    """

    parameter: str
    kind: str

    @property
    def width(self) -> int:
        """The number of streams, forked or not."""

    @property
    def continuation(self) -> Continuation:
        """The continuation of the first stream."""

    def drawing(self, stream: Stream) -> SequenceOf[Stream]:
        """Return the streams whose next token is drawn from the last logits of `stream`: itself, and its new forks."""
        ...

    def advance(self, request: Request, publish: Callable[[Stream], None]) -> SequenceOf[Chunk]:
        """Go on after a step of the request; returns the chunks that only all of its streams together could release.

        `publish` is called for streams that end here, before they are closed.
        """
        ...

    def computed_tokens(self, request: Request) -> int:
        """Return the number of tokens that the streams have computed, each counted once."""
        ...

    def completion(self, request: Request) -> Completion:
        """Return the result of all streams, which have finished."""
        ...


class SampledTokens:
    """Samples each token. One object may serve many streams: it has no state."""

    mask = None
    has_text = True
    candidates = 0

    def __init__(self, bad_words: BadWords = (), *, reads_history: bool = False) -> None:
        """`reads_history` means that a custom logits processor reads the preceding tokens."""
        reads_words = any(len(word) > 1 for word in bad_words)  # the first tokens of a word exclude its last one
        self.host_bound = reads_history or reads_words
        self.bad_words = bad_words

    def take(self, stream: Stream, drawn: Drawn) -> SequenceOf[Chunk]:
        """Append the token."""
        return (stream.accept(drawn.token, drawn.logprobs),)

    def fork(self) -> SampledTokens:
        """Return itself."""
        return self


SAMPLED = SampledTokens()


class Samples:
    """Independent streams. The first one computes the prompt, and the others are forked from it then."""

    parameter, kind = "n", "streams"

    def __init__(self, width: int = 1, continuation: Continuation = SAMPLED) -> None:
        """Continue the prompt `width` times; `continuation` is of the first stream."""
        self.width = width
        self.continuation = continuation

    def drawing(self, stream: Stream) -> SequenceOf[Stream]:
        """Return the stream; once the prompt is computed, also the streams that are forked now. O(blocks) for each."""
        request = stream.request
        if len(request.streams) == self.width:
            return (stream,)
        while len(request.streams) < self.width:
            request.fork(self.continuation.fork())
        return request.streams

    def advance(self, request: Request, publish: Callable[[Stream], None]) -> SequenceOf[Chunk]:
        """Return no chunks."""
        return ()

    def computed_tokens(self, request: Request) -> int:
        """Return the sum over all streams."""
        return sum(stream.counts.computed_tokens for stream in request.streams)

    def completion(self, request: Request) -> Completion:
        """Return the completion of the first stream; its alternatives are the others."""
        first, *others = [stream.completion() for stream in request.streams]
        return replace(first, alternatives=tuple(others))


ONE_SAMPLE = Samples()


@dataclass(frozen=True)
class PrefixWait:
    """A wait until `leader` has computed `shared` tokens, or until step `until`; `cached` tokens were cached before."""

    leader: Request
    shared: int
    until: int
    cached: int


@dataclass(slots=True)
class Queued:
    """The facts that the wait queue keeps of a request, also while it runs."""

    group: Group = field(default_factory=Group)  # that takes turns with others
    rank: tuple[int, bool, int] = (0, True, 0)  # sorts by priority, then preempted requests first, then by arrival
    overtaken_at: float = inf  # when a later request was first admitted before it
    prefix_wait: PrefixWait | None = None  # the wait for a shared prefix
    waited_enough: bool = False  # it waits for no prefix any more


@dataclass(slots=True)
class Scheduling:
    """The facts that the scheduler sets on a request."""

    number: int = 0  # of its arrival, from 1
    admitted: int = 0  # number of its last admission, from 1
    preemptions: int = 0
    guaranteed: bool = False  # all blocks that it may need were promised to it
    publish_late: bool = False  # it publishes nothing until a stream ends, which takes no block beyond its own
    queued: Queued = field(default_factory=Queued)


@dataclass(eq=False)
class Request:
    """One submitted prompt. It waits while it has no streams, and runs until all of them have finished.

    `max_tokens` is `params.max_tokens`, cut to the room of the context; 0 computes the prompt and samples nothing.
    `stop_ids` end a stream when they are sampled. `seed` belongs to the first stream. `decode` makes text of tokens.
    `deadline` is in seconds of time.perf_counter. `parts` are lengths in the prompt. `replies` says how many streams
    continue the prompt, and how. `scores` are the scores of the prompt's tokens.

    `origin` names its sender, for observers. `scheduling` is set by the scheduler and the wait queue, and
    `reported` is what only reports read.
    """

    prompt: TokenIds
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    decode: Decode | None = None
    namespace: Hashable = None
    priority: int = 0
    deadline: float | None = None
    channel: OutputChannel = field(default_factory=OutputChannel)
    streams: list[Stream] = field(default_factory=list)
    origin: Origin = NO_ORIGIN
    parts: PromptParts = WHOLE
    replies: Replies = field(default_factory=Samples)
    scores: Scores = NO_SCORES
    scheduling: Scheduling = field(default_factory=Scheduling)
    reported: Reported = field(default_factory=Reported)

    @property
    def session(self) -> int | None:
        """The number of its conversation."""
        return self.origin.session

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
        return self.replies.width - len(self.streams) + len(self.live)

    @property
    def known(self) -> TokenIds:
        """The tokens whose KV the first stream needs before it can sample: int32[n], the prompt at least."""
        return np.array(self.live[0].tokens, np.int32) if self.streams else self.prompt

    def start(self, sequence: Sequence) -> None:
        """Start or resume the first stream, which computes the prompt for all.

        If this raises, the caller still owns `sequence`. Raises PrefixGone if a compressed prefix is not cached, since
        nothing can compute it.
        """
        if sequence.length < self.parts.slots:
            raise PrefixGone(self.parts.gone)
        if self.parts.reply_start:
            sequence.snapshot_at(self.parts.reply_start)
        if self.streams:
            self.live[0].resume(sequence)
        else:
            self.streams.append(Stream(self, 0, sequence, self.replies.continuation))
            self.reported.started_at = time.perf_counter()

    def fork(self, continuation: Continuation) -> None:
        """Add a stream on a fork of the first one's sequence. O(blocks)."""
        sequence = self.streams[0].sequence.fork()
        try:
            self.streams.append(Stream(self, len(self.streams), sequence, continuation))
        except BaseException:
            sequence.close()
            raise


class Stream:
    """One continuation of a request's prompt: its sequence in the cache, its tokens and its text."""

    def __init__(self, request: Request, index: int, sequence: Sequence, continuation: Continuation) -> None:
        """Continue `request` on `sequence`, which this stream owns and closes."""
        self.request = request
        self.index = index
        self.sequence = sequence
        self.continuation = continuation
        self.tokens = array("i", request.prompt.tobytes())
        self.seed = request.seed if index == 0 else derive_seed(request.seed, index)
        self.counts = TokenCounts(sequence.length, is_hit=index == 0)
        decode = request.decode if continuation.has_text else None
        context = self.tokens[max(len(self.tokens) - 8, request.parts.slots) :]
        self.text = TextStream(decode, context, request.params.stop)
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.times = StreamTimes()
        self.in_flight = 0  # tokens of the sequence whose step has not finished: an overlapped engine launches ahead
        # For `AlignedReuse`: the length up to which every request with these tokens would compute the same KV, and
        # whether another request has published some of it first.
        self.common_length: int = sequence.length if index == 0 else request.streams[0].common_length
        self.diverged = False

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
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
            scores = None if self.index else self.request.scores.logprobs
        if logprobs is not None:
            self.logprobs.append(logprobs)
        request, length = self.request, len(self.tokens) - len(self.request.prompt)
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

    def twin(self, continuation: Continuation) -> Stream:
        """Return another stream with the same tokens and text, on the same sequence. O(reply)."""
        twin = copy(self)
        twin.tokens, twin.logprobs, twin.text = self.tokens[:], self.logprobs[:], self.text.copy()
        twin.continuation, twin.times, twin.counts = continuation, StreamTimes(), copy(self.counts)
        return twin

    def continue_as(self, twin: Stream) -> None:
        """Take the tokens and the text of a twin, and stay on this sequence."""
        self.tokens, self.logprobs, self.text = twin.tokens, twin.logprobs, twin.text

    def resume(self, sequence: Sequence, common_length: int | None = None) -> None:
        """Go on after a preemption, on a sequence with a cached prefix or one forked from another stream."""
        assert not self.active
        self.sequence = sequence
        self.counts.add_hits(sequence.length)  # another request computed these
        self.common_length = sequence.length if common_length is None else common_length
        self.diverged = False

    def cut_hit(self, length: int) -> None:
        """Drop the end of a hit before the stream computes anything: it goes on at `length`."""
        if self.counts.reached == self.sequence.length:
            self.counts.drop_hits(self.sequence.length - length)
        self.sequence.truncate(length)
        self.common_length = length

    def close(self) -> None:
        """Release the blocks, with a hint for eviction; published tokens stay cached. May be called twice."""
        if self.times.finished is None:
            self.times.finished = time.perf_counter()
        output_length = len(self.tokens) - len(self.request.prompt)
        self.sequence.close(Hint(kind=self.finish_reason, output_length=output_length))

    def completion(self) -> Completion:
        """Return the result of this stream, which has finished and is closed."""
        request, times, counts = self.request, self.times, self.counts
        assert self.finish_reason is not None and times.finished is not None
        output = tuple(self.tokens[len(request.prompt) :])
        first = times.finished if times.first_token is None else times.first_token
        usage = Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            output_tokens=len(output),
            ttft_s=first - request.reported.submitted,
            total_s=times.finished - request.reported.submitted,
            preemptions=request.scheduling.preemptions,
            recomputed_tokens=counts.recomputed_tokens,
            host_tokens=counts.host_tokens,
            disk_tokens=request.reported.disk_tokens,
            **counts.drafts,
        )
        logprobs = tuple(self.logprobs) if self.logprobs else None
        text = self.text
        return Completion(
            "".join(text.released),
            output,
            self.finish_reason,
            usage,
            logprobs,
            self.index,
            stop_text=text.stopped_by,
            prompt_logprobs=request.scores.logprobs,
        )


_NO_DRAFTS: Mapping[str, int] = MappingProxyType({})


class TokenCounts:
    """Count the tokens of a stream that were hits, computed, computed again, and loaded from the host.

    `reached` tokens were computed or hit at least once. `host_hits` are the hits that were loaded. `drafts` are the
    counts of drafted tokens, by their names in `Usage`.
    """

    __slots__ = (
        "_uncounted_hits", "cached_tokens", "drafts", "host_hits", "host_tokens", "reached", "recomputed_tokens",
    )  # fmt: skip

    def __init__(self, cached: int, *, is_hit: bool) -> None:
        """Start with `cached` tokens: a hit, or the tokens of the stream that this one was forked from."""
        self.cached_tokens = self.reached = cached
        self.recomputed_tokens = self.host_tokens = self.host_hits = 0
        self._uncounted_hits = cached if is_hit else 0
        self.drafts: Mapping[str, int] = _NO_DRAFTS

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that were computed, each counted once."""
        return self.reached - self.cached_tokens

    def count_computed(self, start: int, count: int) -> tuple[int, int]:
        """Record that [start, start + count) were computed; returns how many for the first time, and uncounted hits.

        The hits are the cached tokens that no earlier call returned.
        """
        new = min(max(start + count - self.reached, 0), count)
        self.reached += new
        self.recomputed_tokens += count - new
        hits, self._uncounted_hits = self._uncounted_hits, 0
        return new, hits

    def count_loaded(self, start: int, count: int, copied: int) -> None:
        """Record that [start, start + count) were loaded, the last `copied` from the host; new ones are hits."""
        before = self.cached_tokens
        self.host_tokens += copied
        self.add_hits(start + count)
        self.host_hits += min(self.cached_tokens - before, copied)

    def add_hits(self, end: int) -> None:
        """Count the tokens up to `end` that the stream has neither computed nor hit before."""
        gained = max(end - self.reached, 0)
        self.cached_tokens += gained
        self._uncounted_hits += gained
        self.reached += gained

    def add_draft(self, drafted: int, accepted: int, *, predicted: bool) -> None:
        """Count a draft that was verified, from a prediction or not."""
        found = Counter(self.drafts)
        found.update(drafted_tokens=drafted, accepted_tokens=accepted)
        if predicted:
            found.update(predicted_tokens=drafted, accepted_predicted_tokens=accepted)
        self.drafts = found

    def drop_hits(self, lost: int) -> None:
        """Take back the last `lost` hits, as far as no step has counted them."""
        uncounted = min(lost, self._uncounted_hits)
        self.cached_tokens -= uncounted
        self._uncounted_hits -= uncounted
        self.reached -= uncounted


def derive_seed(seed: int, number: int) -> int:
    """Derive the `number`-th seed from `seed`; independent of platform and process."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Return the length of the common prefix of two prompts. O(tokens)."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
