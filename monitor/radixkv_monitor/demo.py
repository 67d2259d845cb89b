"""A show that needs no engine: a made-up workload over the real prefix cache, told as an engine tells of itself.

Knows the cache, telemetry's recorder and the life of a request. Knows no model, no tensor and no screen: tokens are
made up, and nothing is computed. What is cached, shared, evicted and missed is as real as the cache is; how long it
takes follows from a rate that is stated below, so that who finds less in the cache waits longer.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from radixkv.cache import Hint, Pin, PrefixCache, Sequence
from radixkv.errors import OutOfBlocks
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import Changes, EngineFacts, Phase, RequestRecord, SessionRecord
from radixkv_monitor.demo_workload import AGENT, Conversation, Workload

STEP_SECONDS, TOKENS_PER_SECOND = 0.025, 4000.0
"""A step takes so long, and longer by what its tokens take at this rate."""
MAX_SEQUENCES, MAX_BATCH_TOKENS, CHUNK = 32, 1024, 512
PIN_SECONDS = 300.0
"""How long an agent's system prompt stays pinned, once somebody has computed it."""
LEAP = 60.0
"""The most seconds that one call lives through."""


@dataclass(eq=False)
class _Turn:
    """A request of the demo."""

    record: RequestRecord
    talk: Conversation
    prompt: array[int]
    answers: list[array[int]]
    patience: int | None
    sequences: list[Sequence] = field(default_factory=list)
    computed: int = 0  # tokens of the prompt that are committed
    reached: int = 0  # how far it was ever, so that what is computed again is told apart
    said: int = 0  # tokens of each answer that are sampled; the last one has no KV yet

    @property
    def prefills(self) -> bool:
        """Whether some of its prompt is not computed yet."""
        return self.computed < len(self.prompt)

    @property
    def stopped(self) -> bool:
        """Whether somebody has heard enough of it."""
        return self.patience is not None and self.said >= self.patience

    def missing(self, index: int) -> array[int]:
        """The tokens of an answer that are sampled and have no KV."""
        if self.said >= len(self.answers[index]):
            return array("i")
        return self.answers[index][self.sequences[index].length - len(self.prompt) : self.said]

    def heard(self) -> int:
        """Tokens of all answers that are sampled."""
        return sum(min(self.said, len(answer)) for answer in self.answers)


class DemoSource:
    """An engine that is none: `step(now)` lets it live until `now` and returns what changed.

    The same seed tells the same story, however often one looks. A minute of it costs some 0.4 s of one core.
    """

    def __init__(self, seed: int = 7, *, num_blocks: int = 2304, sessions: int = 40, started: float = 0.0) -> None:
        """Begin at `started` (seconds since 1970) with an empty cache."""
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
        )
        self._now = started
        self._recorder = Recorder(clock=lambda: self._now)
        self._cache = PrefixCache(num_blocks, 16, clock=lambda: self._now)
        self._recorder.attach(self._cache)
        self._workload = Workload(seed, sessions, started)
        self._waiting: deque[_Turn] = deque()
        self._running: list[_Turn] = []
        self._batch: list[tuple[_Turn, int]] = []
        self._takes, self._ends = 0.0, started
        self._pins: dict[bytes, Pin] = {}
        self._counts = dict.fromkeys(
            ("finished", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "recomputed_tokens"), 0
        )
        self._counts |= dict.fromkeys(("steps", "preemptions", "step_tokens", "cancelled", "failed"), 0)
        self._step_seconds = 0.0
        self._requests = 0
        self._sessions: dict[int, SessionRecord] = {}

    def step(self, now: float) -> Changes:
        """Live until `now`; a leap of more than a minute is cut to one."""
        self._now = max(self._now, now - LEAP)
        while self._now < now:
            self._live(now)
        for turn in self._running:
            if turn.record.output_tokens < (heard := turn.heard()):
                self._tell(turn, output_tokens=heard)
        changes = self._recorder.collect(self._stats(), self._owners())
        # What telling has cost is nothing of the story: there is no thread of an engine that it could be a share of.
        return replace(changes, stats={name: each for name, each in changes.stats.items() if name != "monitor_ns"})

    def _owners(self) -> dict[int, tuple[int, int]]:
        """Whose each open sequence is."""
        return {
            sequence.id: (turn.record.number, index)
            for turn in self._running
            for index, sequence in enumerate(turn.sequences)
        }

    def _stats(self) -> dict[str, float]:
        gauges = {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "uptime_s": self._now - self.facts.started,
            "kv_bytes": self.facts.num_blocks * self.facts.bytes_per_block,
            "step_seconds": self._step_seconds,
        }
        return {name: float(value) for name, value in (self._counts | gauges).items()}

    # ---- the made-up engine's step

    def _live(self, until: float) -> None:
        """Until a step ends, or somebody comes to an idle engine, or `until`."""
        for when, talk in self._workload.due(self._now):
            self._submit(talk, when)
        if not self._batch:
            self._admit()
            self._schedule()
        ends = self._ends if self._batch else self._workload.next_due
        self._now = max(self._now, min(ends, until))
        if self._batch and ends <= until:
            batch, self._batch = self._batch, []
            self._run(batch)

    def _schedule(self) -> None:
        """Begin a step: who answers first, then prompts as far as there is room."""
        room = MAX_BATCH_TOKENS
        for turn in sorted(self._running, key=lambda each: each.prefills):
            wanted = len(turn.prompt) - turn.computed if turn.prefills else len(turn.answers)
            tokens = min(wanted, CHUNK, room)
            if tokens:
                self._batch.append((turn, tokens))
                room -= tokens
        self._takes = STEP_SECONDS + (MAX_BATCH_TOKENS - room) / TOKENS_PER_SECOND
        self._ends = self._now + self._takes

    def _run(self, batch: list[tuple[_Turn, int]]) -> None:
        """The end of a step: what it computed is there."""
        self._counts["steps"] += 1
        self._step_seconds += self._takes
        for turn, tokens in batch:
            if turn not in self._running:
                continue  # it gave way to one before it
            if turn.prefills:
                self._prefill(turn, tokens)
            else:
                self._decode(turn)

    def _submit(self, talk: Conversation, when: float) -> None:
        prompt, answers = talk.ask(), talk.answers()
        self._requests += 1
        record = RequestRecord(
            number=self._requests,
            phase="waiting",
            session=talk.number,
            namespace=talk.namespace,
            priority=0,
            streams=len(answers),
            prompt_tokens=len(prompt),
            max_tokens=talk.kind.answers[1],
            cached_tokens=0,
            computed_tokens=0,
            recomputed_tokens=0,
            output_tokens=0,
            preemptions=0,
            coalesced=False,
            submitted=when,
        )
        turn = _Turn(record, talk, prompt, answers, talk.patience())
        self._waiting.append(turn)
        self._tell(turn)
        self._count_session(turn, requests=1, live=1)

    def _admit(self) -> None:
        while self._waiting:
            turn = self._waiting[0]
            streams = turn.record.streams + sum(each.record.streams for each in self._running)
            room = self._cache.free_blocks + self._cache.evictable_blocks
            if self._running and (
                streams > MAX_SEQUENCES or room < len(turn.prompt) // 16 + 2 * (len(self._running) + 1)
            ):
                return
            self._waiting.popleft()
            self._open(turn)

    def _open(self, turn: _Turn) -> None:
        limit = len(turn.prompt) - 1  # the last token is always computed: its logits are what is asked for
        why = self._cache.explain(turn.prompt, turn.talk.namespace, limit)
        again = turn.record.preemptions > 0
        sequence = self._cache.open(
            turn.prompt, turn.talk.namespace, limit=limit, purpose="resume" if again else "request"
        )
        turn.sequences, turn.computed = [sequence], sequence.length
        self._running.append(turn)
        gained, turn.reached = max(0, sequence.length - turn.reached), max(sequence.length, turn.reached)
        if again:
            self._counts["cached_tokens"] += gained  # somebody else computed what it would have
            self._tell(turn, phase="prefill", cached_tokens=turn.record.cached_tokens + gained)
            return
        self._counts["prompt_tokens"] += len(turn.prompt)
        self._counts["cached_tokens"] += sequence.length
        full = sequence.length == limit
        self._tell(
            turn,
            phase="prefill",
            cached_tokens=sequence.length,
            admitted=self._now,
            miss_reason="full" if full else why.reason,
            miss_at=None if full else why.length,
            miss_evicted_tokens=why.evicted_tokens,
            miss_evicted_ago=why.evicted_ago,
            miss_pressure=why.pressure,
        )
        self._count_session(turn, prompt_tokens=len(turn.prompt), cached_tokens=sequence.length)

    def _prefill(self, turn: _Turn, tokens: int) -> None:
        chunk = turn.prompt[turn.computed : turn.computed + tokens]
        if not self._extend(turn, turn.sequences[0], chunk):
            return
        turn.computed += len(chunk)
        new = max(0, turn.computed - turn.reached)
        turn.reached += new
        self._counts["computed_tokens"] += new
        self._count_again(turn, len(chunk) - new, computed_tokens=turn.record.computed_tokens + new)
        if not turn.prefills:
            turn.sequences += [turn.sequences[0].fork() for _ in turn.answers[1:]]
            self._pin(turn.talk)
            first = self._now if turn.record.first_token is None else turn.record.first_token
            self._tell(turn, phase="decode", first_token=first)
            self._say(turn)

    def _decode(self, turn: _Turn) -> None:
        """Compute what is sampled; behind a preemption that is all that was said before."""
        for index, sequence in enumerate(list(turn.sequences)):
            tokens = turn.missing(index)
            if tokens and not self._extend(turn, sequence, tokens):
                return
            self._count_again(turn, max(0, len(tokens) - 1))
        self._say(turn)

    def _say(self, turn: _Turn) -> None:
        """Sample a token of each answer, unless it has not been said again yet what was said before a preemption."""
        if all(len(turn.missing(index)) == 0 for index in range(len(turn.answers))):
            before, turn.said = turn.heard(), turn.said + 1
            self._counts["output_tokens"] += turn.heard() - before
        if turn.stopped or all(turn.said >= len(answer) for answer in turn.answers):
            self._finish(turn)

    def _extend(self, turn: _Turn, sequence: Sequence, tokens: array[int]) -> bool:
        """Commit tokens; while blocks run out the newest turn gives way, be it this one."""
        while True:
            try:
                sequence.extend(tokens)
            except OutOfBlocks:
                victim = self._running[-1]
                self._preempt(victim)
                if victim is turn:
                    return False
            else:
                sequence.commit()
                self._counts["step_tokens"] += len(tokens)
                return True

    def _preempt(self, turn: _Turn) -> None:
        for sequence in turn.sequences:
            sequence.close()
        self._running.remove(turn)
        self._waiting.appendleft(turn)
        self._counts["preemptions"] += 1
        self._tell(turn, phase="preempted", preemptions=turn.record.preemptions + 1, output_tokens=turn.heard())

    def _finish(self, turn: _Turn) -> None:
        for index, sequence in enumerate(turn.sequences):
            sequence.close(Hint(done=index > 0 or turn.talk.over))
        self._running.remove(turn)
        answer = turn.answers[0][: turn.said]
        phase: Phase = "cancelled" if turn.stopped else "finished"
        ended = "length" if len(answer) >= turn.record.max_tokens else "stop"
        self._counts[phase] += 1
        self._tell(
            turn,
            phase=phase,
            ended=self._now,
            finish="RequestCancelled" if turn.stopped else ended,
            output_tokens=turn.heard(),
        )
        self._workload.answered(turn.talk, answer, self._now)
        self._count_session(turn, live=-1, output_tokens=turn.record.output_tokens)

    def _pin(self, talk: Conversation) -> None:
        """Agents without a namespace have their system prompt pinned: they come back often, and wait for nothing."""
        key = talk.system.tobytes()
        if talk.kind is AGENT and talk.namespace is None and not (key in self._pins and self._pins[key].active):
            self._pins[key] = self._cache.pin(talk.system, ttl=PIN_SECONDS)

    # ---- what is told

    def _count_again(self, turn: _Turn, tokens: int, **new: Any) -> None:
        self._counts["recomputed_tokens"] += tokens
        if tokens or new:
            self._tell(turn, recomputed_tokens=turn.record.recomputed_tokens + tokens, **new)

    def _tell(self, turn: _Turn, phase: Phase | None = None, **new: Any) -> None:
        turn.record = replace(turn.record, phase=phase or turn.record.phase, **new)
        self._recorder.request(turn.record)

    def _count_session(self, turn: _Turn, **more: int) -> None:
        talk = turn.talk
        old = self._sessions.get(talk.number) or SessionRecord(
            talk.number, talk.namespace, 0, 0, 0, 0, 0, 0, self._now, self._now
        )
        counted = {name: getattr(old, name) + count for name, count in more.items()}
        closed = talk.over and counted.get("live", old.live) == 0
        new = replace(old, tokens=len(talk.history), used=self._now, closed=closed, **counted)
        self._sessions[talk.number] = new
        self._recorder.session(new)
        if closed:
            del self._sessions[talk.number]
