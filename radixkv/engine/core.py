"""The engine's heart: schedule, run, commit.

Knows: the cache, the scheduler and a runner, and what an exception inside a step costs. Knows no thread and no queue:
one caller at a time, in practice the engine's thread.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.kv_scrub import Auditor
from radixkv.engine.request import Request, Stream, TokenIds, failure
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.engine.stats import Counters
from radixkv.errors import EngineClosed, EngineError, InvalidInput, RequestCancelled, RequestTimedOut
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.params import SampleRow, TokenLogprobs
from radixkv.sampling.sampler import Sampled, sample

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.engine.observers.recorder import RequestRecorder
    from radixkv.engine.observers.trace_writer import TraceWriter

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Row = tuple[int, Stream]


class Forward(Protocol):
    """What computes a step; `radixkv.models.runner.Runner` does."""

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> Tensor:
        """Run all copies, then all chunks; logits [len(chunks), vocab] behind each chunk's last token."""
        ...


class Core:
    """Requests in, chunks and completions out, one step at a time."""

    def __init__(
        self,
        cache: PrefixCache,
        runner: Forward,
        config: EngineConfig,
    ) -> None:
        """Own `cache` and `runner` from now on."""
        self.cache = cache
        self.runner = runner
        self.counters = Counters()
        self._reuse_policy = ReusePolicy(cache, config, row_dependent=getattr(runner, "row_dependent", False))
        self.scheduler = Scheduler(cache, config, self.counters, self._end, self._reuse_policy)
        self.auditor = Auditor(
            cache, runner, self.scheduler, self.counters, self._end, reuse=config.prefix_cache, scrub=config.scrub_rate
        )
        self.telemetry: RequestRecorder | None = None  # is told of requests, if anybody wants to know
        self.recording: TraceWriter | None = None  # is told how requests ended
        self.step_seconds, self.step_tokens = 0.0, 0  # of all steps that ran something
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; those that ended are passed over

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def reuses(self) -> bool:
        """Whether requests look for cached prefixes at all."""
        return self._reuse_policy.on

    def idle_for(self) -> float | None:
        """Seconds for which a step would have nothing to do: 0.0 for none, None until somebody calls.

        Only requests that nobody reads, and deadlines, let the engine rest while it is busy.
        """
        if any(not each.channel.paused for each in chain(self.scheduler.running, self.scheduler.waiting)):
            return 0.0
        rests = [self.auditor.rest(busy=self.busy)]
        if self.busy and self._deadlines:
            rests.append(max(self._deadlines[0][0] - time.perf_counter(), 0.0))
        return min((rest for rest in rests if rest is not None), default=None)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool: see `Scheduler.check_fits`."""
        self.scheduler.add(request)
        if self.telemetry is not None:
            self.telemetry.added(request)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * (len(self.scheduler.running) + len(self.scheduler.waiting)):
                self._deadlines = [each for each in self._deadlines if not each[2].channel.ended]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.number, request))

    def cancel(self, request: Request) -> None:
        """End a request that has not ended; what it computed stays cached. Between two steps only."""
        if not request.channel.ended:
            self._publish_all(request)
        self._end(request, RequestCancelled("the request was cancelled"))

    def disable_backpressure(self) -> None:
        """Pause nobody from now on: the engine drains, and a reader who has left would hold up its end."""
        for request in chain(self.scheduler.running, self.scheduler.waiting):
            request.channel.disable_backpressure()

    def end_all(self, error: EngineError) -> None:
        """End every request, waiting or running. Raises nothing: nobody is to wait for ever."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            try:
                self._end(request, error)
            except Exception:
                _log.exception("what a request held could not be freed")

    def close(self, error: EngineError) -> None:
        """End every request and let go of the pool and the cache; nothing may be called behind it."""
        self.end_all(error)
        self.auditor.close(EngineClosed("the engine was closed during the audit"))
        self.scheduler.close()
        self._reuse_policy.close()
        del self.runner, self.cache

    def demote(self, tokens: TokenIds, keep: int, namespace: Hashable) -> None:
        """Put what is cached of `tokens` from position `keep` on, and shared with nothing else, first in line to go."""
        cached = self.cache.match(tokens, namespace).length  # a reply's last token never is
        self.cache.demote(tokens[:cached], namespace, start=keep)

    # ---- one step

    def step(self) -> None:
        """Schedule, run, commit. An exception ends the requests that caused it, if that can be told, and no other."""
        work: list[Work] = []
        begun = time.perf_counter()
        try:
            self._expire()
            work = self._schedule()
            for part, logits in self._run(work):
                self._commit(part, logits)
        except Exception as error:
            self._fail(work, error)
        if work:
            self.step_seconds += time.perf_counter() - begun
            self.step_tokens += sum(len(each.tokens) for each in work)
        self.auditor.step(busy=self.busy)

    def _expire(self) -> None:
        """End the requests whose time is over."""
        while self._deadlines and (self._deadlines[0][0] <= time.perf_counter() or self._deadlines[0][2].channel.ended):
            request = heapq.heappop(self._deadlines)[2]
            if not request.channel.ended:
                waited = time.perf_counter() - request.submitted
                self._publish_all(request)
                self._end(request, RequestTimedOut(f"the request did not finish in time: {waited:.3g} s have passed"))

    def _schedule(self) -> list[Work]:
        return self.scheduler.schedule()

    def _run(self, work: list[Work]) -> list[tuple[list[Work], Tensor]]:
        """The logits of all work, as a rule in one piece.

        If the forward raises, each half is tried alone, and so on: what ran writes the same again, so only a request
        that fails by itself fails, and what was too much for the memory at once gets through in parts.
        """
        if not work:
            return []
        self.counters.steps += 1
        chunks = [(each, _chunk(each)) for each in work]
        parts = _halving(chunks, self._forward, _of_chunk, self._end)
        return [([each for each, _ in part], logits) for part, logits in parts]

    def _forward(self, items: list[tuple[Work, SequenceInput]]) -> Tensor:
        copies = list(chain.from_iterable(each.plan.copies for each, _ in items))
        return self.runner.run([chunk for _, chunk in items], copies)

    # ---- commit

    def _commit(self, work: list[Work], logits: Tensor) -> None:
        sound = torch.isfinite(logits.amax(dim=1)).tolist()
        for each, is_sound in zip(work, sound, strict=True):
            request = each.stream.request
            try:
                if not request.channel.ended:  # another stream of it failed
                    self._commit_one(each, is_sound)
            except Exception as error:
                self._fail_alone(request, error)
        self._sample(self._rows(work), logits)
        for request in {each.stream.request: None for each in work}:
            try:
                self._settle(request)
            except Exception as error:
                self._fail_alone(request, error)

    def _commit_one(self, work: Work, is_sound: bool) -> None:
        """Keep what a chunk computed, and publish it; never the KV of a forward that gave no numbers."""
        if not is_sound:
            raise InvalidInput("the model's logits have no finite maximum: it computed NaN or infinity")
        self._count(work)
        publish = self._reuse_policy.publishes(work.stream, len(work.tokens), isolated=work.isolated)
        work.stream.sequence.commit(publish)

    def _count(self, work: Work) -> None:
        counters, stream = self.counters, work.stream
        new = stream.computed(work.start, len(work.tokens))
        counters.computed_tokens += new
        counters.recomputed_tokens += len(work.tokens) - new
        counters.cached_tokens += stream.take_hits()
        if not stream.request.counted:
            stream.request.counted = True
            counters.prompt_tokens += len(stream.request.prompt)

    def _rows(self, work: list[Work]) -> list[Row]:
        """Row of the logits and stream, for all that sample; forks requests that have just computed their prompt."""
        rows: list[Row] = []
        for row, each in enumerate(work):
            request = each.stream.request
            if not each.samples or request.channel.ended:
                continue
            if len(request.streams) == request.width:
                rows.append((row, each.stream))
                continue
            try:
                request.fork()
                rows.extend((row, stream) for stream in request.streams)
            except Exception as error:
                self._fail_alone(request, error)
        return rows

    def _sample(self, rows: list[Row], logits: Tensor) -> None:
        """Draw a token for each row, all at once; if that raises, in halves."""

        def draw(part: list[Row]) -> Sampled:
            return sample(_rows_of(logits, [row for row, _ in part]), [_sample_row(stream) for _, stream in part])

        if not rows:
            return
        for part, sampled in _halving(rows, draw, _of_row, self._end):
            logprobs = sampled.logprobs or [None] * len(part)
            for place, (_, stream) in enumerate(part):
                try:
                    if not stream.request.channel.ended:  # another stream of it failed
                        self._accept(stream, sampled.tokens[place], logprobs[place], place in sampled.broken)
                except Exception as error:
                    self._fail_alone(stream.request, error)

    def _accept(self, stream: Stream, token: int, logprobs: TokenLogprobs | None, broken: bool) -> None:
        if broken:
            raise InvalidInput("the logits have no finite maximum: the sampling parameters leave nothing to draw")
        self.counters.output_tokens += 1
        stream.request.channel.put(stream.accept(token, logprobs))

    def _settle(self, request: Request) -> None:
        """Close the streams that ended, and the request with its last one."""
        if request.channel.ended:
            return
        if not request.max_tokens and not request.streams[0].prefilling:
            request.streams[0].finish_reason = "length"  # only the prompt was asked for
        finished = [stream for stream in request.streams if stream.finish_reason is not None]
        for stream in finished:
            self._reuse_policy.leave(stream)
            stream.close()
        if len(finished) == request.width:
            self.scheduler.remove(request)
            request.channel.finish(request.completion())
            self.counters.finished += 1
            self._tell_end(request, None)

    def _publish_all(self, request: Request) -> None:
        for stream in request.streams:
            self._reuse_policy.leave(stream)

    # ---- ends

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """What raised was this request's own: it ends, and no other."""
        _log.error("a request failed", exc_info=error)
        self._end(request, failure(error))

    def _fail(self, work: list[Work], error: Exception) -> None:
        """End the requests of a step that raised; all that run if it raised before there was a plan for all."""
        _log.exception("a step of %d chunks failed", len(work))
        # Never none: a step must not raise for ever.
        running = self.scheduler.running or list(self.scheduler.waiting)[:1]
        for request in [each.stream.request for each in work] or list(running):
            self._end(request, failure(error))

    def _end(self, request: Request, error: Exception) -> None:
        if request.channel.ended:
            return
        try:
            self.scheduler.remove(request)
        finally:
            self.counters.cancelled += isinstance(error, RequestCancelled)
            self.counters.failed += not isinstance(error, RequestCancelled)
            self.counters.timed_out += isinstance(error, RequestTimedOut)
            request.channel.fail(error)
            self._tell_end(request, error)

    def _tell_end(self, request: Request, error: Exception | None) -> None:
        for listener in (self.telemetry, self.recording):
            if listener is not None:
                listener.ended(request, error)


def _halving(
    items: list[Item],
    call: Callable[[list[Item]], Result],
    owner: Callable[[Item], Request],
    end: Callable[[Request, Exception], None],
) -> list[tuple[list[Item], Result]]:
    """`call` on all items; if it raises, on each half alone, and so on; `end` ends the owner of one that raises alone.

    Items of a request that has ended meanwhile are left out. Costs 2 log n calls of falling size for each that fails.
    """
    items = [item for item in items if not owner(item).channel.ended]
    if not items:
        return []
    try:
        return [(items, call(items))]
    except Exception as error:
        problem = error
    if len(items) == 1:
        _log.error("a request failed", exc_info=problem)
        end(owner(items[0]), failure(problem))
        return []
    _log.warning("a step of %d parts raised %r: trying its halves", len(items), problem)
    del problem  # with its frames go the tensors that they hold: out-of-memory may be why we are here
    middle = len(items) // 2
    return _halving(items[:middle], call, owner, end) + _halving(items[middle:], call, owner, end)


def _of_chunk(item: tuple[Work, SequenceInput]) -> Request:
    return item[0].stream.request


def _of_row(row: Row) -> Request:
    return row[1].request


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """Those rows; without a copy if it is all of them, as it is while everybody decodes."""
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _chunk(work: Work) -> SequenceInput:
    tokens = np.frombuffer(work.tokens, dtype=np.int32)
    return SequenceInput(tokens, work.start, work.plan.slots, work.stream.sequence.block_table, work.isolated)


def _sample_row(stream: Stream) -> SampleRow:
    request = stream.request
    return SampleRow(
        params=request.params,
        seed=stream.seed,
        position=len(stream.tokens),
        history=stream.tokens,
        prompt_length=len(request.prompt),
        stop_token_ids=request.stop_ids,
    )
