"""Histograms of latencies on a logarithmic axis of time, with marks at percentiles.

Histograms that are compared have one scale, so that equal columns are equal times. `latency.BOUNDS` are the bounds of
the buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from radixkv_monitor.latency import BOUNDS, Distribution

DECADES: Mapping[float, str] = {0.001: "1ms", 0.01: "10ms", 0.1: "100ms", 1.0: "1s", 10.0: "10s", 100.0: "100s"}
"""The labelled times of the axis, in seconds."""
EDGES = (0, *(at + 1 for at, bound in enumerate(BOUNDS) if bound in DECADES), len(BOUNDS) + 1)
"""The first bucket of each decade, and the number of all buckets."""
LABEL = 4
"""The cells of a label at the right end of the axis."""
USUAL = (EDGES[1], EDGES[-2])
"""The buckets that are drawn if nothing is counted: 1 ms to 100 s."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The drawn buckets, from `first` to before `end`: columns of `cells` cells, with `merged` buckets in each.

    >>> scale_of([[0, 3, 0, 1]], 30)
    Scale(first=1, end=6, merged=1, cells=6)
    """

    first: int
    end: int
    merged: int
    cells: int

    @property
    def width(self) -> int:
        """The cells of all columns."""
        return -(-(self.end - self.first) // self.merged) * self.cells

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Return the count of each column."""
        return [sum(counts[at : min(at + self.merged, self.end)]) for at in range(self.first, self.end, self.merged)]

    def cell(self, bucket: int) -> int:
        """Return the first cell of a bucket's column."""
        return (bucket - self.first) // self.merged * self.cells

    def axis(self) -> str:
        """Return the labels of the axis: each begins at the left edge of its time, and overlapping ones are left out.

        The label of the right edge needs `LABEL` cells more than the columns.

        >>> Scale(6, 18, 1, 2).axis()
        '10ms        100ms       1s  '
        """
        labels = [(self.cell(edge - 1) + self.cells, _name(edge)) for edge in EDGES if self.first < edge <= self.end]
        return _placed([(0, _name(self.first)), *labels], self.width + LABEL)

    def marks(self, percentiles: Iterable[tuple[str, float | None]]) -> str:
        """Return a line with a mark at the column of each percentile, and its name where there is room.

        >>> Scale(6, 18, 1, 2).marks([("50", 0.012), ("90", 0.1), ("99", None)])
        '▲50       ▲90               '
        """
        named: dict[int, list[str]] = {}
        for name, seconds in percentiles:
            if seconds is not None:
                bucket = min(max(bisect_left(BOUNDS, seconds), self.first), self.end - 1)
                named.setdefault(self.cell(bucket), []).append(name)
        return _placed(
            [(at, "▲" + "·".join(names)) for at, names in sorted(named.items())], self.width + LABEL, sign=True
        )


def scale_of(histograms: Iterable[Sequence[int]], room: int) -> Scale:
    """Return the scale of whole decades that has all counted times. It has at most `room` cells, but at least one."""
    used = [at for counts in histograms for at, count in enumerate(counts) if count]
    first, end = USUAL
    if used:
        first = max(edge for edge in EDGES if edge <= min(used))
        end = min(edge for edge in EDGES if edge > max(used))
    merged = -(-(end - first) // max(1, room))
    return Scale(first, end, merged, max(1, room // -(-(end - first) // merged)))


def aligned(found: Distribution) -> list[int]:
    """Return the counts for each bucket of BOUNDS and the one above; times above the last own bound are in the last."""
    counts = list(found.counts or ())
    return [*counts[:-1], *[0] * (len(BOUNDS) + 1 - len(counts)), *counts[-1:]]


def _name(edge: int) -> str:
    return "0" if not edge else DECADES[BOUNDS[edge - 1]] if edge <= len(BOUNDS) else "more"


def _placed(texts: Sequence[tuple[int, str]], width: int, *, sign: bool = False) -> str:
    """Write texts at their cells; one that would overlap the next one or the end is left out, but not its `sign`."""
    line = [" "] * width
    for number, (at, text) in enumerate(texts):
        following = texts[number + 1][0] if number + 1 < len(texts) else width + 1
        if at + len(text) >= following:
            text = text[:1] if sign else ""
        line[at : at + len(text)] = text[: width - at]
    return "".join(line)
