"""Plan the tokens that the next step computes: decodes first, then chunks of prompts, then newly admitted requests.

A step has a budget of tokens. Every active stream that has its whole prompt decodes one token (iteration-level
batching: Orca, OSDI 2022). The rest goes to chunks of prompts (Sarathi-Serve, OSDI 2024). So a long prompt lengthens a
step by a chunk, and never stalls the other streams. Budget that is left then admits waiting requests.

A stream whose next tokens are host-resident plans a load in place of a chunk, if loading takes less time than
computing. Loads take no part of a step's token budget. In one step, all of them together take about as long as one
chunk of a prompt. Each loads at least two blocks.

Waiting requests hold no blocks. When blocks run out, a running request is preempted (PagedAttention, SOSP 2023). Its
sequences are closed, and its published prefix stays in the tree until it is evicted. The request waits again, ahead of
the requests that came later. `admission` says which request fits and which one is preempted, `wait_queue` which one is
first and which one waits for a shared prefix.
"""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Explanation, Match, PrefixCache, Sequence, WritePlan
from radixkv.cache.types import Purpose
from radixkv.config import EngineConfig
from radixkv.engine.admission import Admission
from radixkv.engine.fault_isolation import failure
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.stats import Counters
from radixkv.engine.wait_queue import WaitQueue
from radixkv.errors import OutOfBlocks, PrefixGone

_log = logging.getLogger(__name__)
_MAX_DELAYED = 64  # requests that one admission may delay, each compared with the running prompts


@dataclass(slots=True, eq=False)
class Work:
    """The tokens that one stream computes or loads in this step: `tokens` from position `start` on, for the `plan`.

    An `isolated` chunk has a forward of its own. The logits of its last `rows` tokens are needed. A load has `sources`
    in host memory, one for each slot of the plan. A `relayed` token is still being sampled: `tokens` has a placeholder
    until the preceding step has finished. The `draft` follows `tokens` in the plan and in the forward, and is verified.
    """

    stream: Stream
    start: int
    tokens: array[int]
    plan: WritePlan
    isolated: bool = False
    rows: int = 1
    sources: NDArray[np.int64] | None = None
    relayed: bool = False
    draft: array[int] | None = None

    @property
    def end(self) -> int:
        """The position after the last token, without the draft."""
        return self.start + len(self.tokens)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the stream's last token, so that the next one is sampled from its logits."""
        return self.start + len(self.tokens) >= len(self.stream.tokens) and self.stream.request.max_tokens > 0


@dataclass(slots=True)
class Plan:
    """The work of the next step, and the requests that cannot be scheduled, with the error of each.

    A plan that `needs_results` stopped because blocks ran out: the step in flight may end requests that hold some. It
    goes on once that step is finished.
    """

    work: list[Work]
    refused: list[tuple[Request, Exception]]
    needs_results: bool = False


class _NeedsResults(Exception):  # it leaves a plan that is not complete: no error
    """The plan goes on once the step in flight is finished."""


class Scheduler:
    """The waiting and the running requests of one cache."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        counters: Counters,
        reuse: ReusePolicy,
        observers: list[EngineObserver],
    ) -> None:
        """Schedule onto `cache`."""
        self.waiting = WaitQueue(config, cache.block_size, reuse, counters)
        self.running: list[Request] = []  # by rank
        self.closing: list[Stream] = []  # that have ended, and are closed after the step in flight
        self.admission = Admission(cache, config, reuse, self.running, self.waiting, self.closing)
        self._cache, self._reuse = cache, reuse
        self._max_sequences, self._max_batch_tokens = config.max_sequences, config.max_batch_tokens
        self._counters, self._observers = counters, observers
        self._planned: dict[Stream, Work] = {}  # of the step that is being scheduled
        self._refused: list[tuple[Request, Exception]] = []
        self._overlaps = False  # whether a step is in flight
        self._budget = self._more_rows = 0  # tokens left to compute, and additional rows of logits
        self._load_room = 0  # tokens left to load
        self._arrivals = self._admissions = 0

    def close(self) -> None:
        """Release the cache; from now on only `admission.check_fits` may be called."""
        self.admission.close()
        del self._cache

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_fits`."""
        self._arrivals += 1
        request.scheduling.number = self._arrivals
        self.waiting.add(request)
        if self.running:  # else it is admitted at once
            self.waiting.announce()

    def remove(self, request: Request) -> None:
        """Take out a request, waiting or running, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.waiting.turns.leave(request.scheduling.queued.group)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.waiting.turns.leave(request.scheduling.queued.group)
        for stream in request.streams:
            if stream not in self.closing:
                if self._planned:
                    self._unplan(stream)
                stream.close()

    @property
    def head_waits_for(self) -> str | None:
        """Return why the first waiting request by priority and arrival is not admitted; None if none waits.

        "running streams", "blocks", "turn", "shared prefix", "disk", "slow reader", "longer hits" or "next step".
        """
        head = next(iter(self.waiting), None)
        if head is None or (reason := self.waiting.reason(head)) is not None:
            return None if head is None else reason
        if self.admission.streams() + head.streams_left > self._max_sequences:
            return "running streams"
        first = self.waiting.first(self.running)
        if first is not head:
            same = first is not None and first.scheduling.queued.group is head.scheduling.queued.group
            return "longer hits" if same else "turn"
        return "next step" if self.admission.fits(head, self._reuse.match(head)) else "blocks"

    # ---- schedule

    def schedule(self, *, overlaps: bool) -> Plan:
        """Plan the next step: at most max_batch_tokens tokens to compute, a chunk's time of loads, one part a stream.

        With `overlaps` a step is in flight. A request that raises is refused alone.
        """
        self._overlaps = overlaps
        self._planned, self._budget, self._more_rows = {}, self._max_batch_tokens, 0
        self._load_room = self._reuse.loads.most
        self.waiting.begin_step()
        return self._go_on()

    def go_on(self) -> Plan:
        """Go on with a plan that needed the results of the step in flight, which is finished now."""
        self._overlaps = False
        self._planned = {stream: work for stream, work in self._planned.items() if stream.active}
        return self._go_on()

    def _go_on(self) -> Plan:
        needs_results = False
        try:
            self._plan_running()
            while self._budget and (admitted := self._admit()) is not None:
                stream = admitted.live[0]
                self._plan(stream)
                if stream not in self._planned:
                    break  # it was preempted at once, or its chunk does not fit this step
        except _NeedsResults:
            needs_results = True
        if len(self.waiting):
            self.waiting.announce()
        plan = Plan(list(self._planned.values()), self._refused, needs_results)
        self._refused = []
        if not needs_results:
            self._planned = {}
        return plan

    def _plan_running(self) -> None:
        """Plan the active streams whose requests are not paused: first the ones that decode, then prefills."""
        for request in list(self.running):
            if request.scheduling.preemptions and request.suspended:
                try:
                    self._resume_branches(request)
                except Exception as error:
                    self._fail(request, error)
        decoding: list[Stream] = []
        prefilling: list[Stream] = []
        for request in self.running:
            for stream in () if request.channel.paused else request.live:
                if stream.active and stream not in self._planned:
                    (prefilling if stream.prefilling else decoding).append(stream)
        streams = decoding + prefilling
        for stream in streams:
            self._plan(stream)
        if self._load_room and not self._budget:
            for stream in streams:
                if stream not in self._planned and stream.active:
                    self._loads(stream)

    def _plan(self, stream: Stream) -> None:
        """Plan a stream's chunk, unless no budget is left or the stream's own request is preempted."""
        while self._budget and not stream.sequence.closed:
            try:
                if (work := self._next(stream)) is not None:
                    self._planned[stream] = work
                    self._budget -= len(work.tokens)
                    self._more_rows += work.rows - 1
                    stream.request.scheduling.queued.group.tokens += len(work.tokens)
                return
            except OutOfBlocks:
                self._free_blocks()
            except _NeedsResults:
                raise
            except Exception as error:
                self._fail(stream.request, error)

    def _next(self, stream: Stream) -> Work | None:
        """Plan a stream's next tokens; None if there are none to compute, or if they do not fit this step."""
        start = stream.sequence.length
        count = len(stream.tokens) - start
        if count <= 0:  # the step in flight samples the next token, perhaps after a draft
            return self._relay(stream, start)
        if count > 1:
            count = self._prefill_count(stream, count)
            if not count:
                return None
        tokens, isolated = stream.tokens[start : start + count], self._reuse.isolated(stream)
        plan = stream.sequence.extend(tokens)
        rows = stream.request.scores.rows(start, start + count) if count > 1 else 1
        return Work(stream, start, tokens, plan, isolated, rows)

    def _relay(self, stream: Stream, start: int) -> Work | None:
        """Plan the token that the step in flight samples; None if the host must read it first, or if it is the last."""
        if not self._overlaps:
            return None  # a beam waits for the others
        if stream.continuation.host_bound:
            self._counters.host_bound_rows += 1
            return None
        if stream.output_length + 1 >= stream.request.max_tokens:
            return None
        return Work(stream, start, array("i", [0]), stream.sequence.extend_unknown(), relayed=True)

    def _free_blocks(self) -> None:
        """Preempt a request so that a running one gets blocks; the step in flight is finished first."""
        self._need_results()
        self.preempt(self.admission.victim())

    def _need_results(self) -> None:
        """Leave the plan if a step is in flight, which may end requests."""
        if self._overlaps:
            raise _NeedsResults

    def _prefill_count(self, stream: Stream, pending: int) -> int:
        """Return the length of a chunk of a prompt; 0 if it does not fit, or if the stream plans a load instead.

        A scored chunk waits for the next step if there is no room for its rows of logits. One that must not be cut
        exceeds the bound if no other one has additional rows.
        """
        if self._loads(stream) or not stream.active:
            return 0
        begin = self._reuse.aligned(stream.common_length)
        if begin < stream.common_length:
            stream.cut_hit(begin)  # its hit ends inside a chunk, and the load that it counted on is not possible
            self._plan(stream)
            return 0
        if stream.request.suspended:  # the other streams begin at the end of the prompt
            pending = len(stream.request.prompt) - stream.sequence.length
        most = stream.request.scores.longest(stream.sequence.length, self._more_rows)
        count = self._reuse.chunk(pending, min(self._budget, most))
        return count if count or self._more_rows else self._reuse.chunk(pending, self._budget)

    def _unplan(self, stream: Stream) -> None:
        work = self._planned.pop(stream, None)
        if work is None:
            return
        if work.sources is None:
            self._budget += len(work.tokens)
            self._more_rows -= work.rows - 1
            stream.request.scheduling.queued.group.tokens -= len(work.tokens)
        else:
            self._load_room += len(work.tokens)

    # ---- loads

    def _loads(self, stream: Stream) -> bool:
        """Plan a load if that is better than a chunk; returns whether it is, even if it must wait."""
        while stream.active and stream.pending > self._reuse.loads.least:
            try:
                if not (available := self._loadable(stream)):
                    break
                self._plan_load(stream, available)
                return True
            except OutOfBlocks:
                self._free_blocks()
            except Exception as error:
                self._fail(stream.request, error)
        return False

    def _loadable(self, stream: Stream) -> int:
        """Return how many of a stream's next tokens are host-resident; 0 if it is better to compute them."""
        request, start = stream.request, stream.sequence.length
        end = min(len(stream.tokens) - 1, request.scores.hit_limit)
        if request.suspended:  # the other streams begin at the end of the prompt
            end = min(end, len(request.prompt))
        if not self._reuse.loads.whole:
            end = min(end, start + self._reuse.loads.most)
        available = stream.sequence.loadable(stream.tokens[start:end])
        return available if self._reuse.worth_loading(start, available) else 0

    def _plan_load(self, stream: Stream, available: int) -> None:
        """Plan a load of at most the room that is left; the stream waits for the next step if that is too little.

        A load that must not be cut exceeds the room of a step if it is the only one.
        """
        start, limits = stream.sequence.length, self._reuse.loads
        room = max(available, limits.most) if limits.whole and self._load_room == limits.most else self._load_room
        if limits.whole and room < available:
            return
        count = self._reuse.aligned(start + min(available, room)) - start
        if count >= self._reuse.loads.least:
            tokens = stream.tokens[start : start + count]
            load = stream.sequence.load(tokens)
            self._planned[stream] = Work(stream, start, tokens, load.plan, sources=load.sources)
            self._load_room -= count

    # ---- admit

    def _admit(self) -> Request | None:
        """Start the first request that fits; returns None if none waits, or if the first one does not fit."""
        if not len(self.waiting):
            return None
        if self.running and self.admission.streams() >= self._max_sequences and not self.admission.paused():
            return None  # before the cache is searched for waiting requests
        for _ in range(_MAX_DELAYED):
            if (request := self.waiting.first(self.running)) is None:
                return None
            try:
                if request.scores.wanted:
                    kept = self._reuse.kept_scores
                    self._counters.reused_scores += request.scores.take_kept(kept, request.namespace)
                if not self.running:
                    return self._start_alone(request)
                match = self._reuse.match(request)
                if self.waiting.delay(request, self.running, match.length):
                    continue
                fits = self._make_room(request, match)
                if not self.running:
                    return self._start_alone(request)
                return self._start(request, self._open(request)) if fits else None
            except _NeedsResults:
                raise
            except Exception as error:
                self._fail(request, error)
                return None
        return None

    def _make_room(self, request: Request, match: Match) -> bool:
        """Preempt paused requests until the request fits, if that can be enough; returns whether it fits."""
        if self.admission.fits(request, match):
            return True
        paused = self.admission.paused()
        if paused and self.admission.fits(request, match, paused):
            self._need_results()
            for victim in paused:
                self.preempt(victim)
                if self.admission.fits(request, match):
                    return True
        return False

    def _start_alone(self, request: Request) -> Request | None:
        """Start a request while no other one runs: it must be able to finish, if need be without headroom."""
        if self.closing:
            self._need_results()
        sequence = self._open(request)
        if self.admission.cut_to_fit(request, sequence):
            return self._start(request, sequence)
        sequence.close()
        self._refuse(request, self.admission.refusal(request))
        return None

    def _start(self, request: Request, sequence: Sequence) -> Request:
        try:
            request.start(sequence)
        except BaseException:
            sequence.close()
            raise
        self.waiting.admit(request)
        insort(self.running, request, key=attrgetter("scheduling.queued.rank"))
        self._admissions += 1
        request.scheduling.admitted = self._admissions
        if request.scheduling.queued.prefix_wait is not None:
            gained = sequence.length - request.scheduling.queued.prefix_wait.cached
            request.reported.coalesced |= gained > 0
            self._counters.coalesced_requests += gained > 0
            self._counters.coalesced_tokens += max(gained, 0)
            request.scheduling.queued.prefix_wait = None
        if request.scheduling.preemptions:
            self._resume_branches(request)
        return request

    def _open(self, request: Request, tokens: TokenIds | None = None) -> Sequence:
        """Open a sequence for the first stream of a request, or for another one, which has these `tokens`."""
        tokens = request.known if tokens is None else tokens
        limit = self._reuse.limit(tokens, request)
        purpose: Purpose = "resume" if request.streams else "request"
        sequence = self._cache.open(tokens, request.namespace, limit, request.priority, purpose=purpose)
        if not request.streams:
            request.reported.miss = self._explain(request, tokens, limit, sequence)
        for observer in self._observers:
            observer.opened(request, tokens, limit, sequence)
        return sequence

    def _explain(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> Explanation | None:
        """Return why a new request does not hit its whole prompt; None if only the last token, or none, is missing.

        The reason is looked up at the admission, while the cache still has it. Costs one more match.
        """
        missing = len(tokens) - sequence.length
        if missing <= 1:
            return None
        try:
            miss = self._cache.explain(tokens, request.namespace, limit)
        except Exception:  # a report costs no request
            _log.exception("the misses of a request could not be explained")
            return None
        return miss if missing - miss.host > 1 else None

    # ---- preempt and resume

    def preempt(self, request: Request) -> None:
        """Free all blocks of a running request; it waits again, ahead of the requests that came later.

        No step may be in flight. A request that has ended is not preempted.
        """
        if request not in self.running:
            return
        for stream in request.live:
            if stream.active:
                if not stream.sequence.has_plan:
                    self._reuse.publish_rest(stream)
                self._unplan(stream)
                stream.sequence.close()
        self.running.remove(request)
        scheduling = request.scheduling
        scheduling.preemptions += 1
        scheduling.guaranteed, scheduling.publish_late = True, False
        self._counters.preemptions += 1
        self.waiting.add(request)
        self.waiting.announce()
        for observer in self._observers:
            observer.preempted(request)

    def _resume_branches(self, request: Request) -> None:
        """Resume the suspended streams of a request once its first stream has computed the prompt again."""
        first = next(stream for stream in request.live if stream.active)
        if first.computed_length < len(request.prompt):
            return
        for stream in request.suspended:
            if self._reuse.reopens_branches and not request.scheduling.publish_late:
                stream.resume(self._open(request, np.array(stream.tokens, np.int32)))
            else:
                branch = first.sequence.fork()
                branch.truncate(len(request.prompt))
                stream.resume(branch, common_length=self._reuse.aligned(min(first.common_length, branch.length)))

    def _fail(self, request: Request, error: Exception) -> None:
        """Refuse the request that raised; the others go on."""
        if not isinstance(error, PrefixGone):
            _log.error("a request could not be scheduled", exc_info=error)
            error = failure(error)
        self._refuse(request, error)

    def _refuse(self, request: Request, error: Exception) -> None:
        try:
            self.remove(request)
        finally:
            self._refused.append((request, error))
