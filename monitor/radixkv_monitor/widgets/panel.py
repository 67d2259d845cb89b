"""A title with lines of numbers and sparklines below it.

Knows lines and styles. Does not know what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from radixkv_monitor.widgets.bars import columns


class Panel(Widget):
    """A title and lines of text; draws again only if they differ."""

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
        """Draw these lines; says whether others were there before."""
        before, self._lines = self._lines, tuple(lines)
        if self.styles.is_auto_height:
            if before != self._lines:
                self.refresh(layout=True)
        else:
            for y, (was, line) in enumerate(zip_longest(before, self._lines)):
                if was != line:
                    self.refresh(Region(0, y, self.size.width, 1))
        return before != self._lines

    def render(self) -> Group:
        """All lines, where they say how high this is."""
        return Group(*self._lines)

    def render_line(self, y: int) -> Strip:
        """One line. Half the cost of a picture is saved where the lines that say the same are not drawn again."""
        if self.styles.is_auto_height:
            return super().render_line(y)
        width, ground = self.size.width, self.rich_style
        if y >= len(self._lines):
            return Strip.blank(width, ground)
        line = self._lines[y].copy()
        line.truncate(width, overflow=line.overflow or "crop")
        own = ground + self.app.console.get_style(line.style)  # which `render` leaves out where there are no spans
        segments = Segment.apply_style(line.render(self.app.console), own)
        return Strip(segments).adjust_cell_length(width, ground)

    def style_of(self, name: str) -> Style:
        """One of the component styles: title, dim, spark, strong."""
        return self.get_component_rich_style(f"panel--{name}")

    def title(self, name: str, aside: str = "") -> Text:
        """The first line."""
        parts = (name, self.style_of("title")), ("  " + aside if aside else "", self.style_of("dim"))
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    def numbers(self, *pairs: tuple[str, str]) -> Text:
        """Values with their names behind them, on one line."""
        line = Text(no_wrap=True, overflow="ellipsis")
        for value, name in pairs:
            line.append("  " if line else "")
            line.append(value, self.style_of("strong"))
            line.append(f" {name}", self.style_of("dim"))
        return line

    def spark(self, values: Sequence[float | None], height: int, top: float | None = None) -> list[Text]:
        """Columns over time."""
        return [Text(line, self.style_of("spark"), no_wrap=True) for line in columns(values, height, top)]
