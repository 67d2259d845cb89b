"""A long page of lines, of which only those are drawn that are visible and differ from what is on screen.

Knows lines, keys and strips. Does not know what a line shows: who derives from it names a key for each line, which has
all that the line's look depends on, and draws it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from rich.style import Style
from textual.geometry import Region
from textual.scroll_view import ScrollView
from textual.strip import Strip

from radixkv_monitor.theme import Shade

Key = TypeVar("Key", bound=Hashable)

MOST_STRIPS = 2048


class CachedLines(ScrollView, Generic[Key], can_focus=True):
    """`header` lines that stay, and lines that scroll below. O(visible lines) an update, and little where equal."""

    DEFAULT_CSS = """
    CachedLines { height: 1fr; scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """
    header = 0

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._strips: dict[int, tuple[Key, Strip]] = {}
        self._base_style: Style | None = None
        self._line_width = 0
        self._styles: dict[tuple[Shade | None, Shade | None, str], Style] = {}

    # ---- what a widget says of its lines

    def key_of(self, line: int) -> Key:
        """What the look of this line depends on: 0 is the first below the header, -1 the last line of the header."""
        raise NotImplementedError

    def draw(self, line: int, key: Key) -> Strip:
        """The line as it looks."""
        raise NotImplementedError

    # ---- drawing

    @property
    def line_width(self) -> int:
        """Columns that are drawn on: the scroll bar's place stays free, as a bar that comes or goes is no resize."""
        self._line_width = self._line_width or self.scrollable_content_region.width
        return self._line_width

    @property
    def top(self) -> int:
        """The first visible line below the header."""
        return int(self.scroll_offset.y)

    @property
    def body(self) -> int:
        """How many lines there is room for below the header."""
        return max(1, self.size.height - self.header)

    def on_focus(self) -> None:
        """The cursor is lit."""
        self.repaint()

    def on_blur(self) -> None:
        """The cursor is no longer lit."""
        self.repaint()

    def repaint(self) -> None:
        """Draw the visible lines that differ from what is on screen."""
        width = self.line_width
        for y in range(self.size.height):
            line = self._line_at(y)
            known = self._strips.get(line)
            if known is None or known[0] != self.key_of(line):
                self.refresh(Region(0, y, width, 1))

    def forget_lines(self) -> None:
        """Draw all anew: the width, or the look of lines, changed in a way that no key knows."""
        self._line_width = 0
        self._strips.clear()
        self.refresh()

    def notify_style_update(self) -> None:
        """Another theme, or another look."""
        super().notify_style_update()
        self._strips.clear()
        self._styles.clear()
        self._base_style = None

    def render_line(self, y: int) -> Strip:
        """A line of the screen."""
        line = self._line_at(y)
        key = self.key_of(line)
        known = self._strips.get(line)
        if known is not None and known[0] == key:
            return known[1]
        if len(self._strips) > MOST_STRIPS:
            self._strips.clear()
        strip = self.draw(line, key).adjust_cell_length(self.line_width, self.base_style)
        self._strips[line] = (key, strip)
        return strip

    def _line_at(self, y: int) -> int:
        return y - self.header + self.top if y >= self.header else y - self.header

    def bring_into_view(self, line: int, margin: int = 0) -> None:
        """Scroll as little as it takes to see this line, and some lines around it."""
        margin = min(margin, (self.body - 1) // 2)
        if line - margin < self.top:
            self.scroll_to(y=max(0, line - margin), animate=False)
        elif line + margin >= self.top + self.body:
            self.scroll_to(y=line + margin - self.body + 1, animate=False)

    @property
    def base_style(self) -> Style:
        """The widget's own style: `rich_style`, which asks all above it, asked once."""
        if self._base_style is None:
            self._base_style = self.rich_style
        return self._base_style

    def style(self, ink: Shade | None, paper: Shade | None = None, look: str = "") -> Style:
        """A style of palette colours on this theme, None is the theme's own; `look` are more of rich's words."""
        known = self._styles.get((ink, paper, look))
        if known is None:
            dark = self.app.current_theme.dark
            colours = Style(
                color=None if ink is None else ink.on(dark), bgcolor=None if paper is None else paper.on(dark)
            )
            known = self.base_style + Style.parse(look) + colours
            self._styles[ink, paper, look] = known
        return known
