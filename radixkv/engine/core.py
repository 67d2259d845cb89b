"""Run the engine's steps: schedule, transfer, forward, sample, commit.

Only the engine's thread calls a core. An exception inside a step ends the requests that caused it, and no other if that
can be found out. Only KV of forwards that returned finite logits is published.

At depth 0 a step is finished before the next one is scheduled. At depth 1 steps overlap: while the device computes one
step, the host schedules and launches the next one. The host takes the results of a step only after it has launched the
next one, so the device always has work. The tokens that the step in flight samples are not known on the host then. The
next step reads them on the device (SGLang's overlap scheduler and TensorRT-LLM do the same), and the cache has
placeholders for them, which nothing can match. No larger depth is possible: a sequence has one unknown token.

- At depth 1, and where drafts are verified, KV is committed when its step is launched, and published when the results
  show that its logits are finite.
  Every later launch comes after it in the device's stream, so blocks can be reused as soon as the cache frees them.
- A stream ends one step after its last row was launched. The row in between is wasted: the cache drops its token, and
  its result is ignored. `max_tokens` is known in advance and wastes nothing. With recurrent state the cache keeps the
  token, since the state cannot go back: the stream is closed one step later.
- A host-bound row must be read by the host before its stream can continue: a grammar or a bad word decides the mask of
  the next token, and a beam search decides which beams go on. Such a stream samples in every other step at most; all
  others overlap.
- `finish_step` takes the results of the step in flight without launching another one. It comes before a preemption,
  before an audit and before new weights. Cancelling needs no results, and drops them.
- If a launch raises, the step in flight is finished first. The launch is then tried again, if need be in halves. A step
  in several parts is finished at once.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.device import refuse_fatal
from radixkv.engine.draft_length import DraftLength, RowCosts
from radixkv.engine.drafts import source_of
from radixkv.engine.draws import Draws, LastRows, RowSource, TokenTimes, begin_chunk_scores, take_chunk_scores
from radixkv.engine.fault_isolation import OwnForwards, Parts, failure
from radixkv.engine.forward import BackgroundTask, Forward
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, TokenIds
from radixkv.engine.reuse_policy import NO_LOADS, reuse_policy
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.engine.speculation import MOST, Speculation
from radixkv.engine.stats import Counters
from radixkv.engine.steps import (
    AfterStep,
    ChunkCounts,
    Flight,
    Halves,
    OverlappedSteps,
    PublishAtOnce,
    Publishing,
    PublishLate,
    Steps,
)
from radixkv.engine.transfers import HostTransfer, Records, StateTransfer, Transfer, load_limits
from radixkv.errors import EngineError, RequestCancelled, RequestTimedOut
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.sampler import HostSampler, Sampler
from radixkv.sampling.token_mask import StepMasks

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Deadlines:
    """The requests that have one, in a heap; requests that ended are skipped, and dropped when the heap has doubled."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Request]] = []
        self._most = 4

    def add(self, request: Request, deadline: float) -> None:
        """Add a request. O(log deadlines), amortised."""
        if len(self.heap) >= self._most:
            self.heap = [each for each in self.heap if not each[2].channel.ended]
            heapq.heapify(self.heap)
            self._most = 2 * len(self.heap) + 4
        heapq.heappush(self.heap, (deadline, request.scheduling.number, request))

    def due_in(self) -> float:
        """Return the seconds until the first deadline."""
        return max(self.heap[0][0] - time.perf_counter(), 0.0)

    def overdue(self) -> Iterator[Request]:
        """Yield the requests whose deadline has passed, and forget these and the first ones that ended."""
        while self.heap and (self.heap[0][0] <= time.perf_counter() or self.heap[0][2].channel.ended):
            request = heapq.heappop(self.heap)[2]
            if not request.channel.ended:
                yield request


class Core:
    """Runs requests over one cache and one runner. At `depth` 1 a step is launched before the last one is finished."""

    def __init__(
        self,
        cache: PrefixCache,
        runner: Forward,
        config: EngineConfig,
        *,
        sampler: Sampler | None = None,
        depth: int = 0,
    ) -> None:
        """Own `cache` and `runner` from now on. `sampler` is by default one for logits in host memory.

        Measures the costs of loads if the cache has host blocks.
        """
        assert depth in (0, 1)
        self.cache, self.runner, self.config, self.depth = cache, runner, config, depth
        self.counters = counters = Counters()
        self.token_times, self.observers = TokenTimes(), list[EngineObserver]()
        self.background, self.end_queues = list[BackgroundTask](), list[SimpleQueue[Any]]()  # queues of ended requests
        self.step_seconds, self.step_tokens = 0.0, 0  # of all steps that ran something
        self.host_costs = runner.host_costs(config.prefill_chunk) if cache.host_blocks else None
        costs = self.host_costs
        loads = NO_LOADS if costs is None else load_limits(costs, config, cache.block_size)
        loads = loads._replace(whole=bool(cache.state_rows))
        self._reuse = reuse = reuse_policy(cache, config, row_dependent=runner.row_dependent, loads=loads)
        self.scheduler = Scheduler(cache, config, counters, reuse, self.observers)
        self.admission = self.scheduler.admission
        self.records = Records()  # of a disk
        self.refusal: EngineError | None = None  # ends each request, after a failed reload of the weights
        self.deadlines = Deadlines()
        self._steps: Steps | OverlappedSteps = OverlappedSteps() if depth else Steps()
        counts, fail = ChunkCounts(counters, reuse), self._fail_alone
        if depth or config.speculate is not None:
            closing = self.scheduler.closing
            self._publishing: Publishing = PublishLate(counts, reuse, counters, closing, cache.state_rows, fail)
            self._parts: Parts = AfterStep(self.finish_step, fail)
        else:
            self._publishing, self._parts = PublishAtOnce(counts, reuse, fail), Halves(fail)
        self._transfers = list[Transfer]()
        self._forwards: Parts | OwnForwards = self._parts
        if cache.state_rows:
            assert runner.states is not None
            self._transfers.append(StateTransfer(cache.copies, runner.states))
            self._forwards = OwnForwards(self._preempt, fail, overlaps=depth > 0)
        self.host: HostTransfer | None = None
        if cache.host_blocks:
            assert runner.host is not None
            self.host = HostTransfer(cache, runner.host, reuse, counters, self._preempt, fail)
            self._transfers.append(self.host)
        self.speculation = None if config.speculate is None else self._speculation(config.speculate, counts)
        self._rows: RowSource = self.speculation or LastRows()
        self._draws = Draws(sampler or HostSampler(), self._rows, config, counters, self.token_times, self._parts, fail)

    def _speculation(self, mode: str, counts: ChunkCounts) -> Speculation:
        """Return the verification of drafts, which is the last stage before a forward."""
        length = DraftLength(RowCosts(self.runner.row_costs()), MOST, corrects=not self.depth)
        # Where steps overlap, the next one is planned before drafts have given back their blocks.
        spare = self.depth * (self.config.max_sequences + self.config.max_batch_tokens // self.cache.block_size)
        made = Speculation(
            source_of(mode, self.cache),
            length,
            self.config,
            self.counters,
            counts.count,
            self._fail_alone,
            # Graphs of a GPU have no more rows of logits.
            most_rows=self.config.max_sequences if self.depth else max(self.config.max_sequences, MOST + 1),
            spare_blocks=spare,
        )
        self._transfers.append(made)
        return made

    @property
    def flight(self) -> Flight | None:
        """The step that was launched and is not finished."""
        return self._steps.flight

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def token_costs(self) -> dict[str, float]:
        """Return the measured seconds of a token's load and of its prefill, by name; {} without a host tier."""
        return {} if self.host_costs is None else self.host_costs._asdict()

    def idle_for(self) -> float | None:
        """Return the seconds for which a step would have nothing to do: 0.0 for none, None until the next call.

        While there are requests, only paused and held ones and deadlines let the engine rest. A step in flight is due
        at once.
        """
        if self._steps.flight is not None:
            return 0.0
        if any(not each.channel.paused for each in chain(self.scheduler.running, self.scheduler.waiting.unheld())):
            return 0.0
        waits = [task.due_in(busy=self.busy) for task in self.background]
        if self.deadlines.heap and self.busy:
            waits.append(self.deadlines.due_in())
        return min((wait for wait in waits if wait is not None), default=None)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool: see `Admission.check_fits`."""
        self.scheduler.add(request)
        for observer in self.observers:
            observer.added(request)
        if request.deadline is not None:
            self.deadlines.add(request, request.deadline)
        if self.refusal is not None:
            self.end(request, self.refusal)

    def refuse(self, error: EngineError) -> None:
        """End all waiting requests, and each one that is added, because the model has no weights."""
        self.refusal = error
        for request in list(self.scheduler.waiting):
            self.end(request, error)

    def cancel(self, request: Request, error: EngineError | None = None) -> None:
        """End a request that has not ended; its computed tokens stay cached. Between two steps only.

        `error` is the reason for the request's caller.
        """
        if not request.channel.ended:
            for stream in request.streams:
                self._publishing.publish_rest(stream)
        self.end(request, error or RequestCancelled("the request was cancelled"))

    def disable_backpressure(self) -> None:
        """Pause no request from now on: a draining engine would wait for readers that have left."""
        for request in chain(self.scheduler.running, self.scheduler.waiting):
            request.channel.disable_backpressure()

    def close(self, error: EngineError) -> None:
        """Finish the step in flight, end every request, and release the pool and the cache.

        No other method may be called afterwards.
        """
        try:
            self.finish_step()
        except Exception:
            _log.exception("the last step could not be finished")
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            try:
                self.end(request, error)
            except Exception:
                _log.exception("what a request held could not be freed")
        for task in self.background:
            task.close()
        self.scheduler.close()
        self._reuse.close()
        self._transfers.clear()
        del self.runner, self.cache, self.host

    def forget(self, error: EngineError) -> None:
        """Drop all cached KV, pinned or not, because the model computes another; between two steps only.

        Ends the requests that have begun with `error`. Waiting requests that have computed nothing stay.
        """
        self.finish_step()
        begun = [each for each in self.scheduler.waiting if each.scheduling.admitted]
        for request in [*self.scheduler.running, *begun]:
            self.end(request, error)
        self.cache.clear(pins=True)
        self.forget_scores()

    def clear_cache(self) -> Future[None]:
        """Drop all cached KV that no request and no pin holds, all kept scores, and all records of cached text.

        The future ends when no record is left on a disk.
        """
        self.cache.clear()
        self.forget_scores()
        return self.records.clear()

    def clear_namespace(self, namespace: Hashable) -> None:
        """Drop the compressed prefixes of a namespace, its unused KV, and the kept scores of its prompts."""
        self.admission.unpin_compressed(namespace)
        self.cache.clear_namespace(namespace)
        self.records.clear_namespace(namespace)
        self._reuse.kept_scores.drop(namespace)
        self._reset_scores(each for each in self.scheduler.waiting if each.namespace == namespace)

    def forget_scores(self) -> None:
        """Drop all kept scores of prompts, and those that waiting requests took."""
        self._reuse.kept_scores.clear()
        self._reset_scores(self.scheduler.waiting)

    def _reset_scores(self, requests: Iterable[Request]) -> None:
        """Let requests that have not begun compute their scores again."""
        for request in requests:
            if not request.streams:
                request.scores.reset()

    def demote(self, tokens: TokenIds, keep: int, namespace: Hashable) -> None:
        """Put the cached tokens of a text from position `keep` on at the cold end, unless other texts share them."""
        match = self.cache.match(tokens, namespace)
        cached = match.matched + match.host  # a reply's last token never is
        self.cache.demote(tokens[:cached], namespace, start=keep)

    # ---- one step

    def step(self) -> None:
        """Run one step: "The life of a request" in CONTRIBUTING.md has a sentence for each call.

        At depth 1 it is launched, and the preceding step is finished. Raises DeviceLost if the device computes nothing
        more, and no other error.
        """
        begun = time.perf_counter()
        work: list[Work] = []
        launched: list[Flight] = []
        try:
            if self.deadlines.heap:
                self._end_overdue()
            work = self._schedule()
            computed = self._transfer(work)
            masks = self._draws.masks(computed)
            for part, logits in self._forwards.run(computed, self._forward) if computed else ():
                self._commit(part, logits)
                launched.append(self._sample(part, logits, masks))
        except Exception as error:
            refuse_fatal(error)
            launched.clear()
            self.finish_step()
            self._fail(work, error)
        for flight in self._steps.push(launched):
            self._finish(flight)
        if work:
            self.step_seconds += time.perf_counter() - begun
            self.step_tokens += sum(len(each.tokens) for each in work if each.sources is None)
        if self.background:
            self._run_background()

    def finish_step(self) -> bool:
        """Take the results of the step in flight; returns whether there was one."""
        flights = self._steps.push([])
        for flight in flights:
            self._finish(flight)
        return bool(flights)

    def _schedule(self) -> list[Work]:
        """Admit requests and plan their tokens; finish the step in flight first if the plan cannot do without it."""
        plan = self.scheduler.schedule(overlaps=self._steps.flight is not None)
        while True:
            for request, error in plan.refused:
                self.end(request, error)
            if not plan.needs_results:
                return plan.work
            self.finish_step()
            plan = self.scheduler.go_on()

    def _transfer(self, work: list[Work]) -> list[Work]:
        """Copy recurrent states, offload and load KV, and draft tokens; returns the work that is left to compute."""
        if work:
            self.counters.steps += 1
            for transfer in self._transfers:
                work = transfer.launch(work)
        return work

    def _forward(self, work: list[Work]) -> Tensor:
        """Launch the forward; tokens that the step in flight samples stay on the device."""
        flight, relayed = self._steps.flight, [each for each in work if each.relayed]
        copies = list(chain.from_iterable(each.plan.copies for each in work))
        if flight is not None and relayed:
            ((rows, pending),) = flight.draws
            places = {stream: place for place, (_, stream, *_) in enumerate(rows)}
            chunks = [sequence_input(each, places[each.stream] if each.relayed else -1) for each in work]
            return self.runner.run(chunks, copies, pending.tokens)
        for each in relayed:  # the step that sampled them has finished
            each.tokens[0] = each.stream.tokens[each.start]
        return self.runner.run([sequence_input(each) for each in work], copies)

    def _commit(self, work: list[Work], logits: Tensor) -> None:
        """Make computed tokens matchable, now or once they are known to be finite."""
        if len(logits) != (wanted := sum(each.rows for each in work)):
            raise ValueError(f"a forward of {len(work)} chunks returned {len(logits)} rows of logits, not {wanted}")
        self._publishing.commit(work, logits)

    def _sample(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> Flight:
        """Start to score the prompts of the step and to draw the next tokens."""
        scores = begin_chunk_scores(work, logits, self._parts)
        return Flight(work, self._draws.begin(work, logits, masks), scores)

    def _finish(self, flight: Flight) -> None:
        """Accept the tokens of a step, and close the streams that ended."""
        ended = self.scheduler.closing[:]
        try:
            results = [(rows, pending.result()) for rows, pending in flight.draws]
            self._publishing.publish(flight, results)
            if flight.scores:
                kept = self._reuse.kept_scores
                self.counters.scored_tokens += take_chunk_scores(flight.scores, kept, self._fail_alone)
            for rows, sampled in results:
                self._draws.accept(rows, sampled)
            self._rows.verify(flight.work)
            requests = {each.stream.request: None for each in flight.work}
            for request in requests:
                try:
                    self._close_finished(request)
                except Exception as error:
                    self._fail_alone(request, error)
            for request in requests:  # last, so that all readers of this step are woken together
                if not request.channel.ended:  # the end has woken the readers
                    request.channel.notify()
        except Exception as error:
            self._fail(flight.work, error)
        for stream in ended:
            self.scheduler.closing.remove(stream)
            self._publishing.publish_rest(stream)
            stream.close()

    def _run_background(self) -> None:
        """Run the tasks that are due, after the step in flight: they may use the model, or end requests."""
        for task in self.background:
            if task.due_in(busy=self.busy) == 0:
                self.finish_step()
                task.step(busy=self.busy)

    # ---- end a request

    def _close_finished(self, request: Request) -> None:
        """Close the streams that ended, and the request with its last one."""
        if request.channel.ended:
            return
        for chunk in request.replies.advance(request, self._publishing.publish_rest):
            self.counters.output_tokens += 1
            request.channel.put(chunk)
        if not request.max_tokens and request.streams[0].computed_length >= len(request.prompt):
            request.streams[0].finish_reason = "length"  # only the prompt was asked for
        finished = [stream for stream in request.streams if stream.finish_reason is not None]
        for stream in finished:
            self._publishing.close(stream)
        if len(finished) == request.replies.width:
            self.scheduler.remove(request)
            request.channel.finish(request.replies.completion(request))
            self.counters.finished += 1
            self._announce_end(request, None)

    def _announce_end(self, request: Request, error: Exception | None) -> None:
        for observer in self.observers:
            observer.ended(request, error)
        for queue in self.end_queues:
            queue.put(request)

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
            self._announce_end(request, error)

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed."""
        for request in self.deadlines.overdue():
            waited = time.perf_counter() - request.reported.submitted
            self.cancel(request, RequestTimedOut(f"the request did not finish in time: {waited:.3g} s have passed"))

    def _preempt(self, request: Request) -> None:
        """Preempt a request, unless it ends with the step in flight."""
        self.finish_step()
        self.scheduler.preempt(request)

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """End the one request that raised."""
        _log.error("a request failed", exc_info=error)
        self.end(request, failure(error))

    def _fail(self, work: list[Work], error: Exception) -> None:
        """End the requests of a step that raised, except those whose loads are done.

        Ends all running ones if it raised before all chunks were planned.
        """
        _log.exception("a step of %d chunks failed", len(work))
        # At least one request, so that the same step does not raise for ever.
        running = self.scheduler.running or list(self.scheduler.waiting)[:1]
        failed = [each for each in work if each.sources is None or _is_pending(each)] or work
        for request in [each.stream.request for each in failed] or list(running):
            self.end(request, failure(error))


def _is_pending(work: Work) -> bool:
    return work.stream.active and work.stream.sequence.has_plan


def sequence_input(work: Work, sampled_row: int = -1) -> SequenceInput:
    """Return the input of a forward that computes a chunk; see SequenceInput for `sampled_row`."""
    return SequenceInput(
        np.frombuffer(work.tokens if work.draft is None else work.tokens + work.draft, np.int32),
        work.start,
        work.plan.slots,
        work.stream.sequence.block_table,
        work.isolated,
        work.plan.state,
        sampled_row,
        work.rows,
        work.stream.request.parts.offset,
    )
