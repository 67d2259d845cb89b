"""Draw the next tokens from the logits of a step, hand them to their streams, and score the prompts of the step.

Drawing and scoring begin when the forward was launched, and wait for nothing. What was drawn is accepted when the step
is finished. A row that raises fails its own request only.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeAlias

from radixkv.config import EngineConfig
from radixkv.engine.fault_isolation import Fail, Parts
from radixkv.engine.latency import Histogram
from radixkv.engine.request import Drawn, Request, Stream
from radixkv.engine.scheduler import Work
from radixkv.engine.scores import KeptScores
from radixkv.engine.stats import Counters
from radixkv.errors import InvalidConstraint
from radixkv.sampling.logits_processors import nothing_to_draw
from radixkv.sampling.params import SampleRow
from radixkv.sampling.row_scores import PendingScores, begin_scores
from radixkv.sampling.sampler import Pending, Sampled, Sampler
from radixkv.sampling.token_mask import ConstrainedRow, StepMasks, TokenMasks
from radixkv.telemetry.records import ITL_BOUNDS

if TYPE_CHECKING:
    from torch import Tensor

Row: TypeAlias = "tuple[int, Stream, Hashable, int, array[int] | None]"
"""A row of the logits, the stream that a token is drawn for, the key of its mask, and the position of that token.

Last the draft between the stream's tokens and that position, if it is verified.
"""


class RowSource(Protocol):
    """Says which rows of a step's logits tokens are drawn from; the speculation of drafts draws from several a stream.

    The key of a mask is the stream, or another object for a row after its first.
    """

    def masks(self, first: Mapping[Hashable, ConstrainedRow], work: list[Work]) -> Mapping[Hashable, ConstrainedRow]:
        """Return the constraints of all rows by key, given the `first` one of each stream."""
        ...

    def refuse(self, key: Hashable, error: InvalidConstraint, fail: Fail) -> None:
        """Take note that the mask of a row could not be filled; `fail` ends a request."""
        ...

    def follows(self, stream: Stream, draft: array[int]) -> bool:
        """Return whether a stream has the text of a row after `draft`, whose draw is then its next token."""
        ...

    def verify(self, work: list[Work]) -> None:
        """Cut the sequences of drafts to the tokens that their streams took, and publish these."""
        ...

    def rows(self, work: list[Work], fail: Fail) -> tuple[list[Row], int]:
        """Return the rows, and how many rows the logits have up to the last of them, at least one for each chunk.

        Forks the requests whose prompt is computed. `fail` ends a request that raises.
        """
        ...


class LastRows:
    """Draws from the last row of each chunk that ends at the last token of its stream."""

    def masks(self, first: Mapping[Hashable, ConstrainedRow], work: list[Work]) -> Mapping[Hashable, ConstrainedRow]:
        """Return `first`."""
        return first

    def refuse(self, key: Hashable, error: InvalidConstraint, fail: Fail) -> None:
        """End the request of the stream."""
        assert isinstance(key, Stream)
        fail(key.request, error)

    def follows(self, stream: Stream, draft: array[int]) -> bool:
        """Return False: no row has a draft."""
        return False

    def verify(self, work: list[Work]) -> None:
        """Do nothing: there are no drafts."""

    def rows(self, work: list[Work], fail: Fail) -> tuple[list[Row], int]:
        """See RowSource."""
        rows: list[Row] = []
        for row, each in enumerate(work):
            request, end = each.stream.request, each.start + len(each.tokens)
            if end < len(each.stream.tokens) or not request.max_tokens or request.channel.ended:
                continue
            try:
                for stream in request.replies.drawing(each.stream):
                    rows.append((row, stream, each.stream, end, None))  # noqa: PERF401  # a comprehension takes 0.1 us more
            except Exception as error:
                fail(request, error)
        return rows, len(work)


class Draws:
    """Draws the next tokens of a core's streams."""

    def __init__(
        self,
        sampler: Sampler,
        source: RowSource,
        config: EngineConfig,
        counters: Counters,
        times: TokenTimes,
        parts: Parts,
        fail: Fail,
    ) -> None:
        """Count tokens in `counters` and `times`. `parts` run a draw, and `fail` ends the one request that raised."""
        self.sampler, self._source, self._parts = sampler, source, parts
        self._config, self._counters, self._times, self._fail = config, counters, times, fail
        self._masks = TokenMasks()

    def masks(self, work: list[Work]) -> StepMasks | None:
        """Start to fill the masks of the constrained streams that sample in this step; None if there is none."""
        first: dict[Hashable, ConstrainedRow] = {
            each.stream: mask for each in work if (mask := each.stream.continuation.mask) is not None and each.samples
        }
        return self._masks.begin(self._source.masks(first, work)) if first else None

    def begin(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> list[tuple[list[Row], Pending]]:
        """Start to draw from logits [len(work) + additional rows, vocab]; in parts only if that raised."""
        if masks is not None:
            for key, error in masks.wait().items():  # a stream without a mask fails
                self._source.refuse(key, error, self._fail)
        rows, count = self._source.rows(work, self._fail)
        logits = logits[:count]

        def begin(rows: list[Row]) -> Pending:
            mask = None if masks is None else masks.select(each[2] for each in rows)
            samples = [sample_row(stream, end, draft) for _, stream, _, end, draft in rows]
            return self.sampler.begin(logits, samples, [each[0] for each in rows], mask)

        return self._parts.draw(rows, begin, itemgetter(1))

    def accept(self, rows: list[Row], sampled: Sampled) -> None:
        """Hand what was drawn to the streams, and the text that they release to the callers."""
        nothing = [None] * len(rows)
        logprobs, candidates = sampled.logprobs or nothing, sampled.candidates or nothing
        counters, timed = self._counters, list[Stream]()
        for index, (_, stream, _, _, draft) in enumerate(rows):
            request = stream.request
            if stream.finish_reason is not None or request.channel.ended:  # or another stream of it failed
                continue
            try:
                if draft is not None and not self._source.follows(stream, draft):
                    continue
                if index in sampled.broken:
                    raise nothing_to_draw(self._config.logits_processors, request.params)
                drawn = Drawn(sampled.tokens[index], logprobs[index], candidates[index])
                chunks = stream.continuation.take(stream, drawn)
                for place, chunk in enumerate(chunks):
                    counters.output_tokens += 1  # before `put`, which may raise
                    counters.forced_tokens += place > 0
                    request.channel.put(chunk)
                    timed.append(stream)
            except Exception as error:
                self._fail(request, error)
        self._times.count(timed)


def sample_row(stream: Stream, position: int, draft: array[int] | None = None) -> SampleRow:
    """Return the row that draws a stream's token at `position`, after a draft if there is one.

    A token before it may still be being drawn.
    """
    request, continuation = stream.request, stream.continuation
    tokens = stream.tokens if draft is None else stream.tokens + draft
    in_flight, slots = position - len(tokens), request.parts.slots
    if slots:  # processors read the text only
        tokens = tokens[slots:]
    return SampleRow(  # by position: keywords take a quarter more time, for each row of each step
        request.params,
        stream.seed,
        position + request.parts.offset,
        tokens,
        len(request.prompt) - slots,
        request.stop_ids,
        (request.scheduling.number, stream.index),
        in_flight,
        continuation.candidates,
        continuation.bad_words,
    )


class TokenTimes:
    """Count the inter-token latencies (ITL) of all streams: the times between two tokens of one stream.

    A stream's first token counts nothing. Preemptions and pauses are part of the time between two tokens. Tokens of one
    step, such as those that a constraint forces, are 0 s apart. Tokens of beams are not counted, as they come together.

    Most streams of a step had their last tokens in the same earlier step, so that their times are equal and are counted
    together: about 0.1 us a token.
    """

    def __init__(self) -> None:
        self.histogram = Histogram(ITL_BOUNDS)

    def count(self, streams: Sequence[Stream]) -> None:
        """Count the tokens of a step: one for each item of `streams`."""
        now, before, tokens = perf_counter(), inf, 0
        for stream in streams:
            last, stream.times.last_token = stream.times.last_token, now
            if last == before:
                tokens += 1
            elif last is not None:
                if tokens:
                    self.histogram.observe(now - before, tokens)
                before, tokens = last, 1
        if tokens:
            self.histogram.observe(now - before, tokens)


# ---- scores of prompts


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a step's logits that score one chunk: row sources[i] scores token targets[i].

    The last `last` of them are the last targets of the request, and the others are tokens of the prompt.
    """

    stream: Stream
    targets: list[int]
    sources: list[int]
    last: int


@dataclass(frozen=True)
class ChunkScores:
    """The scores of one chunk, which a device may still compute: a part of the scores of its step."""

    request: Request
    pending: PendingScores
    part: slice
    last: int  # the number of last targets

    def take(self, kept: KeptScores) -> int:
        """Wait for the scores, record them in the request, and keep them; returns their number.

        Raises InvalidInput if the model computed NaN.
        """
        found, scores = self.pending.result(self.part), self.request.scores
        scores.put(found, self.last)
        scores.keep_in(kept, self.request.namespace)
        return len(found.chosen)


def begin_chunk_scores(work: Sequence[Work], logits: Tensor, isolated: Parts) -> list[ChunkScores]:
    """Start to score the chunks of a step, from its logits [len(work) + additional rows, vocab].

    See `Forward.run` for the order of the rows. `isolated` runs this, in several parts only if it raises. Waits for
    nothing.
    """

    def begin(parts: list[ScoredRows]) -> PendingScores:
        top = max(each.stream.request.scores.top for each in parts)
        targets = list(chain.from_iterable(each.targets for each in parts))
        return begin_scores(logits, targets, top, list(chain.from_iterable(each.sources for each in parts)))

    # A guard in place of a call of each request's null object: it saves 0.1 us for each stream of a step.
    scored = _scored_rows(work) if True in [each.stream.request.scores.wanted for each in work] else []
    begun: list[ChunkScores] = []
    for part, pending in isolated.run(scored, begin) if scored else ():
        end = 0
        for each in part:
            start, end = end, end + len(each.targets)
            begun.append(ChunkScores(each.stream.request, pending, slice(start, end), each.last))
    return begun


def take_chunk_scores(begun: Iterable[ChunkScores], kept: KeptScores, fail: Fail) -> int:
    """Record and keep the scores of chunks whose step has run, without requests that ended; returns their number."""
    count = 0
    for each in begun:
        try:
            if not each.request.channel.ended:
                count += each.take(kept)
        except Exception as error:
            fail(each.request, error)
    return count


def _scored_rows(work: Sequence[Work]) -> list[ScoredRows]:
    """Return the rows that score the chunks of a step, without chunks that need none."""
    found: list[ScoredRows] = []
    extra = len(work)  # the first additional row of the chunk
    for row, each in enumerate(work):
        request, inner = each.stream.request, range(extra, extra + each.rows - 1)
        extra = inner.stop
        if request.channel.ended:
            continue
        targets, last = request.scores.targets(each.end, each.rows)
        if targets:
            found.append(ScoredRows(each.stream, targets, [*inner, *[row] * (len(targets) - len(inner))], last))
    return found
