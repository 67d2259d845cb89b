"""Counters over time: samples of the last ten minutes, and how much a counter grew between two times.

Knows samples. Knows no records, no feed and no screen; the functions are pure. A counter is read between two samples by
a straight line, and holds its last value behind the newest.

What happened in the last minute: by the counters, and by what records remember of a time before anybody watched.

Knows states; every function is pure. Counters are exact for as long as somebody watched, from an engine's birth on if
it is that young. Records are there from the first look on, but only the newest few hundred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from radixkv.telemetry.records import RequestRecord
from radixkv_monitor.state import Sample, State

SECONDS = 600.0
"""How far back samples go."""

_time = attrgetter("time")


class Sampler:
    """Keeps about one sample a second of what it is told, for `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._kept: list[Sample] = []
        self._newest: Sample | None = None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What is kept, oldest first, and what was told last. O(samples)."""
        return (*self._kept, self._newest) if self._newest is not None else ()

    def note(self, time: float, engine: str, stats: Mapping[str, float], *, unseen: bool = False) -> None:
        """Be told of `stats`; they are copied. O(stats).

        What they grew by since the last time they grew just now, as silence says that nothing changes; or, if that
        time went `unseen`, steadily.
        """
        newest, self._newest = self._newest, Sample(time, engine, dict(stats))
        if newest is not None and time < newest.time:
            self._kept.clear()  # a clock that was set back, or another recording: no line leads through both
        elif newest is not None:
            self._keep(newest, time, held=not unseen)
        oldest = bisect_right(self._kept, time - self._seconds, key=_time)
        del self._kept[: max(0, oldest - 1)]  # one from before, so that the line reaches the edge

    def _keep(self, newest: Sample, time: float, *, held: bool) -> None:
        """Keep what was newest until now if a second has passed, and that it held while nobody said otherwise."""
        if not self._kept or newest.time - self._kept[-1].time >= 1:
            self._kept.append(newest)
        if held and time - newest.time > 2:
            if self._kept[-1] is not newest:
                self._kept.append(newest)
            self._kept.append(Sample(time - 1, newest.engine, newest.stats))


def value(history: Sequence[Sample], name: str, time: float) -> float:
    """What a counter was at `time`; before the first sample it is the first one's, unknown names are 0. O(log n)."""
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
    """The newest samples that are of one engine: counters begin anew in another. O(log n)."""
    if not history:
        return history
    first = next(
        (at for at in range(len(history) - 1, 0, -1) if history[at - 1].engine != history[at].engine),
        0,
    )
    return history[first:]


def grown(history: Sequence[Sample], name: str, now: float, seconds: float) -> float:
    """How much a counter grew in the last `seconds` before `now`, never less than 0. `history` is of one engine."""
    return max(0.0, value(history, name, now) - value(history, name, now - seconds))


def rate(history: Sequence[Sample], name: str, now: float, seconds: float) -> float:
    """Growth a second over the last `seconds`, or over as much of them as was seen; 0 where nothing was."""
    seen = min(seconds, now - history[0].time) if history else 0.0
    return grown(history, name, now, seconds) / seen if seen > 0 else 0.0


def series(history: Sequence[Sample], name: str, now: float, seconds: float, points: int) -> list[float]:
    """How much a counter grew in each of `points` equal parts of the last `seconds`, oldest first."""
    if points <= 0:
        return []
    edges = [value(history, name, now - seconds * (points - at) / points) for at in range(points + 1)]
    return [max(0.0, right - left) for left, right in pairwise(edges)]


def gauges(history: Sequence[Sample], name: str, now: float, seconds: float, points: int) -> list[float | None]:
    """What a gauge was at the end of each part; None before the first sample."""
    if not history:
        return [None] * points
    times = [now - seconds * (points - at - 1) / points for at in range(points)]
    return [value(history, name, time) if time >= history[0].time else None for time in times]


MINUTE, MOMENT = 60.0, 10.0
"""Seconds that sums are of, and that rates are."""
_LEAST = 1.0  # seconds of watching, below which there is no rate


@dataclass(frozen=True, slots=True)
class LastMinute:
    """Sums over the last minute; `watched` of its seconds the counters know."""

    watched: float
    prompt_tokens: float
    cached_tokens: float
    ended: int
    failed: int
    preemptions: int
    query_tokens: float
    regret_tokens: float


def samples_since_start(state: State) -> Sequence[Sample]:
    """The samples of this engine; from its birth on, with nothing counted, if it was born not long before the first."""
    history = of_one_engine(state.history)
    born = state.facts.started
    if history and 0 < history[0].time - born < MINUTE:
        return (Sample(born, state.facts.engine, {}), *history)
    return history


def last_minute(state: State, history: Sequence[Sample]) -> LastMinute:
    """Of what the counters saw and what the records remember, whichever is more: neither invents. O(records)."""
    since = state.now - MINUTE

    def growth(name: str) -> float:
        return grown(history, name, state.now, MINUTE)

    ended = [each for each in state.ended.values() if each.ended is not None and each.ended >= since]
    current = (*ended, *state.live.values())
    prompt, cached = _prompts((*state.ended.values(), *state.live.values()), since)
    wanted = sum(each.tokens for each in state.evictions.values() if (each.wanted_again or 0.0) >= since)
    queried = max(growth("cache.query_tokens"), prompt)
    if growth("prompt_tokens") >= prompt:
        prompt, cached = growth("prompt_tokens"), growth("cached_tokens")
    return LastMinute(
        watched=min(MINUTE, state.now - history[0].time) if history else 0.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ended=max(len(ended), round(growth("finished") + growth("failed") + growth("cancelled"))),
        failed=max(sum(each.phase == "failed" for each in ended), round(growth("failed"))),
        preemptions=_preemptions(history, growth("preemptions"), current, state.now),
        query_tokens=queried,
        regret_tokens=max(growth("cache.regret_tokens"), wanted),
    )


def per_second(state: State, history: Sequence[Sample], name: str) -> float | None:
    """Growth a second, lately; None if nobody has watched for a second."""
    if not history or state.now - history[0].time < _LEAST:
        return None
    return rate(history, name, state.now, MOMENT)


def evicted_per_second(state: State) -> float:
    """Tokens that were evicted, by the records."""
    since = state.now - MOMENT
    return sum(each.tokens for each in state.evictions.values() if each.time >= since) / MOMENT


def _prompts(requests: Iterable[RequestRecord], since: float) -> tuple[float, float]:
    """Tokens asked for and found by those that came in since."""
    admitted = [each for each in requests if each.admitted is not None and each.admitted >= since]
    return sum(each.prompt_tokens for each in admitted), sum(each.cached_tokens for each in admitted)


def _preemptions(history: Sequence[Sample], counted: float, current: Iterable[RequestRecord], now: float) -> int:
    """By the counters, if they know the whole minute; else those of all requests that lived in it."""
    if history and now - history[0].time >= MINUTE:
        return round(counted)
    return max(round(counted), sum(each.preemptions for each in current))
