"""Plan the tokens that the next step computes: decodes first, then chunks of prompts, then newly admitted requests.

A step has a budget of tokens. Every active stream that has its whole prompt decodes one token (iteration-level
batching: Orca, OSDI 2022). The rest goes to chunks of prompts (Sarathi-Serve, OSDI 2024). So a long prompt lengthens a
step by a chunk, and never stalls the other streams. Budget that is left then admits waiting requests.

Waiting requests hold no blocks. When blocks run out, a running request is preempted (PagedAttention, SOSP 2023). Its
sequences are closed, and its published prefix stays in the tree until it is evicted. The request waits again, ahead of
the requests that came later. `admission` says which request fits and which one is preempted, `wait_queue` which one is
first and which one waits for a shared prefix.
"""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from radixkv.cache import Match, PrefixCache, Sequence, WritePlan
from radixkv.cache.types import Purpose
from radixkv.config import EngineConfig
from radixkv.engine.admission import Admission
from radixkv.engine.fault_isolation import failure
from radixkv.engine.observers import EngineObserver
from radixkv.engine.quota_admission import QuotaAdmission
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.scoring import Scoring
from radixkv.engine.stats import Counters
from radixkv.engine.wait_queue import QUEUES
from radixkv.errors import OutOfBlocks

_log = logging.getLogger(__name__)
_MAX_DELAYED = 64  # requests that one admission may delay, each compared with the running prompts


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens that one stream computes in this step: `tokens` from position `start` on, into the slots of `plan`.

    An `isolated` one has a forward of its own.
    """

    stream: Stream
    start: int
    tokens: array[int]
    plan: WritePlan
    isolated: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the stream's last token, so that the next one is sampled from its logits."""
        return self.start + len(self.tokens) >= len(self.stream.tokens) and self.stream.request.max_tokens > 0

    @property
    def logit_rows(self) -> int:
        """The number of last tokens with logits."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredWork(Work):
    """A chunk with scored tokens: the logits of its last `rows` tokens are needed."""

    rows: int

    @property
    def logit_rows(self) -> int:
        """The number of last tokens with logits."""
        return self.rows


class Scheduler:
    """The waiting and the running requests of one cache."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        counters: Counters,
        reuse: ReusePolicy,
        observers: list[EngineObserver],
        end: Callable[[Request, Exception], None],
    ) -> None:
        """Schedule onto `cache`. `end` ends a request that cannot be admitted or scheduled, and must `remove` it."""
        self.waiting = QUEUES[config.order](config, cache.block_size, reuse)
        self.running: list[Request] = []  # by rank
        admission = Admission if cache.quotas is None else QuotaAdmission
        self.admission = admission(cache, config, reuse, self.running, self.waiting)
        self._cache, self._reuse = cache, reuse
        self._max_sequences, self._max_batch_tokens = config.max_sequences, config.max_batch_tokens
        self._counters, self._observers, self._end = counters, observers, end
        self._planned: dict[Stream, Work] = {}  # of the step that is being scheduled
        self._budget = 0
        self._arrivals = self._admissions = 0

    def close(self) -> None:
        """Release the cache; from now on only `admission.check_fits` may be called."""
        self.admission.close()
        del self._cache

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_fits`."""
        self._arrivals += 1
        request.number = self._arrivals
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take out a request, waiting or running, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        for stream in request.streams:
            self._unplan(stream)
            stream.close()

    # ---- schedule

    def schedule(self) -> list[Work]:
        """Plan the next step: at most max_batch_tokens tokens, one chunk a stream.

        A request that raises ends alone.
        """
        self._planned, self._budget = {}, self._max_batch_tokens
        for request in list(self.running):
            if request.preemptions and request.suspended:
                try:
                    self._resume_branches(request)
                except Exception as error:
                    self._fail(request, error)
        for stream in self._in_order():
            self._plan(stream)
        self.waiting.begin_step()
        while self._budget and (admitted := self._admit()) is not None:
            stream = admitted.live[0]
            self._plan(stream)
            if stream not in self._planned:
                break  # it was preempted at once, or its chunk does not fit this step
        work, self._planned = list(self._planned.values()), {}
        return work

    def _in_order(self) -> Iterable[Stream]:
        """Return the active streams whose requests are not paused: those that decode, then those that prefill."""
        decoding: list[Stream] = []
        prefilling: list[Stream] = []
        for request in self.running:
            if not request.channel.paused:
                for stream in request.live:
                    if stream.active:
                        (prefilling if stream.prefilling else decoding).append(stream)
        return decoding + prefilling

    def _plan(self, stream: Stream) -> None:
        """Plan a stream's chunk, unless no budget is left or the stream's own request is preempted."""
        while self._budget and stream.active:
            try:
                if (work := self._next(stream)) is not None:
                    self._planned[stream] = work
                    self._budget -= len(work.tokens)
                return
            except OutOfBlocks:
                self._free_blocks(stream.request)
            except Exception as error:
                self._fail(stream.request, error)

    def _next(self, stream: Stream) -> Work | None:
        """Plan a stream's next tokens; None if there are none to compute, or if they do not fit this step."""
        start = stream.sequence.length
        count = len(stream.tokens) - start
        if count > 1:
            count = self._prefill_count(stream, count)
        if not count:
            return None
        tokens, isolated = stream.tokens[start : start + count], self._reuse.isolated(stream)
        plan = stream.sequence.extend(tokens)
        if count > 1 and stream.request.scoring is not None:  # a guard in place of a null object
            rows = stream.request.scoring.rows(start, start + count)
            return ScoredWork(stream, start, tokens, plan, isolated, rows=rows)
        return Work(stream, start, tokens, plan, isolated)

    def _free_blocks(self, request: Request) -> None:
        """Free blocks for a running request, by a preemption."""
        self.preempt(self.admission.victim(request))

    def _prefill_count(self, stream: Stream, pending: int) -> int:
        """Return the length of a chunk of a prompt; 0 if it does not fit."""
        if stream.request.suspended:  # the other streams begin at the end of the prompt
            pending = len(stream.request.prompt) - stream.sequence.length
        if stream.request.scoring is None:  # a guard in place of a null object
            return self._reuse.chunk(pending, self._budget)
        return self._scored_count(stream.request.scoring, stream.sequence.length, pending)

    def _scored_count(self, scoring: Scoring, start: int, pending: int) -> int:
        """Return the length of a scored chunk, so that the step's additional rows of logits stay within bounds.

        A chunk waits for the next step if there is no room for its rows. One that must not be cut exceeds the bound if
        no other one has additional rows.
        """
        planned = sum(each.logit_rows - 1 for each in self._planned.values())
        room = scoring.most_rows - planned
        count = self._reuse.chunk(pending, min(self._budget, scoring.longest(start, room + 1 if room > 0 else 0)))
        return count if count or planned else self._reuse.chunk(pending, self._budget)

    def _unplan(self, stream: Stream) -> None:
        work = self._planned.pop(stream, None)
        if work is not None:
            self._budget += len(work.tokens)

    # ---- admit

    def _admit(self) -> Request | None:
        """Start the first request that fits; returns None if none waits, or if the first one does not fit."""
        if not len(self.waiting):
            return None
        if self.admission.streams() >= self._max_sequences and self.admission.paused_victim() is None:
            return None  # before the cache is searched for waiting requests
        for _ in range(_MAX_DELAYED):
            request = next((each for each in self.waiting.in_order() if not each.channel.paused), None)
            if request is None:
                return None
            try:
                if request.scoring is not None:
                    self._counters.reused_scores += self._reuse.take_scores(request)
                if not self.running:
                    return self._start_alone(request)
                match = self._reuse.match(request)
                if self.waiting.delay(request, self.running, match.length):
                    continue
                fits = self._make_room(request, match)
                if not self.running:
                    return self._start_alone(request)
                return self._start(request, self._open(request, request.known)) if fits else None
            except Exception as error:
                self._fail(request, error)
                return None
        return None

    def _make_room(self, request: Request, match: Match) -> bool:
        """Preempt paused requests until the request fits, if that can be enough; returns whether it fits."""
        if self.admission.fits(request, match):
            return True
        if self.admission.fits_without_paused(request, match):
            while (paused := self.admission.paused_victim()) is not None:
                self.preempt(paused)
                if self.admission.fits(request, match):
                    return True
        return False

    def _start_alone(self, request: Request) -> Request | None:
        """Start a request while no other one runs: it must be able to finish, if need be without headroom."""
        sequence = self._open(request, request.known)
        if self.admission.cut_to_fit(request, sequence):
            return self._start(request, sequence)
        sequence.close()
        self._end(request, self.admission.refusal(request))
        return None

    def _start(self, request: Request, sequence: Sequence) -> Request:
        try:
            request.start(sequence)
        except BaseException:
            sequence.close()
            raise
        self.waiting.admitted(request)
        insort(self.running, request, key=lambda each: each.rank)
        self._admissions += 1
        request.admitted = self._admissions
        if request.prefix_wait is not None:
            gained = sequence.length - request.prefix_wait.cached
            request.coalesced |= gained > 0
            self._counters.coalesced_requests += gained > 0
            self._counters.coalesced_tokens += max(gained, 0)
            request.prefix_wait = None
        if request.preemptions:
            self._resume_branches(request)
        return request

    def _open(self, request: Request, tokens: TokenIds) -> Sequence:
        limit = self._reuse.limit(tokens, request)
        purpose: Purpose = "resume" if request.streams else "request"
        sequence = self._cache.open(tokens, request.namespace, limit, request.priority, purpose=purpose)
        for observer in self._observers:
            observer.opened(request, tokens, limit, sequence)
        return sequence

    # ---- preempt and resume

    def preempt(self, request: Request) -> None:
        """Free all blocks of a running request; it waits again, ahead of the requests that came later."""
        for stream in request.live:
            if stream.active:
                if not stream.sequence.has_plan:
                    self._reuse.publish_rest(stream)
                self._unplan(stream)
                stream.sequence.close()
        self.running.remove(request)
        request.preemptions += 1
        request.guaranteed, request.publish_late = True, False
        self._counters.preemptions += 1
        self.waiting.add(request)
        for observer in self._observers:
            observer.preempted(request)

    def _resume_branches(self, request: Request) -> None:
        """Resume the suspended streams of a request once its first stream has computed the prompt again."""
        first = next(stream for stream in request.live if stream.active)
        if first.computed_length < len(request.prompt):
            return
        for stream in request.suspended:
            if self._reuse.reopens_branches and not request.publish_late:
                stream.resume(self._open(request, np.array(stream.tokens, np.int32)))
            else:
                branch = first.sequence.fork()
                branch.truncate(len(request.prompt))
                stream.resume(branch, common_length=self._reuse.aligned(min(first.common_length, branch.length)))

    def _fail(self, request: Request, error: Exception) -> None:
        """End the request that raised; the others go on."""
        _log.exception("a request could not be scheduled")
        self._end(request, failure(error))
