"""Run the engine's steps: schedule, run, commit.

Only the engine's thread calls a core. An exception inside a step ends the requests that caused it, and no other if that
can be found out. Only KV of forwards that returned finite logits is published.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.beams import BeamRequest
from radixkv.engine.chunk_scores import ChunkScores, begin_chunk_scores
from radixkv.engine.fault_isolation import failure, fault_isolation, in_halves
from radixkv.engine.latency import TokenTimes
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.reuse_policy import ReusePolicy, reuse_policy
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.engine.stats import Counters
from radixkv.errors import EngineError, InvalidInput, RequestCancelled, RequestTimedOut
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.logits_processors import nothing_to_draw
from radixkv.sampling.params import Candidates, SampleRow, TokenLogprobs
from radixkv.sampling.sampler import HostSampler, Sampled, Sampler, finite_rows
from radixkv.sampling.token_mask import ConstrainedRow, StepMasks, TokenMasks

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.cache.host.tree import HostRun
    from radixkv.cache.types import CachedRun

_log = logging.getLogger(__name__)
Row = tuple[int, Stream]


class Forward(Protocol):
    """Computes a step; `radixkv.models.runner.Runner` does."""

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> Tensor:
        """Run all copies, then all chunks; returns logits [len(chunks) + additional rows, vocab].

        Row i is the last token of chunk i. The additional rows follow: of each chunk in turn, its last `logit_rows`
        tokens without the last one.
        """
        ...


class BackgroundTask(Protocol):
    """Work that is done in pieces, one after each step; `kv_scrub.Auditor` is one."""

    def due_in(self, *, busy: bool) -> float | None:
        """Return the seconds until a piece is due; None for never. `busy` says whether there are requests."""
        ...

    def step(self, *, busy: bool) -> None:
        """Do one piece if it is due. Raises nothing but DeviceLost."""
        ...

    def close(self) -> None:
        """End, because the engine was closed."""
        ...


class Core:
    """Runs requests over one cache and one runner, one step at a time."""

    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self, cache: PrefixCache, runner: Forward, config: EngineConfig) -> None:
        """Own `cache` and `runner` from now on."""
        self.cache = cache
        self.runner = runner
        self.config = config
        self.counters = Counters()
        self.token_times = TokenTimes()
        self.observers: list[EngineObserver] = []
        self.background: list[BackgroundTask] = []
        self.step_seconds, self.step_tokens = 0.0, 0  # of all steps that ran something
        self._reuse = self._reuse_policy()
        self.scheduler = self.scheduler_class(cache, config, self.counters, self._reuse, self.observers, self.end)
        self._isolation = fault_isolation(cache, lambda request: self.scheduler.preempt(request))
        self.admission = self.scheduler.admission
        self.sampler: Sampler = HostSampler()
        self._masks = TokenMasks()
        # A guard in place of a null object: looking for constrained streams takes 1% of a step.
        self._constrained = False  # whether there has been a constrained request
        self._scored = False  # whether there has been a scored request; a guard for the same reason
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; requests that ended are skipped

    def _reuse_policy(self) -> ReusePolicy:
        return reuse_policy(self.cache, self.config, row_dependent=getattr(self.runner, "row_dependent", False))

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def state_stats(self) -> dict[str, int]:
        """Return the runner's counters of recurrent states and of steps without CUDA graphs, as in EngineStats."""
        states, eager = getattr(self.runner, "states", None), getattr(self.runner, "eager", None)
        counted = {} if states is None else dict(states.stats())
        return counted if eager is None else {**counted, "eager_steps": eager.count}

    def token_costs(self) -> dict[str, float]:
        """Return the measured seconds of a token's load and of its prefill, by name; {} without a host tier."""
        return {}

    def idle_for(self) -> float | None:
        """Return the seconds for which a step would have nothing to do: 0.0 for none, None until the next call.

        While there are requests, only paused ones and deadlines let the engine rest.
        """
        if any(not each.channel.paused for each in chain(self.scheduler.running, self.scheduler.waiting)):
            return 0.0
        waits = [task.due_in(busy=self.busy) for task in self.background]
        if self.busy and self._deadlines:
            waits.append(max(self._deadlines[0][0] - time.perf_counter(), 0.0))
        return min((wait for wait in waits if wait is not None), default=None)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool: see `Admission.check_fits`."""
        self.scheduler.add(request)
        self._constrained |= request.matcher is not None
        self._scored |= request.scoring is not None
        for observer in self.observers:
            observer.added(request)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * (len(self.scheduler.running) + len(self.scheduler.waiting)):
                self._deadlines = [each for each in self._deadlines if not each[2].channel.ended]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.number, request))

    def cancel(self, request: Request, error: RequestCancelled | None = None) -> None:
        """End a request that has not ended; its computed tokens stay cached. Between two steps only.

        `error` is the reason for the request's caller.
        """
        if not request.channel.ended:
            self._publish_all(request)
        self.end(request, error or RequestCancelled("the request was cancelled"))

    def disable_backpressure(self) -> None:
        """Pause no request from now on: a draining engine would wait for readers that have left."""
        for request in chain(self.scheduler.running, self.scheduler.waiting):
            request.channel.disable_backpressure()

    def close(self, error: EngineError) -> None:
        """End every request, and release the pool and the cache; no other method may be called afterwards."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            try:
                self.end(request, error)
            except Exception:
                _log.exception("what a request held could not be freed")
        for task in self.background:
            task.close()
        self.scheduler.close()
        self._reuse.close()
        del self.runner, self.cache

    def forget(self, error: EngineError) -> None:
        """Drop all cached KV, pinned or not, because the model computes another; between two steps only.

        Ends the requests that have begun with `error`. Waiting requests that have computed nothing stay.
        """
        self.finish_step()
        for request in [*self.scheduler.running, *(each for each in self.scheduler.waiting if each.admitted)]:
            self.end(request, error)
        self.clear_cache(pins=True)

    def clear_cache(self, *, pins: bool = False) -> None:
        """Drop all cached KV that no request and no pin holds, with `pins` also pinned KV, and all kept scores."""
        self.cache.clear(pins=pins)
        self.forget_scores()

    def clear_namespace(self, namespace: Hashable) -> None:
        """Drop the cached KV of a namespace that no request and no pin holds, and the kept scores of its prompts."""
        self.cache.clear_namespace(namespace)
        self._reuse.prompt_scores.drop(namespace)
        self._reset_scores(each for each in self.scheduler.waiting if each.namespace == namespace)

    def forget_scores(self) -> None:
        """Drop all kept scores of prompts, and those that waiting requests took."""
        self._reuse.prompt_scores.clear()
        self._reset_scores(self.scheduler.waiting)

    def _reset_scores(self, requests: Iterable[Request]) -> None:
        """Let requests that have not begun compute their scores again."""
        for request in requests:
            if request.scoring is not None and not request.streams:
                request.scoring.reset()

    def demote(self, tokens: TokenIds, keep: int, namespace: Hashable) -> None:
        """Evict the cached part of `tokens` from position `keep` on first, as far as no other prefix shares it."""
        match = self.cache.match(tokens, namespace)
        cached = match.matched + match.host  # a reply's last token never is
        self.cache.demote(tokens[:cached], namespace, start=keep)

    # ---- for audits

    def random_run(self, rng: Random) -> CachedRun | HostRun | None:
        """Return a random run of cached tokens; None if nothing is cached."""
        return self.cache.random_run(rng)

    @contextmanager
    def cached_blocks(self, tokens: TokenIds, namespace: Hashable) -> Iterator[NDArray[np.int32] | None]:
        """Yield the block table of a cached text, to be read only while this is open; None if some is not cached."""
        match = self.cache.match(tokens, namespace)
        yield match.blocks if match.length == len(tokens) else None

    # ---- one step

    def step(self) -> None:
        """Schedule, run, commit. Raises DeviceLost if the device computes nothing more, and no other error."""
        begun = time.perf_counter()
        work = self._advance()
        if work:
            self.step_seconds += time.perf_counter() - begun
            self.step_tokens += sum(len(each.tokens) for each in work)
        if self.background:
            self._run_background()

    def _advance(self) -> list[Work]:
        """Schedule, run, commit; return the step's work."""
        work: list[Work] = []
        try:
            self._end_overdue()
            work = self.scheduler.schedule()
            masks = self._masks_of(work) if self._constrained else None
            for part, logits in self._run(work):
                self._commit(part, logits, masks)
        except Exception as error:
            self._fail(work, error)
        return work

    def finish_step(self) -> None:
        """Finish the step in flight, if the core has one between two steps: an `OverlappedCore` may."""

    def _run_background(self) -> None:
        for task in self.background:
            task.step(busy=self.busy)

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and (self._deadlines[0][0] <= time.perf_counter() or self._deadlines[0][2].channel.ended):
            request = heapq.heappop(self._deadlines)[2]
            if not request.channel.ended:
                waited = time.perf_counter() - request.submitted
                self._publish_all(request)
                self.end(request, RequestTimedOut(f"the request did not finish in time: {waited:.3g} s have passed"))

    # ---- run

    def _run(self, work: list[Work]) -> list[tuple[list[Work], Tensor]]:
        """Return the logits of all work; in several parts only if a forward raised."""
        if not work:
            return []
        self.counters.steps += 1
        return self._isolation.run(work, self._forward, self._fail_alone)

    def _forward(self, work: list[Work]) -> Tensor:
        chunks = [sequence_input(each) for each in work]
        return self.runner.run(chunks, list(chain.from_iterable(each.plan.copies for each in work)))

    def _masks_of(self, work: list[Work]) -> StepMasks | None:
        """Start to fill the masks of the constrained streams that sample in this step; None if there is none."""
        rows = {
            each.stream: ConstrainedRow(each.stream.matcher, each.stream.request.stop_ids)
            for each in work
            if each.stream.matcher is not None and each.samples
        }
        return self._masks.begin(rows) if rows else None

    # ---- commit

    def _commit(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> None:
        """Publish the computed chunks, sample the next tokens, and close the streams that ended."""
        scores: list[ChunkScores] = []
        if self._scored:
            scores, logits = begin_chunk_scores(work, logits, self._fail_alone), logits[: len(work)]
        for each, is_finite in zip(work, finite_rows(logits), strict=True):
            request = each.stream.request
            try:
                if not request.channel.ended:  # another stream of it failed
                    each.stream.sequence.commit(self._count_chunk(each, is_finite))
            except Exception as error:
                self._fail_alone(request, error)
        self._take_scores(scores)
        if masks is not None:
            for stream, failed in masks.wait().items():
                self._fail_alone(stream.request, failed)
        for rows, sampled in self._draw(work, logits, masks):
            self._accept(rows, sampled, constrained=masks is not None)
        self._end_step(work)

    def _end_step(self, work: list[Work]) -> None:
        """Close the streams that ended, and wake the readers."""
        requests = {each.stream.request: None for each in work}
        for request in requests:
            try:
                self._close_finished(request)
            except Exception as error:
                self._fail_alone(request, error)
        for request in requests:  # last, so that all readers of this step are woken together
            request.channel.notify()

    def _count_chunk(self, work: Work, is_finite: bool) -> bool:
        """Count a computed chunk; return whether to publish it now. Raises InvalidInput if it computed NaN."""
        if not is_finite:
            raise InvalidInput("the model's logits have no finite maximum: it computed NaN or infinity")
        counters, stream, count = self.counters, work.stream, len(work.tokens)
        new, hits = stream.count_computed(work.start, count)
        counters.computed_tokens += new
        counters.recomputed_tokens += count - new
        counters.cached_tokens += hits
        request, prompt_tokens = stream.request, len(stream.request.prompt)
        counters.decode_tokens += new if work.start >= prompt_tokens else min(new, max(work.end - prompt_tokens, 0))
        if not request.counted:
            request.counted = True
            counters.prompt_tokens += prompt_tokens
        return self._reuse.publishes(stream, work.start, count, isolated=work.isolated)

    def _take_scores(self, scores: Sequence[ChunkScores]) -> None:
        """Record the scores of chunks that were computed."""
        for each in scores:
            try:
                if not each.request.channel.ended:
                    self.counters.scored_tokens += each.take()
                    self._reuse.keep_scores(each.request)
            except Exception as error:
                self._fail_alone(each.request, error)

    def _rows_to_sample(self, work: list[Work]) -> list[Row]:
        """Return (row of the logits, stream) for each stream that samples; forks requests whose prompt is computed."""
        rows: list[Row] = []
        for row, each in enumerate(work):
            request = each.stream.request
            if not each.samples or request.channel.ended:
                continue
            if not request.unforked:
                rows.append((row, each.stream))
                continue
            try:
                request.fork()
                rows.extend((row, stream) for stream in request.streams)
            except Exception as error:
                self._fail_alone(request, error)
        return rows

    def _draw(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> list[tuple[list[Row], Sampled]]:
        """Sample a token for each stream that has its last logits; in several parts only if that raised."""
        rows = self._rows_to_sample(work)
        if not rows:
            return []

        def draw(rows: list[Row]) -> Sampled:
            mask = None if masks is None else masks.select(work[row].stream for row, _ in rows)
            samples = [sample_row(stream) for _, stream in rows]
            return self.sampler.begin(logits, samples, [row for row, _ in rows], mask).result()

        return in_halves(rows, draw, lambda row: row[1].request, self._fail_alone)

    def _accept(self, rows: list[Row], sampled: Sampled, *, constrained: bool) -> None:
        """Append the sampled tokens to their streams, and hand the text that they release to the callers.

        `constrained` says whether some of the streams are.
        """
        logprobs = sampled.logprobs or [None] * len(rows)
        candidates = sampled.candidates  # a guard in place of a null object: most steps have none
        self.token_times.begin()
        for index, (_, stream) in enumerate(rows):
            request = stream.request
            if request.channel.ended:  # another stream of it failed
                continue
            try:
                if index in sampled.broken:
                    raise nothing_to_draw(self.config.logits_processors, request.params)
                if candidates is not None and isinstance(request, BeamRequest):
                    self._offer(request, stream, candidates[index], logprobs[index])
                    continue
                if constrained and stream.matcher is not None:
                    self._accept_constrained(stream, sampled.tokens[index], logprobs[index])
                    continue
                self.counters.output_tokens += 1
                request.channel.put(stream.accept(sampled.tokens[index], logprobs[index]))
                self.token_times.count(stream)
            except Exception as error:
                self._fail_alone(request, error)
        self.token_times.end()

    def _accept_constrained(self, stream: Stream, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a sampled token and the tokens that it forces."""
        for forced, chunk in enumerate(stream.accept_constrained(token, logprobs)):
            self.counters.output_tokens += 1
            self.counters.forced_tokens += forced > 0
            stream.request.channel.put(chunk)
            self.token_times.count(stream)

    def _offer(
        self, request: BeamRequest, stream: Stream, candidates: Candidates | None, logprobs: TokenLogprobs | None
    ) -> None:
        """Hand a beam's candidates to its search, and the tokens of the best beams to the caller once it is over."""
        assert candidates is not None
        for chunk in request.offer(stream, candidates, logprobs, self._publish_rest):
            self.counters.output_tokens += 1
            request.channel.put(chunk)

    def _close_finished(self, request: Request) -> None:
        """Close the streams that ended, and the request with its last one."""
        if request.channel.ended:
            return
        if not request.max_tokens and request.streams[0].computed_length >= len(request.prompt):
            request.streams[0].finish_reason = "length"  # only the prompt was asked for
        finished = [stream for stream in request.streams if stream.finish_reason is not None]
        for stream in finished:
            self._publish_rest(stream)
            stream.close()
        if len(finished) == request.width:
            self.scheduler.remove(request)
            request.channel.finish(request.completion())
            self.counters.finished += 1
            for observer in self.observers:
                observer.ended(request, None)

    # ---- end a request

    def end(self, request: Request, error: Exception) -> None:
        """End a request with an error, unless it has ended."""
        if request.channel.ended:
            return
        try:
            self.scheduler.remove(request)
        finally:
            self.counters.cancelled += isinstance(error, RequestCancelled)
            self.counters.failed += not isinstance(error, RequestCancelled)
            self.counters.timed_out += isinstance(error, RequestTimedOut)
            request.channel.fail(error)
            for observer in self.observers:
                observer.ended(request, error)

    def _publish_all(self, request: Request) -> None:
        for stream in request.streams:
            self._publish_rest(stream)

    def _publish_rest(self, stream: Stream) -> None:
        self._reuse.publish_rest(stream)

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """End the one request that raised."""
        _log.error("a request failed", exc_info=error)
        self.end(request, failure(error))

    def _fail(self, work: list[Work], error: Exception) -> None:
        """End the requests of a step that raised; all running ones if it raised before all chunks were planned."""
        _log.exception("a step of %d chunks failed", len(work))
        # At least one request, so that the same step does not raise for ever.
        running = self.scheduler.running or list(self.scheduler.waiting)[:1]
        for request in [each.stream.request for each in work] or list(running):
            self.end(request, failure(error))


def sequence_input(work: Work, sampled_row: int = -1) -> SequenceInput:
    """Return the input of a forward that computes a chunk; see SequenceInput for `sampled_row`."""
    return SequenceInput(
        np.frombuffer(work.tokens, dtype=np.int32),
        work.start,
        work.plan.slots,
        work.stream.sequence.block_table,
        work.isolated,
        work.plan.state,
        sampled_row,
        work.logit_rows,
    )


def sample_row(stream: Stream, in_flight: int = 0) -> SampleRow:
    """Return the row that samples a stream's next token, after `in_flight` tokens that are still being sampled."""
    request, tokens = stream.request, stream.tokens
    return SampleRow(  # by position: keywords take a quarter more time, for each row of each step
        request.params,
        stream.seed,
        len(tokens) + in_flight,
        tokens,
        len(request.prompt),
        request.stop_ids,
        (request.number, stream.index),
        in_flight,
        request.candidates,
        request.bad_words,
    )
