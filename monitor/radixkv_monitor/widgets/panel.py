"""A title with lines of numbers, bars and sparklines. The parts of a bar have signs in addition to colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

EIGHTHS = " ▁▂▃▄▅▆▇█"
AXIS, LEAST_GRAPH = 6, 20
"""The cells of a y axis with its labels, and the least cells of a graph that has one."""


def widths(parts: Sequence[float], cells: int) -> list[int]:
    """Divide `cells` among parts: the widths add up to it, and parts above 0 get a cell if there are enough.

    Parts below 0 count as 0: a source may report more used slots than there are.

    >>> widths([1, 0, 999], 10), widths([0, 0], 4), widths([1, 1, 1], 2), widths([9e15, -8e15], 3)
    ([1, 0, 9], [0, 0], [0, 1, 1], [3, 0])
    """
    parts = [max(0.0, part) for part in parts]
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
    """Draw one line of `cells` cells: each part as a run of its sign, in its style."""
    line = Text(no_wrap=True)
    for (_, sign, style), width in zip(parts, widths([part for part, _, _ in parts], cells), strict=True):
        line.append(sign * width, style)
    return line


def columns(values: Sequence[float | None], height: int = 1, top: float | None = None) -> list[str]:
    """Draw values as columns of eighths, the topmost line first; None and 0 are blank.

    `top` is the value of a full column, by default the largest value. Values above 0 show at least an eighth.

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


class Panel(Widget):
    """A title and lines of text; only lines that differ are drawn."""

    DEFAULT_CSS = """
    Panel { height: 1fr; }
    Panel > .panel--title { color: $primary; text-style: bold; }
    Panel > .panel--dim { color: $text-muted; }
    Panel > .panel--spark { color: $primary; }
    Panel > .panel--strong { text-style: bold; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"panel--title", "panel--dim", "panel--spark", "panel--strong"}

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._lines: tuple[Text, ...] = ()

    def show(self, lines: Sequence[Text]) -> bool:
        """Show these lines; return whether they differ from the lines before."""
        before, self._lines = self._lines, tuple(lines)
        if self.styles.is_auto_height:
            if before != self._lines:
                self.refresh(layout=True)
        else:
            for y, (was, line) in enumerate(zip_longest(before, self._lines)):
                if was is None or line is None or was != line or was.style != line.style:  # `!=` ignores line styles
                    self.refresh(Region(0, y, self.size.width, 1))
        return before != self._lines

    def render(self) -> Group:
        """Return all lines, whose number sets the height."""
        return Group(*self._lines)

    def render_line(self, y: int) -> Strip:
        """Return one line. Drawing only lines that differ halves the cost of a frame."""
        if self.styles.is_auto_height:
            return super().render_line(y)
        width, ground = self.size.width, self.rich_style
        if y >= len(self._lines):
            return Strip.blank(width, ground)
        line = self._lines[y].copy()
        line.truncate(width, overflow=line.overflow or "crop")
        own = ground + self.app.console.get_style(line.style)  # `render` omits it from lines without spans
        segments = Segment.apply_style(line.render(self.app.console), own)
        return Strip(segments).adjust_cell_length(width, ground)

    def style_of(self, name: str) -> Style:
        """Return a component style: title, dim, spark or strong."""
        return self.get_component_rich_style(f"panel--{name}")

    def title(self, name: str, aside: str = "") -> Text:
        """Return the first line."""
        parts = (name, self.style_of("title")), ("  " + aside if aside else "", self.style_of("dim"))
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    def numbers(self, *pairs: tuple[str, str]) -> Text:
        """Return values, each followed by its name, on one line."""
        line = Text(no_wrap=True, overflow="ellipsis")
        for value, name in pairs:
            line.append("  " if line else "")
            line.append(value, self.style_of("strong"))
            line.append(f" {name}", self.style_of("dim"))
        return line

    def graph(
        self,
        values: Callable[[int], Sequence[float | None]],
        height: int,
        text: Callable[[float], str],
        top: float | None = None,
    ) -> list[Text]:
        """Return columns over time, right of a y axis that names the maximum and 0.

        `values` returns as many values as it is asked for, and `text` writes a value in at most five characters. `top`
        is the value of a full column, by default the largest value. Without room for an axis there is none.
        """
        has_axis = self.size.width >= LEAST_GRAPH
        points = values(max(1, self.size.width - AXIS * has_axis))
        highest = top if top is not None else max((value for value in points if value is not None), default=0.0)
        lines = columns(points, height, highest)
        if not has_axis:
            return [Text(line, self.style_of("spark"), no_wrap=True) for line in lines]
        labels = [text(highest), *[""] * (height - 2), *["0"] * (height > 1)]
        return [
            Text.assemble(
                (f"{label:>{AXIS - 1}}{'┤' if label else '│'}", self.style_of("dim")),
                (line, self.style_of("spark")),
                no_wrap=True,
            )
            for label, line in zip(labels, lines, strict=True)
        ]
