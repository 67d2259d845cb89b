"""Latencies of requests over a window: TTFT of hits and misses, queue time, inter-token latency, end-to-end latency.

An engine sends the times of single requests, at most 512 ended ones, and counts inter-token latencies in buckets. So
percentiles of the former are measured values. Percentiles of the latter are estimates within the bounds of their
bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf

from radixkv.telemetry.mirror import ENDED_REQUESTS
from radixkv.telemetry.records import ITL_BOUNDS, ITL_NAMES, RequestRecord
from radixkv_monitor import history as counters
from radixkv_monitor.formatting import duration, plural
from radixkv_monitor.state import State

BOUNDS = (*ITL_BOUNDS, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0, 150.0, 200.0, 300.0)
"""Upper bounds in seconds of the buckets of a drawn histogram; one more bucket has all longer times."""
WINDOWS = (60.0, 600.0, None)
"""Windows in seconds to choose from; None is everything that the monitor has."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `count` durations, in seconds; None without any.

    A percentile is infinite if it is in the last bucket of a histogram, which has no upper bound.
    """

    count: int
    median: float | None
    p90: float | None
    p99: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields for JSON, which has no infinite numbers: a percentile without an upper bound is None."""
        return {name: None if value == inf else value for name, value in asdict(self).items()}


def time_text(seconds: float | None) -> str:
    """Write a percentile.

    >>> time_text(0.25), time_text(inf), time_text(None)
    ('250 ms', '>10 s', '-')
    """
    return f">{duration(ITL_BOUNDS[-1])}" if seconds == inf else duration(seconds)


def percentiles(durations: Iterable[float | None]) -> Percentiles:
    """Compute p50, p90 and p99 by nearest rank, so all are measured values."""
    values = sorted(each for each in durations if each is not None)
    return Percentiles(len(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the least of the sorted `values` that is not exceeded by `share` of them; None without values."""
    return values[max(0, ceil(share * len(values)) - 1)] if values else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations of one kind. `counts` belong to the buckets up to each of `bounds`, and of one above the last bound.

    None if the engine does not send them. `noun` is the thing that is counted, and `window` names the time or the
    records that it was counted over.
    """

    percentiles: Percentiles
    counts: tuple[int, ...] | None
    noun: str
    window: str
    bounds: tuple[float, ...] = BOUNDS

    @property
    def scope(self) -> str:
        """The denominator and the window, such as "34 requests, 1 min"."""
        if self.counts is None:
            return "not sent by this engine"
        return f"{plural(self.percentiles.count, self.noun)}, {self.window}"


@dataclass(frozen=True, slots=True)
class Latencies:
    """The distributions over one window. `ttft` has hits and misses together."""

    ttft: Distribution
    ttft_hit: Distribution
    ttft_miss: Distribution
    queue_time: Distribution
    itl: Distribution
    e2e: Distribution


def is_hit(request: RequestRecord) -> bool:
    """Return whether at least half of the prompt was cached."""
    return 0 < request.prompt_tokens <= 2 * request.cached_tokens


def latencies(state: State, seconds: float | None) -> Latencies:
    """Compute the distributions of the last `seconds`, or of all records and counters. O(requests + log samples).

    A request counts in the window in which the event happened: its first token, its admission, its end.
    """
    ended, live = state.ended.values(), state.live.values()
    since, window = _window(state, seconds)
    until = inf if seconds is None else state.now  # a clock that was set back leaves later times

    def of(
        requests: Iterable[RequestRecord],
        value: Callable[[RequestRecord], float | None],
        when: Callable[[RequestRecord], float | None],
    ) -> Distribution:
        values = [value(each) for each in requests if since <= (when(each) or 0.0) <= until]
        known = [each for each in values if each is not None]
        return Distribution(percentiles(known), bucket_counts(known), "request", window)

    def first_tokens(requests: Iterable[RequestRecord]) -> Distribution:
        return of(requests, lambda each: each.ttft, lambda each: each.first_token)

    return Latencies(
        ttft=first_tokens((*ended, *live)),
        ttft_hit=first_tokens(each for each in (*ended, *live) if is_hit(each)),
        ttft_miss=first_tokens(each for each in (*ended, *live) if not is_hit(each)),
        queue_time=of((*ended, *live), lambda each: each.queue_time, lambda each: each.admitted),
        itl=_itl(state, seconds),
        e2e=of(
            (each for each in ended if each.phase == "finished" and each.ended is not None),
            lambda each: (each.ended or 0.0) - each.submitted,
            lambda each: each.ended,
        ),
    )


def _window(state: State, seconds: float | None) -> tuple[float, str]:
    """Return the beginning of the window of request records, and its name: only the newest records are kept."""
    since = -inf if seconds is None else state.now - seconds
    ends = [each.ended for each in state.ended.values() if each.ended is not None]
    counted = sum(state.stats.get(name, 0.0) for name in ("finished", "failed", "cancelled"))
    lacks = len(ends) >= ENDED_REQUESTS or (seconds is None and counted > len(ends))
    if ends and lacks and min(ends) > since:
        return min(ends), f"{duration(state.now - min(ends))} (newest {len(ends):,})"
    return since, name_of(seconds)


def name_of(seconds: float | None) -> str:
    """Name a window.

    >>> name_of(60.0), name_of(600.0), name_of(None)
    ('1 min', '10 min', 'since load')
    """
    if seconds is None:
        return "since load"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else duration(seconds)


def _itl(state: State, seconds: float | None) -> Distribution:
    """Return the inter-token latencies: the growth of their counters, or their present values."""
    window = name_of(seconds)
    if ITL_NAMES[0] not in state.stats:
        return Distribution(Percentiles(0, None, None), None, "token", window)
    if seconds is None:
        grown = [state.stats.get(name, 0.0) for name in ITL_NAMES]
    else:
        history = counters.samples_since_start(state, seconds)
        grown = [counters.grown(history, name, state.now, seconds) for name in ITL_NAMES]
        seen = max(0.0, state.now - history[0].time) if history else 0.0
        window = window if seen >= seconds - 1 else f"{duration(seen)} so far"
    counts = [round(each) for each in grown]
    shares = (quantile(counts, share) for share in (0.5, 0.9, 0.99))
    return Distribution(Percentiles(sum(counts), *shares), tuple(counts), "token", window, ITL_BOUNDS)


def bucket_counts(values: Iterable[float]) -> tuple[int, ...]:
    """Count the values of each bucket of `BOUNDS`."""
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect_left(BOUNDS, value)] += 1
    return tuple(counts)


def quantile(counts: Sequence[int], share: float, bounds: Sequence[float] = ITL_BOUNDS) -> float | None:
    """Return the time that `share` of the counted ones do not exceed, on a straight line through its bucket.

    It is infinite in the bucket above the last bound. None if nothing is counted.

    >>> quantile([0, 10] + [0] * 22, 0.5)
    0.0015
    """
    whole = sum(counts)
    if not whole:
        return None
    below, rank, low = 0, share * whole, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return inf


def as_rows(found: Mapping[str, Distribution]) -> list[dict[str, object]]:
    """Return the buckets of each distribution for export: one row a bucket that counts anything."""
    rows: list[dict[str, object]] = []
    for name, distribution in found.items():
        for bound, count in zip((*distribution.bounds, None), distribution.counts or (), strict=False):
            if count:
                rows.append({"latency": name, "up_to_s": bound, "count": count, "window": distribution.window})
    return rows
