"""Histograms, and the inter-token latency (ITL) of an engine: the times between two tokens of one stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from time import perf_counter

from radixkv.engine.request import Stream
from radixkv.telemetry.records import ITL_BOUNDS


class Histogram:
    """Count values up to each bound, and sum them.

    >>> histogram = Histogram([1.0, 5.0])
    >>> histogram.observe(3.0)
    >>> histogram.buckets
    [('1.0', 0.0), ('5.0', 1.0), ('+Inf', 1.0)]
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values at or below it)."""
        found, below = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found

    def add(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def copy(self) -> Histogram:
        """Return a copy of the counts."""
        twin = Histogram(self._bounds)
        twin.counts, twin.sum = list(self.counts), self.sum
        return twin


class TokenTimes:
    """Count the inter-token latencies of all streams.

    A stream's first token counts nothing. Preemptions and pauses are part of the time between two tokens. Tokens of one
    step, such as those that a constraint forces, are 0 s apart. Tokens of beams are not counted, as they come together.

    Most streams of a step had their last tokens in the same earlier step, so that their times are equal and are counted
    together: about 0.1 us a token.
    """

    def __init__(self) -> None:
        self.histogram = Histogram(ITL_BOUNDS)

    def count(self, streams: Sequence[Stream]) -> None:
        """Count the tokens of a step: one for each item of `streams`."""
        now, before, tokens = perf_counter(), inf, 0
        for stream in streams:
            last, stream.times.last_token = stream.times.last_token, now
            if last == before:
                tokens += 1
            elif last is not None:
                if tokens:
                    self.histogram.observe(now - before, tokens)
                before, tokens = last, 1
        if tokens:
            self.histogram.observe(now - before, tokens)
