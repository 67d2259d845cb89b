"""A show that needs no engine: a made-up workload over the real prefix cache, told as an engine tells of itself.

Knows the cache, telemetry's recorder and the life of a request. Knows no model, no tensor and no screen: tokens are
made up, and nothing is computed; what is cached, shared, evicted and missed is as real as the cache is.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from radixkv.cache import Hint, PrefixCache, Sequence
from radixkv.errors import OutOfBlocks
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import Changes, EngineFacts, Phase, RequestRecord, SessionRecord
from radixkv_monitor.demo_workload import Conversation, Workload

PREFILL_RATE, DECODE_RATE = 4000.0, 45.0  # tokens a second: all prompts together, and each stream
MAX_SEQUENCES = 16
TICK = 0.05
"""Seconds of made-up time that one step of the made-up engine takes."""


@dataclass(eq=False)
class _Turn:
    """A request of the demo."""

    record: RequestRecord
    talk: Conversation
    prompt: array[int]
    answers: list[array[int]]
    sequences: list[Sequence] = field(default_factory=list)
    computed: int = 0  # tokens of the prompt that are committed
    reached: int = 0  # how far it was ever, so that what is computed again is told apart
    spoken: float = 0.0  # tokens of each answer that are due


class DemoSource:
    """An engine that is none: `step(now)` lets it live until `now` and returns what changed.

    The same seed and the same steps tell the same story. A minute of it costs some 0.3 s of one core.
    """

    def __init__(self, seed: int = 7, *, num_blocks: int = 4096, sessions: int = 40, started: float = 0.0) -> None:
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
            max_length=8192,
            max_sequences=MAX_SEQUENCES,
            max_batch_tokens=2048,
            prefill_chunk=512,
        )
        self._now = started
        self._recorder = Recorder(clock=lambda: self._now)
        self._cache = PrefixCache(num_blocks, 16, clock=lambda: self._now)
        self._recorder.attach(self._cache)
        self._workload = Workload(seed, sessions)
        self._waiting: deque[_Turn] = deque()
        self._running: list[_Turn] = []
        self._counts = dict.fromkeys(
            ("finished", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "recomputed_tokens"), 0
        )
        self._counts |= dict.fromkeys(("steps", "preemptions", "step_tokens", "cancelled", "failed"), 0)
        self._requests = 0
        self._sessions: dict[int, SessionRecord] = {}

    def step(self, now: float) -> Changes:
        """Live until `now`; a leap of more than a minute is cut to one."""
        self._now = max(self._now, now - 60.0)
        while self._now < now:
            self._now = min(now, self._now + TICK)
            self._live(TICK)
        return self._recorder.collect(self._stats(), self._owners())

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
            "step_seconds": self._counts["steps"] * TICK,
        }
        return {name: float(value) for name, value in (self._counts | gauges).items()}

    # ---- the made-up engine's step

    def _live(self, seconds: float) -> None:
        for talk in self._workload.due(self._now - self.facts.started):
            self._submit(talk)
        self._admit()
        self._counts["steps"] += bool(self._running)
        budget = int(PREFILL_RATE * seconds)
        for turn in list(self._running):
            if turn not in self._running:
                continue  # it gave way to one before it
            if turn.computed < len(turn.prompt):
                budget -= self._prefill(turn, budget)
            else:
                self._decode(turn, seconds)

    def _submit(self, talk: Conversation) -> None:
        prompt, tries = talk.ask(), talk.tries()
        answers = [self._workload.new_tokens(talk.answer_length()) for _ in range(tries)]
        self._requests += 1
        record = RequestRecord(
            number=self._requests,
            phase="waiting",
            session=talk.number,
            namespace=talk.namespace,
            priority=0,
            streams=tries,
            prompt_tokens=len(prompt),
            max_tokens=max(map(len, answers)),
            cached_tokens=0,
            computed_tokens=0,
            recomputed_tokens=0,
            output_tokens=0,
            preemptions=0,
            coalesced=False,
            submitted=self._now,
        )
        turn = _Turn(record, talk, prompt, answers)
        self._waiting.append(turn)
        self._tell(turn)
        self._count_session(turn, requests=1, live=1)

    def _admit(self) -> None:
        while self._waiting and sum(turn.record.streams for turn in self._running) < MAX_SEQUENCES:
            turn = self._waiting[0]
            room = self._cache.free_blocks + self._cache.evictable_blocks
            if self._running and room < len(turn.prompt) // 16 + 2 * len(self._running):
                return
            self._waiting.popleft()
            self._open(turn)

    def _open(self, turn: _Turn) -> None:
        why = self._cache.explain(turn.prompt, turn.talk.namespace)
        again = turn.record.preemptions > 0
        limit = len(turn.prompt) - 1  # the last token is always computed: its logits are what is asked for
        sequence = self._cache.open(
            turn.prompt, turn.talk.namespace, limit=limit, purpose="resume" if again else "request"
        )
        turn.sequences, turn.computed, turn.spoken = [sequence], sequence.length, 0.0
        self._running.append(turn)
        gained, turn.reached = max(0, sequence.length - turn.reached), max(sequence.length, turn.reached)
        if again:
            self._counts["cached_tokens"] += gained  # somebody else computed what it would have
            self._tell(turn, phase="prefill", cached_tokens=turn.record.cached_tokens + gained)
            return
        self._counts["prompt_tokens"] += len(turn.prompt)
        self._counts["cached_tokens"] += sequence.length
        self._tell(
            turn,
            phase="prefill",
            cached_tokens=sequence.length,
            admitted=self._now,
            miss_reason=why.reason,
            miss_at=None if why.reason == "full" else why.length,
            miss_evicted_tokens=why.evicted_tokens,
            miss_evicted_ago=why.evicted_ago,
            miss_pressure=why.pressure,
        )
        self._count_session(turn, prompt_tokens=len(turn.prompt), cached_tokens=sequence.length)

    def _prefill(self, turn: _Turn, budget: int) -> int:
        chunk = turn.prompt[turn.computed : turn.computed + min(512, budget)]
        if not chunk or not self._extend(turn, turn.sequences[0], chunk):
            return 0
        turn.computed += len(chunk)
        new = max(0, turn.computed - turn.reached)
        turn.reached += new
        self._counts["computed_tokens"] += new
        self._counts["recomputed_tokens"] += len(chunk) - new
        self._tell(
            turn,
            computed_tokens=turn.record.computed_tokens + new,
            recomputed_tokens=turn.record.recomputed_tokens + len(chunk) - new,
        )
        if turn.computed == len(turn.prompt):
            turn.sequences += [turn.sequences[0].fork() for _ in turn.answers[1:]]
            first = turn.record.first_token or self._now
            self._tell(turn, phase="decode", first_token=first)
        return len(chunk)

    def _decode(self, turn: _Turn, seconds: float) -> None:
        turn.spoken += DECODE_RATE * seconds
        for sequence, answer in zip(list(turn.sequences), turn.answers, strict=True):
            said = sequence.length - len(turn.prompt)
            more = answer[said : int(turn.spoken)]
            if more and not self._extend(turn, sequence, more):
                return
            self._counts["output_tokens"] += len(more)
        spoken = sum(sequence.length - len(turn.prompt) for sequence in turn.sequences)
        self._tell(turn, output_tokens=max(spoken, turn.record.output_tokens))
        if all(len(answer) <= turn.spoken for answer in turn.answers):
            self._finish(turn)

    def _extend(self, turn: _Turn, sequence: Sequence, tokens: array[int]) -> bool:
        """Commit tokens; when blocks run out the newest other turn gives way, and at last this one."""
        while True:
            try:
                sequence.extend(tokens)
            except OutOfBlocks:
                victim = next((each for each in reversed(self._running) if each is not turn), turn)
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
        self._tell(turn, phase="preempted", preemptions=turn.record.preemptions + 1)

    def _finish(self, turn: _Turn) -> None:
        for index, sequence in enumerate(turn.sequences):
            sequence.close(Hint(done=index > 0 or turn.talk.over))
        self._running.remove(turn)
        self._counts["finished"] += 1
        self._tell(turn, phase="finished", ended=self._now, finish="stop")
        self._workload.answered(turn.talk, turn.answers[0], self._now - self.facts.started)
        self._count_session(turn, live=-1, output_tokens=turn.record.output_tokens)

    # ---- what is told

    def _tell(self, turn: _Turn, phase: Phase | None = None, **new: object) -> None:
        turn.record = replace(turn.record, phase=phase or turn.record.phase, **new)  # type: ignore[arg-type]
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
