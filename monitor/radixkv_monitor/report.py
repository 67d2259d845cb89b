"""Collect the contents of a report: one engine or recording over its whole span, as plain data.

Requests and evictions are collected from the frames, so none between two samples is missed. Verdicts judge states at
equal distances, at most `POINTS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from radixkv.telemetry.protocol import Hello
from radixkv.telemetry.records import ITL_NAMES, EvictionRecord, RequestRecord
from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.feed import Ending, ThreadFeed
from radixkv_monitor.history import grown, of_one_engine
from radixkv_monitor.latency import Percentiles, is_hit, percentiles, quantile
from radixkv_monitor.state import Sample, State, age_time
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.summary import Level, summarise, verdict

POINTS = 600
"""The most states that are judged."""
LISTED = 20
"""The most regrets and requests that are listed."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the verdict of one engine had one level. `sentence` is the verdict at its start."""

    start: float
    end: float
    engine: str
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one kind of latency; None if the engine does not send it. `noun` is the thing that is counted."""

    name: str
    noun: str
    times: Percentiles | None


@dataclass(frozen=True)
class Report:
    """One engine or recording from `start` to `end`, in seconds since 1970.

    `state` is the last state, `sentence` its verdict, and `phases` are the verdicts over time, in order. `growth` is
    the growth of each counter over `counted` seconds, since the span began or the last engine was loaded. `regrets` are
    the evictions with the most tokens of all `regretted` ones, which were requested again; `evictions` counts all.
    `slowest` are the requests with the longest time to the first token, of `requests` in all. Both include records of a
    time before the span that the engine still had.
    """

    title: str
    live: bool
    written: float
    start: float
    end: float
    engines: int
    ending: Ending
    state: State
    sentence: str
    history: Sequence[Sample]
    phases: Sequence[Phase]
    counted: float
    growth: dict[str, float]
    latencies: Sequence[Latency]
    evictions: int
    regretted: int
    regrets: Sequence[EvictionRecord]
    requests: int
    slowest: Sequence[RequestRecord]


def collect(
    feed: ThreadFeed,
    state: State,
    *,
    live: bool,
    thresholds: Thresholds = DEFAULTS,
    progress: Callable[[float], None] = lambda share: None,
) -> Report:
    """Collect a report of a feed that is closed. `state` is its last state, which is judged as it is.

    `progress` is called with the share that is done. O(frames), and O(records) for each of the `POINTS`.
    """
    builder = feed.builder
    start, end = builder.timeline.span or (state.time, state.time)
    end = max(end, state.now)
    requests, evictions = _records(builder)
    regrets = [each for each in evictions if each.wanted_again is not None]
    history = (builder.latest or state).history
    counted, growth = _growth(history, start, end)
    return Report(
        title=feed.title,
        live=live,
        written=time.time(),
        start=start,
        end=end,
        engines=builder.engines,
        ending=feed.ending,
        state=state,
        sentence=verdict(state, summarise(state), thresholds).sentence,
        history=history,
        phases=tuple(_phases(_judged(builder, state, (start, end), thresholds, progress), end)),
        counted=counted,
        growth=growth,
        latencies=tuple(_latencies(requests, growth)),
        evictions=len(evictions),
        regretted=len(regrets),
        regrets=sorted(regrets, key=lambda each: (-each.tokens, each.number))[:LISTED],
        requests=len(requests),
        slowest=_slowest(requests),
    )


def _slowest(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the requests that waited longest for their first token."""
    answered = [each for each in requests if each.ttft is not None]
    return sorted(answered, key=lambda each: (-(each.ttft or 0.0), each.number))[:LISTED]


def _records(builder: StateBuilder) -> tuple[list[RequestRecord], list[EvictionRecord]]:
    """Return the newest record of every request and eviction in the frames. O(frames)."""
    requests: dict[tuple[str, int], RequestRecord] = {}
    evictions: dict[tuple[str, int], EvictionRecord] = {}
    engine = ""
    for frame in builder.timeline.all_frames():
        if isinstance(frame, Hello):
            engine = frame.facts.engine
            continue
        requests.update({(engine, each.number): each for each in frame.changes.requests})
        evictions.update({(engine, each.number): each for each in frame.changes.evictions})
    return list(requests.values()), list(evictions.values())


def _judged(
    builder: StateBuilder,
    last: State,
    span: tuple[float, float],
    thresholds: Thresholds,
    progress: Callable[[float], None],
) -> Iterator[Phase]:
    """Judge states of the span, at most one a second, and the last state; each as a phase of length 0."""
    start, end = span
    past = PastStates(builder)
    points = max(1, min(POINTS, int(end - start)))
    for point in range(points):
        when = start + (end - start) * point / points
        if (state := past.at(when)) is not None:
            yield _judge(replace(state, now=age_time(state, when)), when, thresholds)
        progress((point + 1) / points)
    yield _judge(last, end, thresholds)


def _judge(state: State, when: float, thresholds: Thresholds) -> Phase:
    found = verdict(state, summarise(state), thresholds)
    return Phase(when, when, state.facts.engine, found.level, found.sentence)


def _phases(judged: Iterable[Phase], end: float) -> Iterator[Phase]:
    """Join the judgements of one engine and level that follow each other."""
    current: Phase | None = None
    for each in judged:
        if current is None:
            current = each
        elif (current.engine, current.level) != (each.engine, each.level):
            yield replace(current, end=each.start)
            current = each
    if current is not None:
        yield replace(current, end=end)


def _growth(history: Sequence[Sample], start: float, end: float) -> tuple[float, dict[str, float]]:
    """Return the sampled seconds of the last engine in the span, and the growth of its counters in them."""
    samples = of_one_engine(history)
    if not samples:
        return 0.0, {}
    seconds = end - max(start, samples[0].time)
    return seconds, {name: grown(samples, name, end, seconds) for name in samples[-1].stats}


def _latencies(requests: Sequence[RequestRecord], growth: Mapping[str, float]) -> Iterator[Latency]:
    """Yield the latencies of all requests, and of all tokens whose times were counted in the span."""
    finished = [each for each in requests if each.phase == "finished" and each.ended is not None]
    yield Latency(
        "TTFT, half of the prompt cached", "request", percentiles(each.ttft for each in requests if is_hit(each))
    )
    yield Latency("TTFT, other requests", "request", percentiles(each.ttft for each in requests if not is_hit(each)))
    yield Latency("queue time", "request", percentiles(each.queue_time for each in requests))
    counts = [round(growth[name]) for name in ITL_NAMES if name in growth]
    shares = (quantile(counts, share) for share in (0.5, 0.9, 0.99))
    yield Latency("ITL", "token", Percentiles(sum(counts), *shares) if counts else None)
    e2e = percentiles((each.ended or 0.0) - each.submitted for each in finished)
    yield Latency("E2E latency, finished requests", "request", e2e)
