"""Draw the charts of a report as SVG: a band of levels, lines and stacked areas over time.

Colours and dashes are CSS classes of the page (`c0` to `c3`, `good`, `idle`, `warn`, `bad`), so that one drawing serves
dark and light pages. Every chart states its maximum and its span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from radixkv_monitor.formatting import clock

WIDTH, HEIGHT = 960, 150
"""The size of a drawing in pixels; the browser scales it."""
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 8, 24
"""The margins around the area of the data."""
_CELL = 7.2
"""The approximate width of a letter."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values at equal distances, the last one at the end of the span; None where there is no value."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a band: its span in seconds, its level, and the text of its tooltip."""

    start: float
    end: float
    level: str
    text: str


def lines(series: Sequence[Series], start: float, end: float, label: Callable[[float], str], top: float = 0.0) -> str:
    """Draw lines; `label` formats a value of the axis. The axis ends at `top`, or at a round number above all values.

    A line is interrupted where a value is missing.
    """
    highest = top or _round_up(max((value for each in series for value in each.values if value is not None), default=0))
    parts = list(_axes(start, end, highest, label))
    for number, each in enumerate(series):
        for points in _pieces(each.values, highest):
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="line c{number}" points="{drawn}"/>')
            if len(points) == 1:
                parts.append(f'<circle class="dot c{number}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2"/>')
    return _svg(parts, HEIGHT, ", ".join(each.name for each in series))


def areas(series: Sequence[Series], start: float, end: float, label: Callable[[float], str], top: float) -> str:
    """Draw areas on top of each other, the first one at the bottom. A missing value ends all areas."""
    parts = list(_axes(start, end, top, label))
    below = [0.0] * (len(series[0].values) if series else 0)
    for number, each in enumerate(series):
        above = [base + (value or 0.0) for base, value in zip(below, each.values, strict=True)]
        shown = [at for at, value in enumerate(each.values) if value is not None]
        if shown:
            edge = [_point(at, above[at], len(above), top) for at in shown]
            base = [_point(at, below[at], len(above), top) for at in reversed(shown)]
            if len(shown) == 1:  # one value covers the part of the span before it
                edge, base = [(LEFT, edge[0][1]), *edge], [*base, (LEFT, base[0][1])]
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*edge, *base))
            parts.append(f'<polygon class="area c{number}" points="{drawn}"/>')
        below = above
    return _svg(parts, HEIGHT, ", ".join(each.name for each in series))


def band(stretches: Sequence[Stretch], start: float, end: float) -> str:
    """Draw a bar of coloured stretches, each with its level as text where there is room for it."""
    height = 34
    parts = []
    for each in stretches:
        first, last = (_x(when, start, end) for when in (each.start, each.end))
        width = max(last - first, 1.5)
        box = f'x="{first:.1f}" y="0" width="{width:.1f}" height="{height}"'
        parts.append(f'<g><title>{escape(each.text)}</title><rect class="{each.level}" {box}/>')
        if width > (len(each.level) + 1) * _CELL:
            parts.append(f'<text class="on" x="{first + 5:.1f}" y="22">{each.level}</text>')
        parts.append("</g>")
    parts += _times(start, end, height)
    return _svg(parts, height + BOTTOM, "verdict over time")


def _svg(parts: Sequence[str], height: float, name: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">'
    return "\n".join((head, *parts, "</svg>"))


def _axes(start: float, end: float, highest: float, label: Callable[[float], str]) -> Iterator[str]:
    """Draw three horizontal lines with their values, and the times below."""
    for share in (0.0, 0.5, 1.0):
        y = _y(share * highest, highest)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        text, base = escape(label(share * highest)), max(y + 4, 10.0)
        yield f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{base:.1f}">{text}</text>'
    yield from _times(start, end, HEIGHT - BOTTOM)


def _times(start: float, end: float, y: float) -> Iterator[str]:
    """Write five times of day below a chart; one if they would all be the same."""
    ticks = 5 if end - start >= 5 else 2 if end - start >= 1 else 1
    for tick in range(ticks):
        share = tick / max(1, ticks - 1)
        anchor = "start" if tick == 0 else "end" if tick == ticks - 1 else "middle"
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        text = clock(start + share * (end - start))
        yield f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{y + 17:.1f}">{text}</text>'


def _x(when: float, start: float, end: float) -> float:
    share = (when - start) / (end - start) if end > start else float(when > start)
    return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)


def _y(value: float, highest: float) -> float:
    share = min(max(value / highest, 0.0), 1.0) if highest > 0 else 0.0
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _point(at: int, value: float, count: int, highest: float) -> tuple[float, float]:
    """Return the place of a value; each stands at the end of its part of the span."""
    return LEFT + (at + 1) / count * (WIDTH - LEFT - RIGHT), _y(value, highest)


def _pieces(values: Sequence[float | None], highest: float) -> Iterator[list[tuple[float, float]]]:
    """Yield the points of each uninterrupted part of a line."""
    piece: list[tuple[float, float]] = []
    for at, value in enumerate(values):
        if value is not None:
            piece.append(_point(at, value, len(values), highest))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _round_up(value: float) -> float:
    """Return the least of 1, 2, 5, 10, 20, ... that is not below `value`; 1 for values of 0 and below.

    >>> [_round_up(each) for each in (0, 0.3, 7, 100, 101)]
    [1.0, 0.5, 10.0, 100.0, 200.0]
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-9))
