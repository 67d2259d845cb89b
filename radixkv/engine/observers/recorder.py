"""Record an engine's requests, sessions and counters for telemetry.

Every method runs on the engine's thread. Between two frames a request costs a few appends; its record is built when a
frame is collected. A fault in this module is logged and ends the recording, never a request.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from radixkv.cache import Sequence
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, TokenIds
from radixkv.errors import RequestCancelled
from radixkv.telemetry.mirror import SESSIONS
from radixkv.telemetry.records import Changes, Phase, RequestRecord, SessionRecord, namespace_label

if TYPE_CHECKING:
    from radixkv.engine.core import Core
    from radixkv.telemetry.recorder import Recorder


_log = logging.getLogger(__name__)
Facts = ParamSpec("Facts")


def _harmless(
    tell: Callable[Concatenate[RequestRecorder, Facts], None],
) -> Callable[Concatenate[RequestRecorder, Facts], None]:
    """What `tell` raises is logged, once; nothing more is told then."""

    @wraps(tell)
    def told(self: RequestRecorder, /, *facts: Facts.args, **more: Facts.kwargs) -> None:
        if not self.failed:
            begun = time.perf_counter_ns()
            try:
                tell(self, *facts, **more)
            except Exception:
                self.failed = True
                _log.exception("telemetry failed: requests are told no more")
            self.cost_ns += time.perf_counter_ns() - begun

    return told


class RequestRecorder(EngineObserver):
    """One engine's requests, sessions and counters for a recorder, which must watch the engine's cache."""

    def __init__(self, core: Core, recorder: Recorder, constants: Mapping[str, float]) -> None:
        """Be told by `core` from now on. `constants` go with the counters."""
        self.failed = False
        self.cost_ns = 0  # of being told; the recorder counts its own
        self.cache_recorder = recorder
        self._core = core
        self._constants = constants
        self._started = time.perf_counter()
        self._offset = time.time() - self._started
        self._sessions = Sessions()
        self._noted: dict[Request, None] = {}  # new since the last look
        self._ran: list[Request] = []  # at the last look
        self._steps = -1  # at the last look
        self._reuses = core.config.prefix_cache
        core.observers.append(self)

    # ---- being told

    @_harmless
    def added(self, request: Request) -> None:
        """A request waits."""
        self._noted[request] = None
        self._tell_session(self._sessions.asked(request, request.submitted + self._offset))

    @_harmless
    def opened(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> None:
        """A request came in: why it hit no more is known now only. Costs a match where anything is missing."""
        if not request.streams and sequence.length < len(tokens) - 1:
            request.miss = self._core.cache.explain(tokens, request.namespace, limit)

    @_harmless
    def ended(self, request: Request, error: Exception | None) -> None:
        """A request ended, with an error or without."""
        self._noted.pop(request, None)
        now = time.perf_counter()
        phase: Phase = "finished" if error is None else "cancelled" if _is_cancel(error) else "failed"
        finish = request.streams[0].finish_reason if error is None else type(error).__name__
        self.cache_recorder.request(self._record(request, phase, now, finish))
        self._tell_session(self._sessions.answered(request, now + self._offset))

    @_harmless
    def session_closed(self, number: int) -> None:
        """A conversation is over."""
        self._tell_session(self._sessions.closed(number))

    # ---- being asked

    @property
    def pending(self) -> bool:
        """Whether anything has changed since the last `collect`. Any thread may ask."""
        return self._core.counters.steps != self._steps or bool(self._noted) or self.cache_recorder.pending

    def collect(self) -> Changes:
        """What changed since the last time. O(that, and what runs)."""
        begun = time.perf_counter_ns()
        running = list(self._core.scheduler.running)
        for request in dict.fromkeys((*self._noted, *self._ran, *running)):
            if not request.channel.ended:
                self.cache_recorder.request(self._record(request, _phase(request, running)))
        self._noted, self._ran = {}, running
        stats, owners = self._stats(), dict(_owners(running))
        self.cost_ns += time.perf_counter_ns() - begun
        return self.cache_recorder.collect(stats, owners)

    # ---- inside

    def _stats(self) -> dict[str, float]:
        core = self._core
        self._steps = core.counters.steps
        return {
            **vars(core.counters),
            **self._constants,
            "uptime_s": time.perf_counter() - self._started,
            "waiting": len(core.scheduler.waiting),
            "running": len(core.scheduler.running),
            "step_seconds": core.step_seconds,
            "step_tokens": core.step_tokens,
            "monitor_ns": self.cost_ns,
        }

    def _tell_session(self, record: SessionRecord | None) -> None:
        if record is not None:
            self.cache_recorder.session(record)

    def _record(
        self, request: Request, phase: Phase, ended: float | None = None, finish: str | None = None
    ) -> RequestRecord:
        streams, miss = request.streams, request.miss
        first_tokens = [stream.first_token_at for stream in streams if stream.first_token_at is not None]
        return RequestRecord(
            number=request.number,
            phase=phase,
            session=request.session,
            namespace=namespace_label(request.namespace),
            priority=request.priority,
            streams=request.width,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            cached_tokens=streams[0].cached_tokens if streams else 0,
            computed_tokens=sum(stream.reached - stream.cached_tokens for stream in streams),
            recomputed_tokens=sum(stream.recomputed_tokens for stream in streams),
            output_tokens=sum(stream.output_length for stream in streams),
            preemptions=request.preemptions,
            coalesced=request.coalesced,
            submitted=request.submitted + self._offset,
            admitted=self._dated(request.started_at),
            first_token=self._dated(min(first_tokens, default=None)),
            ended=self._dated(ended),
            finish=finish,
            miss_reason=miss.reason
            if miss is not None
            else "full"
            if streams and self._core.config.prefix_cache
            else None,
            miss_at=None if miss is None else miss.length,
            miss_evicted_tokens=0 if miss is None else miss.evicted_tokens,
            miss_evicted_ago=None if miss is None else miss.evicted_ago,
            miss_pressure=None if miss is None else miss.pressure,
        )

    def _dated(self, at: float | None) -> float | None:
        return None if at is None else at + self._offset


def _phase(request: Request, running: list[Request]) -> Phase:
    if request not in running:
        return "preempted" if request.preemptions else "waiting"
    if request.channel.paused:
        return "paused"
    return "prefill" if any(stream.prefilling for stream in request.live if stream.active) else "decode"


def _owners(running: list[Request]) -> Iterable[tuple[int, tuple[int, int]]]:
    """Whose each open sequence is: the number of a request, and which of its streams."""
    for request in running:
        for stream in request.streams:
            yield stream.sequence.id, (request.number, stream.index)


def _is_cancel(error: Exception) -> bool:
    return isinstance(error, RequestCancelled)


class Sessions:
    """Those that were used last, by number; one that was forgotten and speaks again begins anew."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, SessionRecord] = OrderedDict()

    def asked(self, request: Request, now: float) -> SessionRecord | None:
        """A request came in; None if it is no session's."""
        if request.session is None:
            return None
        old = self._known.get(request.session) or _new(request.session, namespace_label(request.namespace), now)
        return self._keep(
            replace(old, requests=old.requests + 1, live=old.live + 1, tokens=len(request.prompt), used=now)
        )

    def answered(self, request: Request, now: float) -> SessionRecord | None:
        """A request ended, well or not."""
        old = None if request.session is None else self._known.get(request.session)
        if old is None:
            return None
        first = request.streams[0] if request.streams else None
        said = 0 if first is None else first.output_length
        return self._keep(
            replace(
                old,
                live=max(old.live - 1, 0),
                tokens=len(request.prompt) + said,
                prompt_tokens=old.prompt_tokens + (len(request.prompt) if request.counted else 0),
                cached_tokens=old.cached_tokens + (first.cached_tokens if first is not None and request.counted else 0),
                output_tokens=old.output_tokens + sum(stream.output_length for stream in request.streams),
                used=now,
            )
        )

    def closed(self, number: int) -> SessionRecord | None:
        """A conversation is over; None if it never asked for anything."""
        old = self._known.get(number)
        return None if old is None else self._keep(replace(old, closed=True))

    def _keep(self, record: SessionRecord) -> SessionRecord:
        self._known[record.number] = record
        self._known.move_to_end(record.number)
        if len(self._known) > SESSIONS:
            self._known.popitem(last=False)
        return record


def _new(number: int, namespace: str | None, now: float) -> SessionRecord:
    return SessionRecord(number, namespace, 0, 0, 0, 0, 0, 0, started=now, used=now)
