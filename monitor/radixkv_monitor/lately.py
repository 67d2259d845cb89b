"""What happened in the last minute: by the counters, and by what records remember of a time before anybody watched.

Knows states; every function is pure. Counters are exact for as long as somebody watched, from an engine's birth on if
it is that young. Records are there from the first look on, but only the newest few hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixkv.telemetry.records import RequestRecord
from radixkv_monitor import history as counters
from radixkv_monitor.state import Sample, State

MINUTE, MOMENT = 60.0, 10.0
"""Seconds that sums are of, and that rates are."""
_LEAST = 1.0  # seconds of watching, below which there is no rate


@dataclass(frozen=True, slots=True)
class Lately:
    """Sums over the last minute; `watched` of its seconds the counters know."""

    watched: float
    prompt_tokens: float
    cached_tokens: float
    ended: int
    failed: int
    preemptions: int
    query_tokens: float
    regret_tokens: float


def known(state: State) -> Sequence[Sample]:
    """The samples of this engine; from its birth on, with nothing counted, if it was born not long before the first."""
    history = counters.of_one_engine(state.history)
    born = state.facts.started
    if history and 0 < history[0].time - born < MINUTE:
        return (Sample(born, state.facts.engine, {}), *history)
    return history


def last_minute(state: State, history: Sequence[Sample]) -> Lately:
    """Of what the counters saw and what the records remember, whichever is more: neither invents. O(records)."""
    since = state.now - MINUTE

    def grown(name: str) -> float:
        return counters.grown(history, name, state.now, MINUTE)

    ended = [each for each in state.ended.values() if each.ended is not None and each.ended >= since]
    current = (*ended, *state.live.values())
    prompt, cached = _prompts((*state.ended.values(), *state.live.values()), since)
    wanted = sum(each.tokens for each in state.evictions.values() if (each.wanted_again or 0.0) >= since)
    queried = max(grown("cache.query_tokens"), prompt)
    if grown("prompt_tokens") >= prompt:
        prompt, cached = grown("prompt_tokens"), grown("cached_tokens")
    return Lately(
        watched=min(MINUTE, state.now - history[0].time) if history else 0.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ended=max(len(ended), round(grown("finished") + grown("failed") + grown("cancelled"))),
        failed=max(sum(each.phase == "failed" for each in ended), round(grown("failed"))),
        preemptions=_preemptions(history, grown("preemptions"), current, state.now),
        query_tokens=queried,
        regret_tokens=max(grown("cache.regret_tokens"), wanted),
    )


def a_second(state: State, history: Sequence[Sample], name: str) -> float | None:
    """Growth a second, lately; None if nobody has watched for a second."""
    if not history or state.now - history[0].time < _LEAST:
        return None
    return counters.rate(history, name, state.now, MOMENT)


def evicted_a_second(state: State) -> float:
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
