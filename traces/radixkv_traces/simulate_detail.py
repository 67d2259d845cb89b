"""Break a replay's result down by session or tenant and over time, and estimate the hits of other pools of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixkv.errors import InvalidInput
from radixkv.telemetry.what_if import SIZES, WhatIf, mixed
from radixkv_traces.simulate import HitRate, ReplayResult
from radixkv_traces.workload import Workload

GROUPINGS = {"session": "session", "tenant": "namespace", "stop": "stop"}
"""The groupings of requests, and the field of each."""


@dataclass(slots=True)
class Group(HitRate):
    """The sums of the requests of one session, tenant or stop reason; `name` is None for requests without one."""

    name: str | None
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool at one moment: its occupancy, and the hit rate since the moment before."""

    seconds: float  # of the trace; the number of earlier requests, if the trace has no times
    cached_blocks: int
    token_hit_rate: float  # of the requests since the moment before


def by_group(workload: Workload, result: ReplayResult, grouping: str) -> list[Group]:
    """Group the result by "session", "tenant" or "stop", the largest group first. O(requests)."""
    if grouping not in GROUPINGS:
        raise InvalidInput(f"by={grouping!r}: allowed are {', '.join(GROUPINGS)}")
    field = GROUPINGS[grouping]
    groups: dict[str | None, Group] = {}
    for index, hit in enumerate(result.hits):
        request = workload.requests[index]
        name = getattr(request, field)
        group = groups.setdefault(name, Group(name))
        group.requests += 1
        group.input_tokens += request.input_length
        group.hit_tokens += workload.hit_tokens(index, hit)
    return sorted(groups.values(), key=lambda group: -group.input_tokens)


def over_time(workload: Workload, result: ReplayResult, most: int = 100) -> list[Moment]:
    """Return at most `most` moments, with equally many requests between them. O(requests)."""
    return [
        Moment(workload.times[end - 1], result.cached[end - 1], _rate(workload, result, begin, end))
        for begin, end in _spans(len(result.hits), most)
    ]


def _spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    edges = [count * i // most for i in range(most + 1)] if count > most else list(range(count + 1))
    return pairwise(edges)


def _rate(workload: Workload, result: ReplayResult, begin: int, end: int) -> float:
    asked = sum(workload.requests[i].input_length for i in range(begin, end))
    return sum(workload.hit_tokens(i, result.hits[i]) for i in range(begin, end)) / asked if asked else 0.0


def curve(workload: Workload, pool_blocks: int) -> dict[str, float]:
    """Return the hit rates of LRU pools by size: "2" is twice `pool_blocks`. Only prompts enter them. O(blocks)."""
    what_if = WhatIf(pool_blocks, workload.block_tokens, computed_tokens=0)
    for request in workload.requests:
        what_if.add(mixed(np.frombuffer(request.blocks, np.int32).astype(np.uint64)), request.input_length, 0, 0.0)
    return {f"{size:g}": rate for size, rate in zip(SIZES, what_if.report(0.0).since_load.hit_rates, strict=True)}
