"""The engine's heart: schedule, run, commit.

Knows: the cache, the scheduler and a runner, and what an exception inside a step costs. Knows no thread and no queue:
one caller at a time, in practice the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from radixkv.cache import PrefixCache
from radixkv.engine.prompts import TokenIds
from radixkv.engine.request import Request, Stream, failure
from radixkv.engine.scheduler import Limits, Scheduler, Work
from radixkv.engine.stats import Counters
from radixkv.errors import EngineError, InvalidInput, RequestCancelled
from radixkv.models.runner import Chunk
from radixkv.models.sampler import SampleRow, TokenLogprobs, sample

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Forward(Protocol):
    """What computes a step; `radixkv.models.runner.Runner` does."""

    def run(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]]) -> Tensor:
        """Run all copies, then all chunks; logits [len(chunks), vocab] behind each chunk's last token."""
        ...


class Core:
    """Requests in, chunks and completions out, one step at a time."""

    def __init__(self, cache: PrefixCache, runner: Forward, limits: Limits, *, reuse: bool = True) -> None:
        """Own `cache` and `runner` from now on. Without `reuse` nothing is looked up in the cache or published."""
        self.cache = cache
        self.runner = runner
        self.scheduler = Scheduler(cache, limits, self._end, reuse=reuse)
        self.counters = Counters()
        self._reuse = reuse

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool: see `Scheduler.check_fits`."""
        self.scheduler.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request that has not ended; what it computed stays cached. Between two steps only."""
        if not request.outlet.ended:
            for stream in request.streams:
                self._publish(stream)
        self._end(request, RequestCancelled("the request was cancelled"))

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
        self.scheduler.close()
        del self.runner, self.cache

    def demote(self, tokens: TokenIds, keep: int, namespace: Hashable) -> None:
        """Put what is cached of `tokens` from position `keep` on, and shared with nothing else, first in line to go."""
        cached = self.cache.match(tokens, namespace).length  # a reply's last token never is
        self.cache.demote(tokens[:cached], namespace, start=keep)

    # ---- one step

    def step(self) -> None:
        """Schedule, run, commit. An exception ends the requests of this step and nothing else."""
        work: list[Work] = []
        try:
            work = self._schedule()
            if work:
                logits = self._run(work)
                self._commit(work, logits)
        except Exception as error:
            self._fail(work, error)

    def _schedule(self) -> list[Work]:
        return self.scheduler.schedule()

    def _run(self, work: list[Work]) -> Tensor:
        self.counters.steps += 1
        copies = list(chain.from_iterable(each.plan.copies for each in work))
        return self.runner.run([_chunk(each) for each in work], copies)

    def _commit(self, work: list[Work], logits: Tensor) -> None:
        sound = torch.isfinite(logits.amax(dim=1)).tolist()
        for each, is_sound in zip(work, sound, strict=True):
            if not each.stream.request.outlet.ended:  # another stream of it failed
                with self._alone(each.stream.request):
                    self._commit_one(each, is_sound)
        self._sample(self._rows(work), logits)
        for each in work:
            with self._alone(each.stream.request):
                self._settle(each.stream.request)

    # ---- commit

    def _commit_one(self, work: Work, is_sound: bool) -> None:
        """Keep what a chunk computed, and publish it; never the KV of a forward that gave no numbers."""
        if not is_sound:
            raise InvalidInput("the model's logits have no finite maximum: it computed NaN or infinity")
        self._count(work)
        work.stream.sequence.commit(publish=self._reuse and not work.stream.request.publish_late)

    def _count(self, work: Work) -> None:
        counters, stream = self.counters, work.stream
        counters.computed_tokens += len(work.tokens)
        if work.start == stream.cached_tokens and stream.index == 0:  # its first chunk
            counters.prompt_tokens += len(stream.request.prompt)
            counters.cached_tokens += stream.cached_tokens

    def _rows(self, work: list[Work]) -> list[tuple[int, Stream]]:
        """Row of the logits and stream, for all that sample; forks requests that have just computed their prompt."""
        rows: list[tuple[int, Stream]] = []
        for row, each in enumerate(work):
            request = each.stream.request
            if not each.samples or request.outlet.ended:
                continue
            if len(request.streams) == request.width:
                rows.append((row, each.stream))
                continue
            with self._alone(request):
                request.fork()
                rows.extend((row, stream) for stream in request.streams)
        return rows

    def _sample(self, rows: list[tuple[int, Stream]], logits: Tensor) -> None:
        if not rows:
            return
        index = torch.tensor([row for row, _ in rows], device=logits.device)
        sampled = sample(logits.index_select(0, index), [_sample_row(stream) for _, stream in rows])
        logprobs = sampled.logprobs or [None] * len(rows)
        for row, (_, stream) in enumerate(rows):
            if not stream.request.outlet.ended:  # another stream of it failed
                with self._alone(stream.request):
                    self._accept(stream, sampled.tokens[row], logprobs[row], row in sampled.broken)

    def _accept(self, stream: Stream, token: int, logprobs: TokenLogprobs | None, broken: bool) -> None:
        if broken:
            raise InvalidInput("the logits have no finite maximum: the sampling parameters leave nothing to draw")
        self.counters.output_tokens += 1
        stream.request.outlet.put(stream.accept(token, logprobs))

    def _settle(self, request: Request) -> None:
        """Close the streams that ended, and the request with its last one."""
        if request.outlet.ended:
            return
        if not request.max_tokens and not request.streams[0].prefilling:
            request.streams[0].finish_reason = "length"  # only the prompt was asked for
        for stream in request.streams:
            if stream.finish_reason is not None:
                self._publish(stream)
                stream.close()
        if not request.live:
            self.scheduler.remove(request)
            self.counters.finished += 1
            request.outlet.finish(request.completion())

    def _publish(self, stream: Stream) -> None:
        """Publish what `publish_late` kept back; there is no plan under way."""
        if not stream.sequence.closed:
            stream.sequence.commit(publish=self._reuse)

    # ---- ends

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """What raises in here ends `request`, and no other."""
        try:
            yield
        except Exception as error:
            _log.exception("a request failed")
            self._end(request, failure(error))

    def _fail(self, work: list[Work], error: Exception) -> None:
        """End the requests of a step that raised; all that run if it raised before there was a plan for all."""
        _log.exception("a step of %d chunks failed", len(work))
        running = (
            self.scheduler.running or list(self.scheduler.waiting)[:1]
        )  # never none: a step must not raise for ever
        for request in [each.stream.request for each in work] or list(running):
            self._end(request, failure(error))

    def _end(self, request: Request, error: Exception) -> None:
        if request.outlet.ended:
            return
        try:
            self.scheduler.remove(request)
        finally:
            self.counters.cancelled += isinstance(error, RequestCancelled)
            self.counters.failed += not isinstance(error, RequestCancelled)
            request.outlet.fail(error)


def _chunk(work: Work) -> Chunk:
    tokens = np.frombuffer(work.tokens, dtype=np.int32)
    return Chunk(tokens, work.start, work.plan.slots, work.stream.sequence.block_table)


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
