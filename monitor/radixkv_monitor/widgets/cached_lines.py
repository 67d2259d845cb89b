"""A scrolling page of lines that draws only visible lines whose key changed.

A subclass returns a key for each line, which holds everything that the line's look depends on, and draws the line.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from rich.style import Style
from textual.binding import Binding
from textual.geometry import Region
from textual.scroll_view import ScrollView
from textual.strip import Strip

from radixkv_monitor.theme import Shade

Key = TypeVar("Key", bound=Hashable)

MOST_STRIPS = 2048
LAST = 1 << 62
"""A place after all lines."""


class CachedLines(ScrollView, Generic[Key], can_focus=True):
    """Draw `header` lines that stay, and lines that scroll below them. O(visible lines) an update, cheap if keys are
    equal.
    """

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

    # ---- for subclasses

    def key_of(self, line: int) -> Key:
        """Return everything that this line's look depends on: line 0 is the first below the header, -1 the header's
        last.
        """
        raise NotImplementedError

    def draw(self, line: int, key: Key) -> Strip:
        """Draw the line."""
        raise NotImplementedError

    # ---- drawing

    @property
    def line_width(self) -> int:
        """The columns to draw on. The column of the scroll bar stays free, so its appearance resizes nothing."""
        self._line_width = self._line_width or self.scrollable_content_region.width
        return self._line_width

    @property
    def top(self) -> int:
        """The first visible line below the header."""
        return int(self.scroll_offset.y)

    @property
    def body(self) -> int:
        """The lines that fit below the header."""
        return max(1, self.size.height - self.header)

    def on_focus(self) -> None:
        """Highlight the cursor."""
        self.repaint()

    def on_blur(self) -> None:
        """Remove the cursor's highlight."""
        self.repaint()

    def repaint(self) -> None:
        """Draw the visible lines that differ from the screen."""
        width = self.line_width
        for y in range(self.size.height):
            line = self._line_at(y)
            known = self._strips.get(line)
            if known is None or known[0] != self.key_of(line):
                self.refresh(Region(0, y, width, 1))

    def forget_lines(self) -> None:
        """Draw all lines again, after a change of the width or of the look that no key contains."""
        self._line_width = 0
        self._strips.clear()
        self.refresh()

    def notify_style_update(self) -> None:
        """Draw in the styles of another theme."""
        super().notify_style_update()
        self._strips.clear()
        self._styles.clear()
        self._base_style = None

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
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
        """Scroll the least distance that shows this line and `margin` lines around it."""
        margin = min(margin, (self.body - 1) // 2)
        if line - margin < self.top:
            self.scroll_to(y=max(0, line - margin), animate=False)
        elif line + margin >= self.top + self.body:
            self.scroll_to(y=line + margin - self.body + 1, animate=False)

    @property
    def base_style(self) -> Style:
        """The widget's own style. Kept, because `rich_style` asks all ancestors."""
        if self._base_style is None:
            self._base_style = self.rich_style
        return self._base_style

    def style(self, ink: Shade | None, paper: Shade | None = None, look: str = "") -> Style:
        """Return a style of theme colours, None for the theme's own; `look` is more style words of rich."""
        known = self._styles.get((ink, paper, look))
        if known is None:
            dark = self.app.current_theme.dark
            colours = Style(
                color=None if ink is None else ink.on(dark), bgcolor=None if paper is None else paper.on(dark)
            )
            known = self.base_style + Style.parse(look) + colours
            self._styles[ink, paper, look] = known
        return known


CURSOR_KEYS = (
    Binding("up,k", "move(-1)", "up", show=False),
    Binding("down,j", "move(1)", "down", show=False),
    Binding("pageup", "page(-1)", "page up", show=False),
    Binding("pagedown", "page(1)", "page down", show=False),
    Binding("home", "edge(0)", "first", show=False),
    Binding("end", "edge(-1)", "last", show=False),
)
"""The keys of lines with a cursor."""


class CursorLines(CachedLines[Key]):
    """Lines with a cursor, `at`, that CURSOR_KEYS move."""

    at = 0

    def move_to(self, place: int) -> None:
        """Move the cursor to this line, or to the nearest one."""
        raise NotImplementedError

    def action_move(self, by: int) -> None:
        """Move the cursor by `by` lines."""
        self.move_to(self.at + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by `by` screens."""
        self.move_to(self.at + by * max(1, self.body - 1))

    def action_edge(self, place: int) -> None:
        """Move the cursor to the first (0) or the last (-1) line."""
        self.move_to(LAST if place else 0)
