"""Counters over time: samples of the last ten minutes, growth between two times, and sums over the last minute.

A counter between two samples lies on a straight line, and keeps its last value after the newest. Sums combine counters,
which are exact while the monitor is attached, with the newest few hundred records, which reach further back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from radixkv.telemetry.mirror import ENDED_REQUESTS
from radixkv.telemetry.records import RequestRecord
from radixkv_monitor.state import Sample, State

SECONDS = 600.0
"""How many seconds samples go back."""

_time = attrgetter("time")


class Sampler:
    """Keep about one sample a second for `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._kept: list[Sample] = []
        self._newest: Sample | None = None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The kept samples, oldest first, and the newest. O(samples)."""
        return (*self._kept, self._newest) if self._newest is not None else ()

    def note(self, time: float, engine: str, stats: Mapping[str, float], *, unseen: bool = False) -> None:
        """Add a copy of `stats`. O(stats).

        Growth since the previous call happened just now, because an engine sends nothing while nothing changes. If that
        time was `unseen`, the growth is spread evenly over it.
        """
        newest, self._newest = self._newest, Sample(time, engine, dict(stats))
        if newest is not None and time < newest.time:
            self._kept.clear()  # the clock was set back, or this is another recording: no line joins both
        elif newest is not None:
            self._keep(newest, time, held=not unseen)
        oldest = bisect_right(self._kept, time - self._seconds, key=_time)
        del self._kept[: max(0, oldest - 1)]  # keep one older sample, so that the line reaches the edge

    def _keep(self, newest: Sample, time: float, *, held: bool) -> None:
        """Keep the newest sample if a second has passed, and repeat it before `time` if it `held` until then."""
        if not self._kept or newest.time - self._kept[-1].time >= 1:
            self._kept.append(newest)
        if held and time - newest.time > 2:
            if self._kept[-1] is not newest:
                self._kept.append(newest)
            self._kept.append(Sample(time - 1, newest.engine, newest.stats))


def value(history: Sequence[Sample], name: str, time: float) -> float:
    """Return a counter's value at `time`: the first sample's before it, 0 for unknown names. O(log n)."""
    if not history:
        return 0.0
    behind = bisect_right(history, time, key=_time)
    left = history[max(behind - 1, 0)]
    low = left.stats.get(name, 0.0)
    if behind in (0, len(history)):
        return low
    right = history[behind]
    high = right.stats.get(name, 0.0)
    if right.engine != left.engine:
        return low
    return low + (high - low) * (time - left.time) / (right.time - left.time)


def of_one_engine(history: Sequence[Sample]) -> Sequence[Sample]:
    """Return the newest samples of one engine, because another engine's counters start at 0. O(log n)."""
    if not history:
        return history
    first = next((at for at in range(len(history) - 1, 0, -1) if history[at - 1].engine != history[at].engine), 0)
    return history[first:]


def grown(history: Sequence[Sample], name: str, now: float, seconds: float) -> float:
    """Return a counter's growth in the `seconds` before `now`, at least 0. `history` is of one engine."""
    return max(0.0, value(history, name, now) - value(history, name, now - seconds))


def rate(history: Sequence[Sample], name: str, now: float, seconds: float) -> float:
    """Return growth per second over the last `seconds`, or over the part that was sampled; 0 without samples."""
    seen = min(seconds, now - history[0].time) if history else 0.0
    return grown(history, name, now, seconds) / seen if seen > 0 else 0.0


def series(history: Sequence[Sample], name: str, now: float, seconds: float, points: int) -> list[float]:
    """Return a counter's growth in each of `points` equal parts of the last `seconds`, oldest first."""
    if points <= 0:
        return []
    edges = [value(history, name, now - seconds * (points - at) / points) for at in range(points + 1)]
    return [max(0.0, right - left) for left, right in pairwise(edges)]


def gauges(history: Sequence[Sample], name: str, now: float, seconds: float, points: int) -> list[float | None]:
    """Return a gauge's value at the end of each part; None before the first sample."""
    if not history:
        return [None] * points
    times = [now - seconds * (points - at - 1) / points for at in range(points)]
    return [value(history, name, time) if time >= history[0].time else None for time in times]


MINUTE, MOMENT = 60.0, 10.0
"""The seconds that sums cover, and those that rates cover."""
_LEAST = 1.0  # the least seconds of samples for a rate


@dataclass(frozen=True, slots=True)
class LastMinute:
    """Sums over the last minute; counters cover `watched` of its seconds, and these or the records `covered` of them.

    `host_tokens` is the part of the cached tokens that was loaded from host memory. The counter of loaded tokens
    includes preempted requests. So the part comes from the recorded requests. `failed` excludes
    the requests whose own timeout ended them.
    """

    watched: float
    covered: float
    prompt_tokens: float
    cached_tokens: float
    host_tokens: float
    ended: int
    failed: int
    timed_out: int
    cancelled: int
    preemptions: int
    query_tokens: float
    regret_tokens: float


def samples_since_start(state: State, seconds: float) -> Sequence[Sample]:
    """Return the samples of this engine for sums over the last `seconds`.

    If it started in that time, the first sample has zeros at its start, so that growth before the monitor attached is
    included. Of an older engine this growth has no known time, and is left out.
    """
    history = of_one_engine(state.history)
    born = state.facts.started
    if history and state.now - seconds <= born < history[0].time:
        return (Sample(born, state.facts.engine, {}), *history)
    return history


def last_minute(state: State, history: Sequence[Sample]) -> LastMinute:
    """Sum over the counters and over the records, and take the larger one: neither overstates. O(records)."""
    since, now = state.now - MINUTE, state.now

    def growth(name: str) -> float:
        return grown(history, name, state.now, MINUTE)

    def is_recent(when: float | None) -> bool:
        return when is not None and since <= when <= now  # a clock that was set back leaves later times

    ended = [each for each in state.ended.values() if is_recent(each.ended)]
    requests = (*state.ended.values(), *state.live.values())
    prompt, cached, host = _prompts(each for each in requests if is_recent(each.admitted))
    wanted = sum(each.tokens for each in state.evictions.values() if is_recent(each.wanted_again))
    queried = max(growth("cache.query_tokens"), prompt)
    if growth("prompt_tokens") >= prompt:
        part = host / cached if cached else 0.0
        prompt, cached = growth("prompt_tokens"), growth("cached_tokens")
        host = part * cached
    timed_out = max(sum(each.timed_out for each in ended), round(growth("timed_out")))
    failed = max(sum(each.phase == "failed" for each in ended), round(growth("failed")))
    watched = min(MINUTE, state.now - history[0].time) if history else 0.0
    oldest = min((each.ended for each in state.ended.values() if each.ended is not None), default=since)
    preemptions = _preemptions(history, growth("preemptions"), requests, is_recent, now)
    recorded = min(MINUTE, max(0.0, now - oldest)) if len(state.ended) >= ENDED_REQUESTS else MINUTE
    return LastMinute(
        watched=watched,
        covered=max(watched, recorded),
        prompt_tokens=prompt,
        cached_tokens=cached,
        host_tokens=min(host, cached),
        ended=max(len(ended), round(growth("finished") + growth("failed") + growth("cancelled"))),
        failed=max(0, failed - timed_out),
        timed_out=timed_out,
        cancelled=max(sum(each.phase == "cancelled" for each in ended), round(growth("cancelled"))),
        preemptions=preemptions,
        query_tokens=queried,
        regret_tokens=max(growth("cache.regret_tokens"), wanted),
    )


def sampled(state: State, history: Sequence[Sample]) -> float:
    """Return the seconds that `per_second` covers; 0 if there is no rate yet."""
    seen = state.now - history[0].time if history else 0.0
    return min(seen, MOMENT) if seen >= _LEAST else 0.0


def per_second(state: State, history: Sequence[Sample], name: str) -> float | None:
    """Return recent growth per second; None if there was less than a second of samples."""
    return rate(history, name, state.now, MOMENT) if sampled(state, history) else None


def evicted_per_second(state: State) -> float:
    """Return the tokens that were evicted per second, by the records."""
    since = state.now - MOMENT
    return sum(each.tokens for each in state.evictions.values() if since <= each.time <= state.now) / MOMENT


def _prompts(requests: Iterable[RequestRecord]) -> tuple[float, float, float]:
    """Return the prompt tokens, the cached tokens and the tokens loaded from the host."""
    admitted = list(requests)
    prompt, cached = sum(each.prompt_tokens for each in admitted), sum(each.cached_tokens for each in admitted)
    return prompt, cached, sum(each.host_tokens for each in admitted)


def _preemptions(
    history: Sequence[Sample],
    counted: float,
    requests: Iterable[RequestRecord],
    is_recent: Callable[[float | None], bool],
    now: float,
) -> int:
    """Count preemptions by the counters if they cover the minute, else by the requests.

    An older engine sends no times of preemptions; the preemptions of a request that ran in the minute are counted then.
    """
    if history and now - history[0].time >= MINUTE:
        return round(counted)
    recorded = 0
    for each in requests:
        if each.preempted_ms:
            recorded += sum(is_recent(each.submitted + begin / 1000) for begin in each.preempted_ms[::2])
        elif each.live or is_recent(each.ended):
            recorded += each.preemptions
    return max(round(counted), recorded)
