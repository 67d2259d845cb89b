"""A demo without an engine: a made-up workload over the real prefix cache, reported as an engine reports.

Tokens are made up and nothing is computed. The real cache makes hits, sharing, evictions and misses. A step
takes a fixed time and more for each token, so requests that find less in the cache take longer. With a host tier,
blocks that leave the pool are offloaded, and loaded when a prompt needs them again.
"""

from __future__ import annotations

import os
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from typing import Any, get_args

from radixkv.cache import Hint, Pin, PrefixCache, Sequence
from radixkv.errors import OutOfBlocks
from radixkv.telemetry.protocol import Delta, Hello, Snapshot
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import (
    ITL_BOUNDS,
    ITL_NAMES,
    PREEMPTIONS,
    Changes,
    EngineFacts,
    MissReason,
    Phase,
    RequestRecord,
    SessionRecord,
)
from radixkv_monitor.demo_workload import AGENT, Conversation, Workload
from radixkv_monitor.feed import Status, ThreadFeed
from radixkv_monitor.live import HZ

STEP_SECONDS, TOKENS_PER_SECOND = 0.025, 4000.0
"""The seconds of a step, and the rate at which its tokens add to them."""
LOADED_PER_SECOND = 20 * TOKENS_PER_SECOND
"""Tokens that are loaded per second of a step."""
LEAST_BLOCKS = 2
"""A shorter run is computed, as in an engine."""
MAX_SEQUENCES, MAX_BATCH_TOKENS, CHUNK = 32, 1024, 512
PIN_SECONDS = 300.0
"""The seconds that an agent's system prompt stays pinned after it was computed."""
MODEL_BYTES, IDLE_CPU = 900 * 2**20, 0.01
"""Resident memory without KV, and the share of a core that an idle engine takes."""
LEAP = 60.0
"""The most seconds that one call simulates."""


@dataclass(eq=False)
class DemoRequest:
    """A request of the demo."""

    record: RequestRecord
    conversation: Conversation
    prompt: array[int]
    answers: list[array[int]]
    stop_after: int | None
    sequences: list[Sequence] = field(default_factory=list)
    computed: int = 0  # committed tokens of the prompt
    reached: int = 0  # the most tokens that were ever committed; tokens below it are computed again after a preemption
    prefilled: int = 0  # tokens of the prompt that were computed for the first time
    decoded: dict[int, int] = field(default_factory=dict)  # the most tokens of each answer that ever had KV
    sampled: int = 0  # sampled tokens of each answer; the last one has no KV yet
    sampled_at: float = 0.0

    @property
    def prefills(self) -> bool:
        """Return whether a part of the prompt is not computed yet."""
        return self.computed < len(self.prompt)

    @property
    def stopped(self) -> bool:
        """Return whether the user stops the answer here."""
        return self.stop_after is not None and self.sampled >= self.stop_after

    @property
    def computed_tokens(self) -> int:
        """The number of tokens of the prompt and of the answers that were computed for the first time."""
        return self.prefilled + sum(self.decoded.values())

    def decode(self, index: int) -> int:
        """Record the KV of an answer; returns how many of its tokens have KV for the first time."""
        before = self.decoded.get(index, 0)
        self.decoded[index] = max(before, self.sequences[index].length - len(self.prompt))
        return self.decoded[index] - before

    def missing(self, index: int) -> array[int]:
        """Return the tokens of an answer that are sampled and have no KV."""
        if self.sampled >= len(self.answers[index]):
            return array("i")
        return self.answers[index][self.sequences[index].length - len(self.prompt) : self.sampled]

    def sampled_tokens(self) -> int:
        """Return the number of sampled tokens of all answers."""
        return sum(min(self.sampled, len(answer)) for answer in self.answers)


COUNTED = (
    *("finished", "cancelled", "failed", "timed_out", "preemptions", "steps", "step_tokens", "prompt_tokens"),
    *("cached_tokens", "computed_tokens", "prefill_tokens", "decode_tokens", "recomputed_tokens", "output_tokens"),
    *("host_tokens", *ITL_NAMES, *(f"missed_{reason}" for reason in get_args(MissReason))),
)
"""The counters of the engine that the source stands for."""


class DemoSource:
    """A simulated engine: `step(now)` advances it to `now` and returns the changes.

    The same seed gives the same changes, however often `step` is called. A minute takes about 0.4 s of one core.
    """

    def __init__(
        self,
        seed: int = 7,
        *,
        num_blocks: int = 2304,
        host_blocks: int = 0,
        sessions: int = 40,
        started: float = 0.0,
    ) -> None:
        """Start at `started` (seconds since 1970) with an empty cache, and a host tier if it has `host_blocks`."""
        self.facts = EngineFacts(
            engine=f"demo-{seed}",
            pid=os.getpid(),
            started=started,
            version=version("radixkv"),
            model="demo",
            device="none",
            dtype="none",
            attention="none",
            eviction="lru",
            num_blocks=num_blocks,
            block_size=16,
            bytes_per_block=2 * 2**20,
            max_length=16_384,
            max_sequences=MAX_SEQUENCES,
            max_batch_tokens=MAX_BATCH_TOKENS,
            prefill_chunk=CHUNK,
            host_blocks=host_blocks,
        )
        self._now = started
        self._recorder = Recorder(clock=lambda: self._now)
        self._cache = PrefixCache(num_blocks, self.facts.block_size, clock=lambda: self._now, host_blocks=host_blocks)
        self._recorder.attach(self._cache)
        self._workload = Workload(seed, sessions, started)
        self._waiting: deque[DemoRequest] = deque()
        self._running: list[DemoRequest] = []
        self._batch: list[tuple[DemoRequest, int]] = []
        self._loads: dict[DemoRequest, int] = {}  # tokens to load in this step
        self._takes, self._ends = 0.0, started
        self._pins: dict[bytes, Pin] = {}
        self._counts = dict.fromkeys(COUNTED, 0)
        self._step_seconds = 0.0
        self._requests = 0
        self._sessions: dict[int, SessionRecord] = {}

    def step(self, now: float) -> Changes:
        """Advance to `now`, by at most a minute."""
        self._now = max(self._now, now - LEAP)
        while self._now < now:
            self._advance(now)
        for request in self._running:
            if request.record.output_tokens < (sampled_tokens := request.sampled_tokens()):
                self._publish(request, output_tokens=sampled_tokens)
        changes = self._recorder.collect(self._stats(), self._owners())
        # There is no engine thread, so the cost of telemetry has no share to be shown as.
        return replace(changes, stats={name: each for name, each in changes.stats.items() if name != "monitor_ns"})

    def _owners(self) -> dict[int, tuple[int, int]]:
        """Return the request and the answer of each open sequence."""
        return {
            sequence.id: (request.record.number, index)
            for request in self._running
            for index, sequence in enumerate(request.sequences)
        }

    def _stats(self) -> dict[str, float]:
        used_blocks = self.facts.num_blocks - self._cache.free_blocks
        gauges = {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "uptime_s": self._now - self.facts.started,
            "kv_bytes": self.facts.num_blocks * self.facts.bytes_per_block,
            "step_seconds": self._step_seconds,
            "process_cpu_seconds": self._step_seconds + IDLE_CPU * (self._now - self.facts.started),
            "process_rss_bytes": MODEL_BYTES + used_blocks * self.facts.bytes_per_block,
        }
        if self.facts.host_blocks:
            gauges |= {
                "load_seconds_per_token": 1 / LOADED_PER_SECOND,
                "prefill_seconds_per_token": 1 / TOKENS_PER_SECOND,
            }
        return {name: float(value) for name, value in (self._counts | gauges).items()}

    # ---- the simulated step

    def _advance(self, until: float) -> None:
        """Advance to the end of a step, to the next request of an idle engine, or to `until`."""
        for when, conversation in self._workload.due(self._now):
            self._submit(conversation, when)
        if not self._batch:
            self._admit()
            self._schedule()
        ends = self._ends if self._batch else self._workload.next_due
        self._now = max(self._now, min(ends, until))
        if self._batch and ends <= until:
            batch, self._batch = self._batch, []
            self._run(batch)

    def _schedule(self) -> None:
        """Start a step: loads, then decoding requests, then prompts while there is room."""
        found = ((request, self._loadable(request)) for request in self._running if request.prefills)
        least = LEAST_BLOCKS * self.facts.block_size
        self._loads = {request: tokens for request, tokens in found if tokens >= least}
        self._batch, room = [*self._loads.items()], MAX_BATCH_TOKENS
        computing = (request for request in self._running if request not in self._loads)
        for request in sorted(computing, key=lambda each: each.prefills):
            wanted = len(request.prompt) - request.computed if request.prefills else len(request.answers)
            tokens = min(wanted, CHUNK, room)
            if tokens:
                self._batch.append((request, tokens))
                room -= tokens
        self._takes = STEP_SECONDS + (MAX_BATCH_TOKENS - room) / TOKENS_PER_SECOND
        self._takes += sum(self._loads.values()) / LOADED_PER_SECOND
        self._ends = self._now + self._takes

    def _loadable(self, request: DemoRequest) -> int:
        """Count the tokens of the prompt, except its last, that could be loaded now."""
        return request.sequences[0].loadable(request.prompt[request.computed : -1])

    def _run(self, batch: list[tuple[DemoRequest, int]]) -> None:
        """End a step: offload the blocks that left the pool since the last one, and load or commit its tokens."""
        self._cache.moves()
        self._cache.moves_done()
        self._counts["steps"] += 1
        self._step_seconds += self._takes
        for request, tokens in batch:
            if request not in self._running:
                continue  # an earlier request of the batch preempted it
            if request in self._loads:
                self._load(request, tokens)
            elif request.prefills:
                self._prefill(request, tokens)
            else:
                self._decode(request)

    def _submit(self, conversation: Conversation, when: float) -> None:
        prompt, answers = conversation.ask(), conversation.answers()
        self._requests += 1
        record = RequestRecord(
            number=self._requests,
            phase="waiting",
            session=conversation.number,
            namespace=conversation.namespace,
            priority=0,
            streams=len(answers),
            prompt_tokens=len(prompt),
            max_tokens=conversation.kind.answers[1],
            cached_tokens=0,
            computed_tokens=0,
            recomputed_tokens=0,
            output_tokens=0,
            preemptions=0,
            coalesced=False,
            submitted=when,
        )
        request = DemoRequest(record, conversation, prompt, answers, conversation.stop_after())
        self._waiting.append(request)
        self._publish(request)
        self._count_session(request, requests=1, live=1)

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            streams = request.record.streams + sum(each.record.streams for each in self._running)
            room = self._cache.available_blocks
            if self._running and (
                streams > MAX_SEQUENCES or room < len(request.prompt) // 16 + 2 * (len(self._running) + 1)
            ):
                return
            self._waiting.popleft()
            self._open(request)

    def _open(self, request: DemoRequest) -> None:
        limit = len(request.prompt) - 1  # the last token is always computed, for its logits
        why = self._cache.explain(request.prompt, request.conversation.namespace, limit)
        again = request.record.preemptions > 0
        sequence = self._cache.open(
            request.prompt, request.conversation.namespace, limit=limit, purpose="resume" if again else "request"
        )
        request.sequences, request.computed = [sequence], sequence.length
        self._running.append(request)
        gained, request.reached = max(0, sequence.length - request.reached), max(sequence.length, request.reached)
        if again:
            self._counts["cached_tokens"] += gained  # another request has computed them meanwhile
            preempted = (*request.record.preempted_ms, self._age_ms(request))
            cached = request.record.cached_tokens + gained
            self._publish(request, phase="prefill", cached_tokens=cached, preempted_ms=preempted)
            return
        self._counts["prompt_tokens"] += len(request.prompt)
        self._counts["cached_tokens"] += sequence.length
        found = why.length + why.host
        full = found == limit
        self._publish(
            request,
            phase="prefill",
            cached_tokens=sequence.length,
            admitted=self._now,
            miss_reason="full" if full else why.reason,
            miss_at=None if full else found,
            miss_evicted_tokens=why.evicted_tokens,
            miss_evicted_ago=why.evicted_ago,
            miss_pressure=why.pressure,
        )
        self._count_session(request, prompt_tokens=len(request.prompt), cached_tokens=sequence.length)

    def _load(self, request: DemoRequest, count: int) -> None:
        """Load tokens of a prompt, unless they were evicted from the host since they were scheduled."""
        sequence = request.sequences[0]
        tokens = request.prompt[request.computed : request.computed + count]
        while self._loadable(request) >= count:
            try:
                sequence.load(tokens)
            except OutOfBlocks:
                if self._preempt_newest() is request:
                    return
            else:
                sequence.commit()
                self._count_loaded(request, count)
                return

    def _count_loaded(self, request: DemoRequest, count: int) -> None:
        request.computed += count
        gained = max(0, request.computed - request.reached)
        request.reached += gained
        self._counts["step_tokens"] += count
        self._counts["host_tokens"] += count
        self._counts["cached_tokens"] += gained
        if gained:  # a preempted request also loads tokens that it had computed
            cached, host = request.record.cached_tokens + gained, request.record.host_tokens + gained
            self._publish(request, cached_tokens=cached, host_tokens=host)
            self._count_session(request, cached_tokens=gained)

    def _prefill(self, request: DemoRequest, tokens: int) -> None:
        chunk = request.prompt[request.computed : request.computed + tokens]
        if not self._extend(request, request.sequences[0], chunk):
            return
        request.computed += len(chunk)
        new = max(0, request.computed - request.reached)
        request.reached += new
        request.prefilled += new
        self._counts["computed_tokens"] += new
        self._counts[f"missed_{request.record.miss_reason}"] += new
        self._counts["prefill_tokens"] += len(chunk)
        self._counts["recomputed_tokens"] += len(chunk) - new
        self._publish(request, recomputed_tokens=request.record.recomputed_tokens + len(chunk) - new)
        if not request.prefills:
            request.sequences += [request.sequences[0].fork() for _ in request.answers[1:]]
            self._pin(request.conversation)
            first = self._now if request.record.first_token is None else request.record.first_token
            self._publish(request, phase="decode", first_token=first)
            self._sample(request)

    def _decode(self, request: DemoRequest) -> None:
        """Commit sampled tokens; after a preemption these are all that were sampled before."""
        for index, sequence in enumerate(list(request.sequences)):
            tokens = request.missing(index)
            if tokens and not self._extend(request, sequence, tokens):
                return
            self._count_decoded(request, index, len(tokens))
        self._sample(request)

    def _count_decoded(self, request: DemoRequest, index: int, tokens: int) -> None:
        """Count computed tokens of an answer; those that had KV before a preemption count as prefilled again."""
        new = request.decode(index)
        self._counts["computed_tokens"] += new
        self._counts["decode_tokens"] += new
        if again := tokens - new:
            self._counts["prefill_tokens"] += again
            self._counts["recomputed_tokens"] += again
            self._publish(request, recomputed_tokens=request.record.recomputed_tokens + again)

    def _sample(self, request: DemoRequest) -> None:
        """Sample a token of each answer, unless tokens sampled before a preemption still lack KV."""
        if all(len(request.missing(index)) == 0 for index in range(len(request.answers))):
            before, request.sampled = request.sampled_tokens(), request.sampled + 1
            tokens = request.sampled_tokens() - before
            self._counts["output_tokens"] += tokens
            if request.sampled > 1:
                bucket = bisect_left(ITL_BOUNDS, self._now - request.sampled_at)
                self._counts[ITL_NAMES[bucket]] += tokens
            request.sampled_at = self._now
        if request.stopped or all(request.sampled >= len(answer) for answer in request.answers):
            self._finish(request)

    def _extend(self, request: DemoRequest, sequence: Sequence, tokens: array[int]) -> bool:
        """Commit tokens; while blocks run out, preempt the newest request. Returns False if that is this one."""
        while True:
            try:
                sequence.extend(tokens)
            except OutOfBlocks:
                if self._preempt_newest() is request:
                    return False
            else:
                sequence.commit()
                self._counts["step_tokens"] += len(tokens)
                return True

    def _preempt_newest(self) -> DemoRequest:
        request = self._running.pop()
        for sequence in request.sequences:
            sequence.close()
        self._waiting.appendleft(request)
        self._counts["preemptions"] += 1
        self._publish(
            request,
            phase="preempted",
            preemptions=request.record.preemptions + 1,
            output_tokens=request.sampled_tokens(),
            preempted_ms=(*request.record.preempted_ms[-2 * (PREEMPTIONS - 1) :], self._age_ms(request)),
        )
        return request

    def _finish(self, request: DemoRequest) -> None:
        for index, sequence in enumerate(request.sequences):
            sequence.close(Hint(done=index > 0 or request.conversation.over))
        self._running.remove(request)
        answer = request.answers[0][: request.sampled]
        phase: Phase = "cancelled" if request.stopped else "finished"
        ended = "length" if len(answer) >= request.record.max_tokens else "stop"
        self._counts[phase] += 1
        self._publish(
            request,
            phase=phase,
            ended=self._now,
            finish="RequestCancelled" if request.stopped else ended,
            output_tokens=request.sampled_tokens(),
        )
        self._workload.answered(request.conversation, answer, self._now)
        self._count_session(request, live=-1, output_tokens=request.record.output_tokens)

    def _pin(self, conversation: Conversation) -> None:
        """Pin the system prompt of agents without a namespace, because they return often and soon."""
        key = conversation.system.tobytes()
        if (
            conversation.kind is AGENT
            and conversation.namespace is None
            and not (key in self._pins and self._pins[key].active)
        ):
            self._pins[key] = self._cache.pin(conversation.system, ttl=PIN_SECONDS)

    # ---- records

    def _age_ms(self, request: DemoRequest) -> int:
        """The milliseconds since the request was submitted."""
        return round((self._now - request.record.submitted) * 1e3)

    def _publish(self, request: DemoRequest, phase: Phase | None = None, **new: Any) -> None:
        new |= {"phase": phase or request.record.phase, "computed_tokens": request.computed_tokens}
        request.record = replace(request.record, **new)
        self._recorder.request(request.record)

    def _count_session(self, request: DemoRequest, **more: int) -> None:
        conversation = request.conversation
        old = self._sessions.get(conversation.number) or SessionRecord(
            conversation.number, conversation.namespace, 0, 0, 0, 0, 0, 0, self._now, self._now
        )
        counted = {name: getattr(old, name) + count for name, count in more.items()}
        closed = conversation.over and counted.get("live", old.live) == 0
        new = replace(old, tokens=len(conversation.history), used=self._now, closed=closed, **counted)
        self._sessions[conversation.number] = new
        self._recorder.session(new)
        if closed:
            del self._sessions[conversation.number]


class DemoFeed(ThreadFeed):
    """Run a made-up workload over a real cache, in this process."""

    def __init__(self, source: Callable[[], DemoSource], *, clock: Callable[[], float] = time.time) -> None:
        super().__init__("demo", clock=clock)
        self._source = source

    def _run(self) -> None:
        source = self._source()
        self._status = Status("connecting", source.facts.started, "The demo simulates its first minute")
        self.builder.take(Hello(source.facts, ts=self._clock()))
        when = source.facts.started
        for seq in count(1):
            when = min(when + 1.0, self._clock())  # in steps, so that there is a history from the start
            changes = replace(source.step(when), reset=seq == 1)
            self.builder.take(Snapshot(0, 1, changes, ts=when) if seq == 1 else Delta(changes, seq=seq, ts=when))
            if self._clock() - when < 1.0:
                self._status = Status("live", source.facts.started)
                if self._closing.wait(1 / HZ):
                    return
