"""Histograms of latencies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


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
