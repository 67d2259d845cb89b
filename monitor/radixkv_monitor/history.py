"""Counters over time: samples of the last ten minutes, and how much a counter grew between two times.

Knows samples. Knows no records, no feed and no screen; the functions are pure. A counter is read between two samples by
a straight line, and holds its last value behind the newest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

from radixkv_monitor.state import Sample

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
