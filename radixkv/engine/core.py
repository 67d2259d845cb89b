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
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.cache.types import Load
from radixkv.config import EngineConfig
from radixkv.device import refuse_fatal
from radixkv.engine.draft_length import DraftLength, RowCosts
from radixkv.engine.drafts import source_of
from radixkv.engine.draws import (
    ChunkScores,
    Draws,
    LastRows,
    Row,
    TokenTimes,
    begin_chunk_scores,
    take_chunk_scores,
)
from radixkv.engine.fault_isolation import OwnForwards, failure, in_halves, is_over
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.reuse_policy import NO_LOADS, reuse_policy
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.engine.speculation import MOST, Speculation
from radixkv.engine.stats import Counters
from radixkv.engine.transfers import (
    HostMemory,
    HostTransfer,
    Records,
    StateMemory,
    StateTransfer,
    Transfer,
    load_limits,
)
from radixkv.errors import EngineError, InvalidInput, RequestCancelled, RequestTimedOut
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.sampler import HostSampler, Pending, Sampler, finite_rows
from radixkv.sampling.token_mask import StepMasks

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.attention.host_store import HostCosts
    from radixkv.models.compression import Compression
    from radixkv.models.kv_recompute import Recheck

_log = logging.getLogger(__name__)


class Forward(Protocol):
    """Computes a step; `radixkv.models.runner.Runner` does."""

    @property
    def row_dependent(self) -> bool:
        """Whether a row's bits depend on the other rows of its forward, later ones included."""
        ...

    @property
    def host(self) -> HostMemory | None:
        """The host memory of a cache with host blocks."""
        ...

    @property
    def states(self) -> StateMemory | None:
        """The slots of a cache with rows of recurrent state."""
        ...

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Tensor | None = None
    ) -> Tensor:
        """Run all copies, then all chunks; returns logits [len(chunks) + additional rows, vocab].

        Row i is the last token of chunk i. The additional rows follow: of each chunk in turn, its last `logit_rows`
        tokens without the last one. `sampled` int64 [rows] on the device has the tokens of chunks with a `sampled_row`;
        it is passed at depth 1 only, where this may return before the device has computed.
        """
        ...

    @property
    def recheck_tokens(self) -> int:
        """The most tokens that `recheck` computes; 0 if it cannot. If `row_dependent`, it computes no fewer."""
        ...

    @property
    def recheck_obstacle(self) -> str | None:
        """Why cached KV cannot be recomputed and compared; None if it can."""
        ...

    def recheck(self, tokens: TokenIds, start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute [start, len(tokens)) again and compare; `start` is a multiple of `recheck_tokens`."""
        ...

    @property
    def compression_obstacle(self) -> str | None:
        """Why no prefix can be compressed; None if it can."""
        ...

    def compression(self, tokens: TokenIds, method: str) -> Compression:
        """Begin to compress a cached prefix by a method; see `radixkv.models.compression`."""
        ...

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Measure the seconds of forwards of 1 to 16 rows, some of these numbers, before anything is cached."""
        ...

    def host_costs(self, chunk: int) -> HostCosts:
        """Measure the seconds of a token's load and of its prefill, before anything is cached. Needs `host`."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of the image of a block, as `read_images` returns it."""
        ...

    def read_images(self, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Copy up to STAGED blocks with `tokens` tokens: [blocks, image_bytes]; slots without a token are zero."""
        ...

    def load_images(self, load: Load, images: NDArray[np.uint8]) -> None:
        """Run the copies of a plan, then copy tokens of up to STAGED images to its slots.

        `load.sources` counts in slots of `images`: image * block_size + offset.
        """
        ...

    def stats(self) -> dict[str, int]:
        """Return counters of recurrent states and of steps without CUDA graphs, as in EngineStats."""
        ...


class BackgroundTask(Protocol):
    """Work that is done in pieces, one after each step; `audit.Auditor` is one."""

    def due_in(self, *, busy: bool) -> float | None:
        """Return the seconds until a piece is due; None for never. `busy` says whether there are requests."""
        ...

    def step(self, *, busy: bool) -> None:
        """Do one piece if it is due. Raises nothing but DeviceLost."""
        ...

    def close(self) -> None:
        """End, because the engine was closed."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was launched, or a part of one, and its draws: one for all rows, or several after one that raised."""

    work: list[Work]
    draws: list[tuple[list[Row], Pending]]
    scores: list[ChunkScores]


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
        self.cache = cache
        self.runner = runner
        self.config = config
        self.depth = depth
        self.counters = Counters()
        self.token_times, self.observers = TokenTimes(), list[EngineObserver]()
        self.background, self.end_queues = list[BackgroundTask](), list[SimpleQueue[Any]]()  # queues of ended requests
        self.step_seconds, self.step_tokens = 0.0, 0  # of all steps that ran something
        self.host_costs = runner.host_costs(config.prefill_chunk) if cache.host_blocks else None
        costs = self.host_costs
        loads = NO_LOADS if costs is None else load_limits(costs, config, cache.block_size)
        loads = loads._replace(whole=bool(cache.state_rows))
        self._reuse = reuse_policy(cache, config, row_dependent=runner.row_dependent, loads=loads)
        self.refusal: EngineError | None = None  # ends each request, after a failed reload of the weights
        self.flight: Flight | None = None  # the step that was launched and is not finished
        late = self._publishes_late = depth > 0 or config.speculate is not None
        self._finish_first = self.finish_step if late else None  # before a launch that raised is tried again
        self._publish_rest = self._publish_finished if late else self._reuse.publish_rest  # when a stream ends
        self.scheduler = Scheduler(cache, config, self.counters, self._reuse, self.observers, self)
        self.admission = self.scheduler.admission
        self.host = self._host_transfer()
        self._transfers: list[Transfer] = [each for each in (self._state_transfer(), self.host) if each is not None]
        self.records = Records()  # of a disk
        self._own_forwards = OwnForwards(self._preempt, overlaps=depth > 0) if cache.state_rows else None
        self.speculation = None if config.speculate is None else self._speculation(config.speculate)
        self._draws = self._new_draws(sampler or HostSampler())
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; requests that ended are skipped

    def _host_transfer(self) -> HostTransfer | None:
        if not self.cache.host_blocks:
            return None
        assert self.runner.host is not None
        calls = self._preempt, self._fail_alone
        return HostTransfer(self.cache, self.runner.host, self._reuse, self.counters, *calls)

    def _state_transfer(self) -> StateTransfer | None:
        if not self.cache.state_rows:
            return None
        assert self.runner.states is not None
        return StateTransfer(self.cache.copies, self.runner.states)

    def _new_draws(self, sampler: Sampler) -> Draws:
        self._verify = [] if self.speculation is None else [self.speculation.verify]
        source, counters = self.speculation or LastRows(), self.counters
        return Draws(sampler, source, self.config, counters, self.token_times, self._fail_alone)

    def _speculation(self, mode: str) -> Speculation:
        """Return the verification of drafts, which is the last stage before a forward."""
        length = DraftLength(RowCosts(self.runner.row_costs()), MOST, corrects=not self.depth)
        # Where steps overlap, the next one is planned before drafts have given back their blocks.
        spare = self.depth * (self.config.max_sequences + self.config.max_batch_tokens // self.cache.block_size)
        made = Speculation(
            source_of(mode, self.cache),
            length,
            self.config,
            self.counters,
            self._count_chunk,
            self._fail_alone,
            # Graphs of a GPU have no more rows of logits.
            most_rows=self.config.max_sequences if self.depth else max(self.config.max_sequences, MOST + 1),
            spare_blocks=spare,
        )
        self._transfers.append(made)
        return made

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
        if self.flight is not None:
            return 0.0
        if any(not each.channel.paused for each in chain(self.scheduler.running, self.scheduler.waiting.unheld())):
            return 0.0
        waits = [task.due_in(busy=self.busy) for task in self.background]
        if self._deadlines and self.busy:
            waits.append(max(self._deadlines[0][0] - time.perf_counter(), 0.0))
        return min((wait for wait in waits if wait is not None), default=None)

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool: see `Admission.check_fits`."""
        self.scheduler.add(request)
        for observer in self.observers:
            observer.added(request)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * (len(self.scheduler.running) + len(self.scheduler.waiting)):
                self._deadlines = [each for each in self._deadlines if not each[2].channel.ended]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.scheduling.number, request))
        if self.refusal is not None:
            self.end(request, self.refusal)

    def refuse(self, error: EngineError) -> None:
        """End all waiting requests, and each one that is added, because the model has no weights."""
        self.refusal = error
        for request in list(self.scheduler.waiting):
            self.end(request, error)

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
        """Launch a step: schedule, transfer, forward, sample. Then finish the preceding one, at depth 0 this one.

        Raises DeviceLost if the device computes nothing more, and no other error.
        """
        begun = time.perf_counter()
        work: list[Work] = []
        launched: list[Flight] = []
        try:
            if self._deadlines:
                self._end_overdue()
            work = self.scheduler.schedule()
            if work:
                launched = self._launch(work)
        except Exception as error:
            refuse_fatal(error)
            self.finish_step()
            self._fail(work, error)
        if self.flight is not None:
            self.finish_step()
        if self.depth and len(launched) == 1 and len(launched[0].draws) == 1:
            self.flight = launched[0]
        else:
            for each in launched:
                self._finish(each)
        if work:
            self.step_seconds += time.perf_counter() - begun
            self.step_tokens += sum(len(each.tokens) for each in work if each.sources is None)
        if self.background:
            self._run_background()

    def finish_step(self) -> bool:
        """Take the results of the step in flight; returns whether there was one."""
        flight, self.flight = self.flight, None
        if flight is None:
            return False
        self._finish(flight)
        return True

    def _run_background(self) -> None:
        """Run the tasks that are due, after the step in flight: they may use the model, or end requests."""
        for task in self.background:
            if task.due_in(busy=self.busy) == 0:
                self.finish_step()
                task.step(busy=self.busy)

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and (self._deadlines[0][0] <= time.perf_counter() or self._deadlines[0][2].channel.ended):
            request = heapq.heappop(self._deadlines)[2]
            if not request.channel.ended:
                waited = time.perf_counter() - request.submitted
                self._publish_all(request)
                self.end(request, RequestTimedOut(f"the request did not finish in time: {waited:.3g} s have passed"))

    # ---- launch

    def _launch(self, work: list[Work]) -> list[Flight]:
        """Run the transfers of a step, launch its forward and its draws; in several parts only if a forward raised."""
        self.counters.steps += 1
        for transfer in self._transfers:
            work = transfer.launch(work)
        if not work:
            return []
        masks = self._draws.masks(work)
        if self._own_forwards is not None:
            parts = self._own_forwards.run(work, self._forward, self._fail_alone)
        else:
            try:
                parts = [(work, self._forward(work))]
            except Exception as error:
                parts = in_halves(error, work, self._forward, _stream_of, self._fail_alone, self._finish_first)
        return [self._begin(part, logits, masks) for part, logits in parts]

    def _forward(self, work: list[Work]) -> Tensor:
        """Launch the forward; tokens that the step in flight samples stay on the device."""
        flight, relayed = self.flight, [each for each in work if each.relayed]
        copies = list(chain.from_iterable(each.plan.copies for each in work))
        if flight is not None and relayed:
            ((rows, pending),) = flight.draws
            places = {stream: place for place, (_, stream, *_) in enumerate(rows)}
            chunks = [sequence_input(each, places[each.stream] if each.relayed else -1) for each in work]
            return self.runner.run(chunks, copies, pending.tokens)
        for each in relayed:  # the step that sampled them has finished
            each.tokens[0] = each.stream.tokens[each.start]
        return self.runner.run([sequence_input(each) for each in work], copies)

    def _begin(self, work: list[Work], logits: Tensor, masks: StepMasks | None) -> Flight:
        """Commit computed chunks, and start to sample the next tokens."""
        wanted = sum(each.rows for each in work)
        if len(logits) != wanted:
            raise ValueError(f"a forward of {len(work)} chunks returned {len(logits)} rows of logits, not {wanted}")
        if self._publishes_late:
            self._commit_launched(work)
        else:
            self._commit(work, finite_rows(logits[: len(work)]))
        scores = begin_chunk_scores(work, logits, self._fail_alone, self._finish_first)
        if masks is not None:
            self._draws.wait(masks)
        return Flight(work, self._draws.begin(work, logits, masks, self._finish_first), scores)

    def _commit(self, work: list[Work], finite: list[bool]) -> None:
        """Publish the computed chunks of a step at depth 0: one commit costs half as much as commit and publish."""
        for each, is_finite in zip(work, finite, strict=True):
            request = each.stream.request
            try:
                if not request.channel.ended:  # another stream of it failed
                    each.stream.sequence.commit(self._count_chunk(each, is_finite))
            except Exception as error:
                self._fail_alone(request, error)

    def _commit_launched(self, work: list[Work]) -> None:
        """Commit chunks that the device will compute, and publish none of them yet."""
        for each in work:
            if each.stream.active:  # another stream of its request may have failed
                each.stream.sequence.commit(publish=False)
                each.stream.in_flight += len(each.tokens)

    # ---- finish

    def _finish(self, flight: Flight) -> None:
        """Accept the tokens of a step, and close the streams that ended; at depth 1, publish its chunks first."""
        ended = self.scheduler.closing[:]
        try:
            results = [(rows, pending.result()) for rows, pending in flight.draws]
            if self._publishes_late:
                self._publish(flight)
            if flight.scores:
                kept = self._reuse.kept_scores
                self.counters.scored_tokens += take_chunk_scores(flight.scores, kept, self._fail_alone)
            for rows, sampled in results:
                self._draws.accept(rows, sampled)
                if self.depth:
                    _resolve(rows, sampled.tokens)
            for verify in self._verify:
                verify(flight.work)
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
            self._publish_rest(stream)
            stream.close()

    def _publish(self, flight: Flight) -> None:
        """Count and publish the chunks of a step, which were committed when it was launched."""
        finite = flight.draws[0][1].finite()  # additional rows follow the last rows of the chunks
        for each, is_finite in zip(flight.work, finite, strict=False):
            stream, count = each.stream, len(each.tokens)
            try:
                if is_over(stream) or not is_finite:
                    self.counters.wasted_tokens += count
                if not is_over(stream):
                    stream.in_flight -= count
                    if self._count_chunk(each, is_finite):
                        stream.sequence.publish(each.end)
                elif is_finite and stream in self.scheduler.closing:
                    stream.in_flight -= count
            except Exception as error:
                self._fail_alone(stream.request, error)

    def _count_chunk(self, work: Work, is_finite: bool) -> bool:
        """Count a computed chunk; return whether to publish it now. Raises InvalidInput if it computed NaN."""
        if not is_finite:
            raise InvalidInput("the model's logits have no finite maximum: it computed NaN or infinity")
        counters, stream, count = self.counters, work.stream, len(work.tokens)
        new, hits = stream.counts.count_computed(work.start, count)
        counters.computed_tokens += new
        counters.recomputed_tokens += count - new
        counters.cached_tokens += hits
        request, prompt_tokens = stream.request, len(stream.request.prompt)
        decoded = new if work.start >= prompt_tokens else min(new, max(work.start + count - prompt_tokens, 0))
        counters.decode_tokens += decoded
        prompts = not request.scheduling.counted
        if prompts:
            request.scheduling.counted = True
            counters.prompt_tokens += prompt_tokens
        if new > decoded:
            miss, counted = request.scheduling.miss, vars(counters)
            reason = "full" if miss is None else miss.reason
            counted[f"lookups_{reason}"] += prompts
            counted[f"missed_{reason}"] += new - decoded
        return self._reuse.publishes(stream, work.start, count, isolated=work.isolated)

    def _close_finished(self, request: Request) -> None:
        """Close the streams that ended, and the request with its last one."""
        if request.channel.ended:
            return
        for chunk in request.replies.advance(request, self._publish_rest):
            self.counters.output_tokens += 1
            request.channel.put(chunk)
        if not request.max_tokens and request.streams[0].computed_length >= len(request.prompt):
            request.streams[0].finish_reason = "length"  # only the prompt was asked for
        finished = [stream for stream in request.streams if stream.finish_reason is not None]
        for stream in finished:
            if stream.in_flight and self.cache.state_rows:
                self._close_late(stream)
            else:
                self._publish_rest(stream)
                stream.close()
        if len(finished) == request.replies.width:
            self.scheduler.remove(request)
            request.channel.finish(request.replies.completion(request))
            self.counters.finished += 1
            for observer in self.observers:
                observer.ended(request, None)
            for queue in self.end_queues:
                queue.put(request)

    def _close_late(self, stream: Stream) -> None:
        """Close a stream that has ended after the step in flight.

        Its row of recurrent state has passed the last token, so the state and the KV after that token are kept.
        Templates repeat the token in the next turn of a conversation.
        """
        if stream.active and stream not in self.scheduler.closing:
            stream.times.finished = time.perf_counter()
            self.scheduler.closing.append(stream)

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
            for queue in self.end_queues:
                queue.put(request)

    def _preempt(self, request: Request) -> None:
        self.scheduler.preempt(request)

    def _publish_all(self, request: Request) -> None:
        for stream in request.streams:
            self._publish_rest(stream)

    def _publish_finished(self, stream: Stream) -> None:
        """Drop the tokens of a step in flight, and publish the rest, unless a plan is pending: at depth 1."""
        if stream.active and not stream.sequence.has_plan:
            first = stream.request.streams[0]  # computes the prompt for all; forks hold its tokens in flight, too
            done = first.computed_length >= len(stream.request.prompt)
            length = stream.computed_length if done else first.computed_length
            if not self.cache.state_rows:  # a row of recurrent state would go back to a snapshot
                stream.sequence.truncate(length)
                stream.in_flight = 0
            self._reuse.publish_rest(stream, length)

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


_stream_of = attrgetter("stream")


def _is_pending(work: Work) -> bool:
    return work.stream.active and work.stream.sequence.has_plan


def _resolve(rows: list[Row], tokens: list[int]) -> None:
    """Set the tokens that the streams of these rows have as placeholders in the step after."""
    for (_, stream, *_), token in zip(rows, tokens, strict=True):
        if stream.active and stream.sequence.has_unknown:
            stream.sequence.resolve(token)


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
