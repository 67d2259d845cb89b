"""Time calls on a device: many replays of a captured graph, timed by events; the median counts.

A graph leaves out Python's cost between two launches, as an engine with captured steps does. A call that cannot be
captured is timed as it is launched, and `how` says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .device import Device

Call = Callable[[], object]

MOST_ROUNDS, ENOUGH_S = 16, 2e-3
"""A graph repeats its calls at most this often, or until they take this long compared with an event's resolution."""

LEAST_SAMPLES, MOST_SAMPLES = 9, 200


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of `samples`, and their 10th and 90th percentile."""

    us: float
    low_us: float
    high_us: float
    samples: int
    how: str

    def row(self) -> dict[str, float | int | str]:
        """As fields of a result."""
        rounded = {name: round(getattr(self, name), 2) for name in ("us", "low_us", "high_us")}
        return {**rounded, "samples": self.samples, "how": self.how}


def measure(calls: Sequence[Call], device: Device, seconds: float) -> Timing:
    """Time the calls in turn, repeatedly for about `seconds` seconds; a timing is of one call.

    The calls should do the same work on other memory, more of it in all than the cache holds.
    """
    if device.torch.type != "cuda":
        return _interpreted(calls)
    once = _warm(calls, device)
    rounds = max(1, min(MOST_ROUNDS, int(ENOUGH_S / once)))
    repeated = [*calls] * rounds
    graph, how = _captured(repeated)
    samples = min(MOST_SAMPLES, max(LEAST_SAMPLES, int(seconds / (once * rounds))))
    return summary(_timed(graph, samples, len(repeated)), how)


def summary(us: Sequence[float], how: str) -> Timing:
    """The median and the percentiles of times."""
    ordered = sorted(us)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered), how)


def _interpreted(calls: Sequence[Call]) -> Timing:
    """One round on the host's clock: proves that the calls run, and measures nothing."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return summary(times, "interpreted: no measurement")


def _warm(calls: Sequence[Call], device: Device) -> float:
    """Compile and warm up; return the seconds of all calls launched one by one."""
    stream = torch.cuda.Stream(device.torch)
    stream.wait_stream(torch.cuda.current_stream(device.torch))
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        device.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        device.synchronize()
    torch.cuda.current_stream(device.torch).wait_stream(stream)
    return time.perf_counter() - start


def _captured(calls: Sequence[Call]) -> tuple[Call, str]:
    """Return all calls as one graph, or as they are if one of them cannot be captured."""

    def launch() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except Exception as error:  # peers synchronize in their own ways
        torch.cuda.synchronize()
        return launch, f"launched one by one ({type(error).__name__} in capture)"
    return graph.replay, "graph"


def _timed(run: Call, samples: int, calls: int) -> list[float]:
    """Microseconds of one call, `samples` times, from events around all of them."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    run()
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 / calls for before, after in events]
