"""Record an engine's requests, sessions and counters for telemetry.

Every method runs on the engine's thread. Between two frames a request costs a few appends; its record is built when a
frame is collected. A fault in this module is logged and ends the recording, never a request.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from radixkv.cache import Explanation, Sequence
from radixkv.disk import DiskStats
from radixkv.engine.observers import EngineObserver
from radixkv.engine.request import Request, TokenIds
from radixkv.engine.request_facts import Origin
from radixkv.errors import RequestCancelled
from radixkv.telemetry.mirror import SESSIONS, keep_newest
from radixkv.telemetry.records import (
    ITL_NAMES,
    PREEMPTIONS,
    Changes,
    Phase,
    RequestRecord,
    SessionRecord,
    drawable,
    namespace_label,
)

if TYPE_CHECKING:
    from radixkv.engine.core import Core
    from radixkv.telemetry.recorder import Recorder


_DISK_STATS = tuple((each.name, f"disk.{each.name}") for each in fields(DiskStats))
LONGEST_NAME = 128
"""The characters of a name of a request's sender."""
_log = logging.getLogger(__name__)
Facts = ParamSpec("Facts")


def _guarded(
    method: Callable[Concatenate[RequestRecorder, Facts], None],
) -> Callable[Concatenate[RequestRecorder, Facts], None]:
    """Log the first exception of a method, and record no request after it."""

    @wraps(method)
    def guarded(self: RequestRecorder, /, *facts: Facts.args, **more: Facts.kwargs) -> None:
        if not self.failed:
            begun = time.perf_counter_ns()
            try:
                method(self, *facts, **more)
            except Exception:
                self.failed = True
                _log.exception("telemetry failed: requests are no longer recorded")
            self.cost_ns += time.perf_counter_ns() - begun

    return guarded


class RequestRecorder(EngineObserver):
    """Adds the requests, sessions and counters of an engine to the records of its cache."""

    def __init__(self, core: Core, recorder: Recorder, constants: Mapping[str, float]) -> None:
        """Observe `core` from now on; `recorder` must observe its cache. `constants` are sent with the counters."""
        self.failed = False
        self.cost_ns = 0  # of this object's methods; `recorder` counts its own
        self.cache_recorder = recorder
        self._core = core
        self._constants = constants
        self._started = time.perf_counter()
        self._offset = time.time() - self._started
        self._sessions = Sessions()
        # Since the last frame, or at it.
        self._queued: dict[Request, None] = {}
        self._preempted: dict[Request, list[float]] = {}  # begin, end, begin, end, ...; by perf_counter
        self._running: list[Request] = []
        self._waits_for: dict[Request, str | None] = {}  # the first request of the wait queue, and why it waits
        self._steps = -1
        self._reuses = core.config.prefix_cache
        core.observers.append(self)

    # ---- as an observer

    @_guarded
    def added(self, request: Request) -> None:
        """Note a new request, and count it in its session."""
        self._queued[request] = None
        self._record_session(self._sessions.began(request, request.reported.submitted + self._offset))

    @_guarded
    def opened(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> None:
        """Record where the prompt of a new request diverges from cached ones."""
        self._end_preemption(request)
        miss = request.reported.miss
        if not request.streams and miss is not None and miss.reason == "diverged" and not miss.host:
            self.cache_recorder.difference(request.scheduling.number, tokens, request.namespace, miss.matched)

    @_guarded
    def preempted(self, request: Request) -> None:
        """Note when a request was preempted."""
        times = self._preempted.setdefault(request, [])
        del times[: -2 * (PREEMPTIONS - 1)]
        times.append(time.perf_counter())

    @_guarded
    def ended(self, request: Request, error: Exception | None) -> None:
        """Record the end of a request."""
        self._queued.pop(request, None)
        self._waits_for.pop(request, None)
        now = time.perf_counter()
        phase: Phase = "finished" if error is None else "cancelled" if isinstance(error, RequestCancelled) else "failed"
        finish = request.streams[0].finish_reason if error is None else type(error).__name__
        self._end_preemption(request)
        self.cache_recorder.request(self._record(request, phase, now, finish))
        self._preempted.pop(request, None)
        self._record_session(self._sessions.ended(request, now + self._offset))

    @_guarded
    def session_closed(self, number: int) -> None:
        """Record the end of a conversation."""
        self._record_session(self._sessions.closed(number))

    # ---- frames

    @property
    def pending(self) -> bool:
        """Whether anything has changed since the last `collect`. Any thread may read this."""
        return self._core.counters.steps != self._steps or bool(self._queued) or self.cache_recorder.pending

    def collect(self) -> Changes:
        """Return the changes since the last call. O(changes + running requests), and a match if a request waits."""
        begun = time.perf_counter_ns()
        scheduler, before = self._core.scheduler, self._waits_for
        running = list(scheduler.running)
        self._waits_for = dict.fromkeys(islice(scheduler.waiting, 1), scheduler.head_waits_for)
        for request in dict.fromkeys((*self._queued, *self._running, *running, *before, *self._waits_for)):
            if not request.channel.ended:
                self.cache_recorder.request(self._record(request, _phase(request, running)))
        self._queued, self._running = {}, running
        stats, owners = self._stats(), dict(_owners(running))
        self.cost_ns += time.perf_counter_ns() - begun
        return self.cache_recorder.collect(stats, owners)

    # ---- inside

    def _stats(self) -> dict[str, float]:
        core, counters, disk = self._core, self._core.counters, self._core.records.stats()
        self._steps = counters.steps
        return {
            **vars(counters),
            **{sent_name: getattr(disk, name) for name, sent_name in _DISK_STATS if disk.slots},
            "prefill_tokens": counters.computed_tokens + counters.recomputed_tokens - counters.decode_tokens,
            **dict(zip(ITL_NAMES, core.token_times.histogram.counts, strict=True)),
            **core.runner.stats(),
            **self._constants,
            "uptime_s": time.perf_counter() - self._started,
            "waiting": len(core.scheduler.waiting),
            "running": len(core.scheduler.running),
            "step_seconds": core.step_seconds,
            "step_tokens": core.step_tokens,
            "monitor_ns": self.cost_ns,
        }

    def _end_preemption(self, request: Request) -> None:
        times = self._preempted.get(request)
        if times is not None and len(times) % 2:
            times.append(time.perf_counter())

    def _record_session(self, record: SessionRecord | None) -> None:
        if record is not None:
            self.cache_recorder.session(record)

    def _record(
        self, request: Request, phase: Phase, ended: float | None = None, finish: str | None = None
    ) -> RequestRecord:
        streams, miss, submitted = request.streams, request.reported.miss, request.reported.submitted
        first_tokens = [stream.times.first_token for stream in streams if stream.times.first_token is not None]
        return RequestRecord(
            number=request.scheduling.number,
            phase=phase,
            session=request.session,
            namespace=namespace_label(request.namespace),
            priority=request.priority,
            streams=request.replies.width,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            cached_tokens=streams[0].counts.cached_tokens if streams else 0,
            computed_tokens=request.replies.computed_tokens(request),
            recomputed_tokens=sum(stream.counts.recomputed_tokens for stream in streams),
            output_tokens=sum(stream.output_length for stream in streams),
            preemptions=request.scheduling.preemptions,
            coalesced=request.reported.coalesced,
            submitted=submitted + self._offset,
            admitted=self._dated(request.reported.started_at),
            first_token=self._dated(min(first_tokens, default=None)),
            ended=self._dated(ended),
            finish=finish,
            host_tokens=streams[0].counts.host_hits if streams else 0,
            disk_tokens=request.reported.disk_tokens,
            waits_for=self._waits_for.get(request),
            drafted_tokens=sum(stream.counts.drafts.get("drafted_tokens", 0) for stream in streams),
            accepted_tokens=sum(stream.counts.drafts.get("accepted_tokens", 0) for stream in streams),
            preempted_ms=tuple(round((at - submitted) * 1e3) for at in self._preempted.get(request, ())),
            changed_part=request.origin.changed_part,
            changed_rule=request.origin.changed_rule,
            **(_miss(miss) if miss is not None else {"miss_reason": "full" if streams and self._reuses else None}),
            **_names(request.origin),
        )

    def _dated(self, at: float | None) -> float | None:
        return None if at is None else at + self._offset


def _names(origin: Origin) -> dict[str, Any]:
    """Return the fields of a record that name the sender, in a bounded length."""
    values = {"request_id": origin.request_id, "tenant": origin.tenant, "label": origin.label}
    return {name: value and drawable(value[:LONGEST_NAME]) for name, value in values.items()}


def _miss(miss: Explanation) -> dict[str, Any]:
    """Return the fields of a record that explain a miss. Texts are added when it is collected.

    Monitors read a closed list of reasons, without "no_state": the reason why the cached KV ends is sent then, and the
    number of tokens with cached KV that are computed again, except the prompt's last.
    """
    without_state, reason = 0, miss.reason
    if miss.reason == "no_state":
        without_state = min(miss.reached, miss.tokens - 1) - miss.length - miss.host
        reason = miss.kv_reason or "never_seen"
    return {
        "miss_reason": reason,
        "miss_at": miss.length + miss.host + without_state,
        "miss_evicted_tokens": miss.evicted_tokens,
        "miss_evicted_ago": miss.evicted_ago,
        "miss_pressure": miss.pressure,
        "miss_without_state": without_state,
        "cached_text": "" if miss.reason == "diverged" else None,
    }


def _phase(request: Request, running: list[Request]) -> Phase:
    if request not in running:
        return "preempted" if request.scheduling.preemptions else "waiting"
    if request.channel.paused:
        return "paused"
    return "prefill" if any(stream.prefilling for stream in request.live if stream.active) else "decode"


def _owners(running: list[Request]) -> Iterable[tuple[int, tuple[int, int]]]:
    """Yield the id of each open sequence, the number of its request, and the index of its stream."""
    for request in running:
        for stream in request.streams:
            yield stream.sequence.id, (request.scheduling.number, stream.index)


class Sessions:
    """Counters of the conversations that were used last; an older one starts from zero if it is used again."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, SessionRecord] = OrderedDict()

    def began(self, request: Request, now: float) -> SessionRecord | None:
        """Count a new request; returns None if it belongs to no conversation."""
        if request.session is None:
            return None
        old = self._records.get(request.session) or SessionRecord(
            request.session, namespace_label(request.namespace), 0, 0, 0, 0, 0, 0, started=now, used=now
        )
        return self._keep(
            replace(
                old,
                requests=old.requests + 1,
                live=old.live + 1,
                tokens=len(request.prompt),
                used=now,
                **_names(request.origin),
            )
        )

    def ended(self, request: Request, now: float) -> SessionRecord | None:
        """Count the tokens of a request that ended, with or without an error."""
        old = None if request.session is None else self._records.get(request.session)
        if old is None:
            return None
        first = request.streams[0] if request.streams else None
        output = 0 if first is None else first.output_length
        prompt, cached = 0, 0  # unless the prompt was computed
        if request.reported.counted:
            prompt, cached = len(request.prompt), 0 if first is None else first.counts.cached_tokens
        return self._keep(
            replace(
                old,
                live=max(old.live - 1, 0),
                tokens=len(request.prompt) + output,
                prompt_tokens=old.prompt_tokens + prompt,
                cached_tokens=old.cached_tokens + cached,
                output_tokens=old.output_tokens + sum(stream.output_length for stream in request.streams),
                used=now,
            )
        )

    def closed(self, number: int) -> SessionRecord | None:
        """Mark a conversation as closed; returns None if it had no request."""
        old = self._records.get(number)
        return None if old is None else self._keep(replace(old, closed=True))

    def _keep(self, record: SessionRecord) -> SessionRecord:
        keep_newest(self._records, record.number, record, SESSIONS)
        return record
