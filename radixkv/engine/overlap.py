"""Run steps that overlap on a device: while it computes one step, the host schedules and launches the next one.

The host takes the results of a step only after it has launched the next one, so the device always has work. The tokens
that the step in flight samples are not known on the host then. The next step reads them on the device (SGLang's overlap
scheduler and TensorRT-LLM do the same), and the cache has placeholders for them, which nothing can match.

- KV is committed when its step is launched, and published when the results show that its logits are finite. Every later
  launch comes after it in the device's stream, so blocks can be reused as soon as the cache frees them.
- A stream ends one step after its last row was launched. The row in between is wasted: the cache drops its token, and
  its result is ignored. `max_tokens` is known in advance and wastes nothing.
- A host-bound row must be read by the host before its stream can continue: a grammar or a bad word decides the mask of
  the next token, and a beam search decides which beams go on. Such a stream samples in every other step at most; all
  others overlap.
- `finish_step` takes the results of the step in flight without launching another one. It comes before a preemption,
  before an audit and before new weights. Cancelling needs no results, and drops them.
- If a launch raises, the step in flight is finished first. The step is then tried again, if need be in halves.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.device import refuse_fatal
from radixkv.engine.chunk_scores import ChunkScores, begin_chunk_scores
from radixkv.engine.core import Core, Forward, Row, sample_row, sequence_input
from radixkv.engine.fault_isolation import in_halves, release_tensors
from radixkv.engine.request import Request, Stream
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.errors import EngineError
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.sampler import Pending, Sampled
from radixkv.sampling.token_mask import StepMasks

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class RelayingForward(Forward, Protocol):
    """Launches a step whose inputs may be tokens that only the device has; `radixkv.models.runner.Runner` does."""

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Tensor | None = None
    ) -> Tensor:
        """See Forward; `sampled` int64 [rows] on the device has the tokens of chunks with a `sampled_row`."""
        ...


@dataclass(frozen=True, slots=True)
class RelayedWork(Work):
    """The one token that the step in flight samples; `tokens` has a placeholder until that step has finished."""


@dataclass(frozen=True)
class Flight:
    """A step that was launched, and its draws: one for all rows, or several after one that raised."""

    work: list[Work]
    draws: list[tuple[list[Row], Pending]]
    constrained: bool
    scores: list[ChunkScores]


class OverlappedScheduler(Scheduler):
    """Plans the next step of streams whose last tokens are still being sampled."""

    in_flight: Callable[[], bool]  # set by the core
    finish_step: Callable[[], None]  # set by the core: takes the results of the step in flight

    def schedule(self) -> list[Work]:
        """Plan the next step. The step in flight may finish meanwhile, and end streams that were planned before."""
        overlaps = self.in_flight()
        work = super().schedule()
        return [each for each in work if each.stream.active] if overlaps and not self.in_flight() else work

    def preempt(self, request: Request) -> None:
        """Free all blocks of a running request, unless it ends with the step in flight; see Scheduler."""
        self.finish_step()
        if request in self.running:
            super().preempt(request)

    def _next(self, stream: Stream) -> Work | None:
        """Plan a stream's next tokens, or the one that is being sampled."""
        start = stream.sequence.length
        if len(stream.tokens) > start:
            return super()._next(stream)
        if stream.request.host_bound:
            self._counters.host_bound_rows += 1
            return None
        if stream.output_length + 1 >= stream.request.max_tokens:
            return None  # the token that is being sampled is the last one
        return RelayedWork(stream, start, array("i", [0]), stream.sequence.extend_unknown())

    def _free_blocks(self, request: Request) -> None:
        """Finish the step in flight, which may free blocks; without one, preempt."""
        if self.in_flight():
            self.finish_step()
        else:
            super()._free_blocks(request)


class OverlappedCore(Core):
    """A core that launches a step before it takes the results of the preceding one."""

    scheduler_class = OverlappedScheduler
    runner: RelayingForward

    def __init__(self, cache: PrefixCache, runner: Forward, config: EngineConfig) -> None:
        """Own `cache`, which has one tier and no recurrent state, and `runner`, a RelayingForward, from now on."""
        super().__init__(cache, runner, config)
        self._flight: Flight | None = None
        scheduler = cast(OverlappedScheduler, self.scheduler)
        scheduler.in_flight, scheduler.finish_step = self._has_flight, self.finish_step

    def idle_for(self) -> float | None:
        """Return 0.0 while a step is in flight; see Core."""
        return super().idle_for() if self._flight is None else 0.0

    def close(self, error: EngineError) -> None:
        """Finish the step in flight, and end every request; see Core."""
        try:
            self.finish_step()
        except Exception:
            _log.exception("the last step could not be finished")
        super().close(error)

    def finish_step(self) -> None:
        """Take the results of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._finish(flight)

    def _has_flight(self) -> bool:
        return self._flight is not None

    # ---- one step

    def _advance(self) -> list[Work]:
        """Schedule and launch a step, then finish the preceding one; return the work of the first."""
        work: list[Work] = []
        launched = None
        try:
            self._end_overdue()
            work = self.scheduler.schedule()
            if work:
                launched = self._launch(work)
        except Exception as error:
            refuse_fatal(error)
            self.finish_step()
            self._fail(work, error)
        flight, self._flight = self._flight, launched
        if flight is not None:
            self._finish(flight)
        return work

    def _run_background(self) -> None:
        """Finish the step in flight before a task that is due: it may use the model, or end requests."""
        for task in self.background:
            if task.due_in(busy=self.busy) == 0:
                self.finish_step()
                task.step(busy=self.busy)

    # ---- launch

    def _launch(self, work: list[Work]) -> Flight | None:
        """Launch a step; None if that raised, so that it was finished at once."""
        masks = self._masks_of(work) if self._constrained else None
        self.counters.steps += 1
        try:
            logits = self._forward(work)
        except Exception as raised:
            refuse_fatal(raised)
            error = raised
        else:
            return self._begin(work, logits, masks)
        _log.warning("a step of %d parts raised %r: trying it again after the preceding step", len(work), error)
        release_tensors(error)
        self.finish_step()
        live = [each for each in work if each.stream.active]
        for part, logits in self._isolation.run(live, self._forward, self._fail_alone) if live else ():
            flight = self._begin(part, logits, masks)
            if flight is not None:
                self._finish(flight)
        return None

    def _forward(self, work: list[Work]) -> Tensor:
        """Launch the forward; tokens that the step in flight samples stay on the device."""
        flight, relayed = self._flight, [each for each in work if isinstance(each, RelayedWork)]
        if flight is None or not relayed:
            for each in relayed:
                each.tokens[0] = each.stream.tokens[each.start]
            return super()._forward(work)
        ((rows, pending),) = flight.draws
        places = {stream: place for place, (_, stream) in enumerate(rows)}
        chunks = [sequence_input(each, places[each.stream] if isinstance(each, RelayedWork) else -1) for each in work]
        copies = list(chain.from_iterable(each.plan.copies for each in work))
        return self.runner.run(chunks, copies, pending.tokens)

    def _begin(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> Flight | None:
        """Commit launched chunks without publishing them, and start to sample; None if all is finished by then."""
        wanted = sum(each.logit_rows for each in work) if self._scored else len(work)
        if len(logits) != wanted:
            raise ValueError(f"a forward of {len(work)} chunks returned {len(logits)} rows of logits, not {wanted}")
        for each in work:
            if each.stream.active:  # another stream of its request may have failed
                each.stream.sequence.commit(publish=False)
                each.stream.in_flight += len(each.tokens)
        scores: list[ChunkScores] = []
        if self._scored:
            scores, logits = self._begin_scores(work, logits), logits[: len(work)]
        if masks is not None:
            for stream, failed in masks.wait().items():
                self._fail_alone(stream.request, failed)
        rows = self._rows_to_sample(work)

        def begin(rows: list[Row]) -> Pending:
            mask = None if masks is None else masks.select(work[row].stream for row, _ in rows)
            samples = [sample_row(stream, work[row].end - len(stream.tokens)) for row, stream in rows]
            return self.sampler.begin(logits, samples, [row for row, _ in rows], mask)

        try:
            return Flight(work, [(rows, begin(rows))], masks is not None, scores)
        except Exception as raised:
            refuse_fatal(raised)
            error = raised
        _log.warning("a draw of %d rows raised %r: trying it again after the preceding step", len(rows), error)
        release_tensors(error)
        self.finish_step()
        live = [row for row in rows if not _is_over(row[1])]
        draws = in_halves(live, begin, lambda row: row[1].request, self._fail_alone) if live else []
        self._finish(Flight(work, draws or [([], begin([]))], masks is not None, scores))
        return None

    def _begin_scores(self, work: list[Work], logits: Tensor) -> list[ChunkScores]:
        """Start to score the prompts of a step; if that raises, do it again after the preceding step."""
        errors: list[Exception] = []
        scores = begin_chunk_scores(work, logits, lambda request, error: errors.append(error))
        if not errors:
            return scores
        _log.warning(
            "scoring a step of %d parts raised %r: trying it again after the preceding step", len(work), errors[0]
        )
        for error in errors:
            release_tensors(error)
        self.finish_step()
        return begin_chunk_scores(work, logits, self._fail_alone)

    # ---- finish

    def _finish(self, flight: Flight) -> None:
        """Publish the chunks of a step, accept its tokens, and close the streams that ended."""
        try:
            results = [(rows, pending.result()) for rows, pending in flight.draws]
            for each, is_finite in zip(flight.work, flight.draws[0][1].finite(), strict=True):
                try:
                    self._publish_chunk(each, is_finite)
                except Exception as error:
                    self._fail_alone(each.stream.request, error)
            self._take_scores(flight.scores)
            for rows, sampled in results:
                self._accept(*_without_ended(rows, sampled), constrained=flight.constrained)
                for (_, stream), token in zip(rows, sampled.tokens, strict=True):
                    if not _is_over(stream) and stream.sequence.has_unknown:
                        stream.sequence.resolve(token)
            self._end_step(flight.work)
        except Exception as error:
            self._fail(flight.work, error)

    def _publish_chunk(self, work: Work, is_finite: bool) -> None:
        """Count and publish a chunk of a finished step, which was committed when it was launched."""
        stream, count = work.stream, len(work.tokens)
        if _is_over(stream) or not is_finite:
            self.counters.wasted_tokens += count
        if not _is_over(stream):
            stream.in_flight -= count
            if self._count_chunk(work, is_finite):
                stream.sequence.publish(work.end)

    def _publish_rest(self, stream: Stream) -> None:
        """Drop the tokens of a step in flight, and publish the rest, unless a plan is pending."""
        if stream.active and not stream.sequence.has_plan:
            first = stream.request.streams[0]  # computes the prompt for all; forks hold its tokens in flight, too
            done = first.computed_length >= len(stream.request.prompt)
            stream.sequence.truncate(stream.computed_length if done else first.computed_length)
            stream.in_flight = 0
            super()._publish_rest(stream)


def _is_over(stream: Stream) -> bool:
    """Return whether a stream has ended, so that late results of it are ignored."""
    return stream.finish_reason is not None or stream.request.channel.ended


def _without_ended(rows: list[Row], sampled: Sampled) -> tuple[list[Row], Sampled]:
    """Return the rows of streams that have not ended, with their tokens."""
    kept = [index for index, (_, stream) in enumerate(rows) if not _is_over(stream)]
    if len(kept) == len(rows):
        return rows, sampled
    logprobs = None if sampled.logprobs is None else [sampled.logprobs[index] for index in kept]
    candidates = None if sampled.candidates is None else [sampled.candidates[index] for index in kept]
    broken = frozenset(place for place, index in enumerate(kept) if index in sampled.broken)
    tokens = [sampled.tokens[index] for index in kept]
    return [rows[index] for index in kept], Sampled(tokens, logprobs, broken, candidates)
