"""Bars and sparklines as text: a stacked bar whose parts have signs beside colours, and columns over time.

Knows numbers and cells. Knows no state; every function is pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

EIGHTHS = " ▁▂▃▄▅▆▇█"


def widths(parts: Sequence[float], cells: int) -> list[int]:
    """`cells` shared out among parts: they add up to it, and who has any gets a cell if there are enough.

    >>> widths([1, 0, 999], 10), widths([0, 0], 4), widths([1, 1, 1], 2)
    ([1, 0, 9], [0, 0], [0, 1, 1])
    """
    whole = sum(parts)
    if whole <= 0 or cells <= 0:
        return [0] * len(parts)
    shared = [max(int(part * cells / whole), 1 if part > 0 else 0) for part in parts]
    by_lack = sorted(range(len(parts)), key=lambda at: shared[at] - parts[at] * cells / whole)
    for at in by_lack[: max(0, cells - sum(shared))]:
        shared[at] += 1
    while sum(shared) > cells:
        shared[shared.index(max(shared))] -= 1
    return shared


def stacked(parts: Sequence[tuple[float, str, Style]], cells: int) -> Text:
    """One line of `cells` cells: each part as a run of its sign, in its style."""
    line = Text(no_wrap=True)
    for (_, sign, style), width in zip(parts, widths([part for part, _, _ in parts], cells), strict=True):
        line.append(sign * width, style)
    return line


def columns(values: Sequence[float | None], height: int = 1, top: float | None = None) -> list[str]:
    """Lines, the topmost first, with a column for each value, 0 at the foot; None is a gap, as is 0.

    `top` is the value of a full column; the largest value if it is None. What is above 0 shows at least an eighth.

    >>> columns([0, 1, None, 8], top=8)
    [' ▁ █']
    >>> columns([4, 8], height=2)
    [' █', '██']
    """
    highest = top if top is not None else max((value for value in values if value is not None), default=0.0)
    filled = [_eighths(value, highest, height * 8) for value in values]
    return [
        "".join(EIGHTHS[min(max(each - 8 * (height - 1 - line), 0), 8)] for each in filled) for line in range(height)
    ]


def _eighths(value: float | None, highest: float, most: int) -> int:
    if value is None or value <= 0 or highest <= 0:
        return 0
    return min(most, max(1, round(value / highest * most)))
