"""The texts of a view with a description: its headline, and the pane that describes one node or block."""

from __future__ import annotations

from textwrap import wrap

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from radixkv_monitor.detail import Detail
from radixkv_monitor.views import SlicedWork, View

SHORT = 24
"""The longest fact that shares a line with others, in characters."""


TALL = 20
"""The screen's height from which a headline may take more than a line."""
MOST_LINES = 3
"""The most lines of a headline."""
WIDE, LOW = 120, 14
"""The width from which the description is at the right, and the height from which there is room for it below."""


DETAIL_KEYS = (
    Binding("J,shift+down", "scroll_detail(1)", "Scroll the description", show=False),
    Binding("K,shift+up", "scroll_detail(-1)", "Scroll it back", show=False),
)
"""The keys of views with a DetailPane."""


class Headline(Static):
    """A line of text, or up to three if it is long and the screen is tall."""

    DEFAULT_CSS = """
    Headline { height: 1; color: $text-muted; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__("", id=id, classes="headline", markup=False)
        self._text = ""
        self._lines = 1

    def set_text(self, text: str) -> None:
        """Show this text."""
        self._text = text
        width = self.content_size.width
        folds = width > 0 and cell_len(text) > width and self.app.size.height >= TALL
        lines = min(len(wrap(text, width)), MOST_LINES) if folds else 1
        if lines != self._lines:
            self._lines = lines
            self.styles.height = lines
            self.styles.text_wrap = "wrap" if lines > 1 else "nowrap"
        self.update(text, layout=False)

    def on_resize(self) -> None:
        """Take as many lines as the new width needs."""
        self.set_text(self._text)


class DetailPane(VerticalScroll, can_focus=False):
    """Show a Detail, and draw it only if it changed. Facts fill as many columns as there is room for."""

    DEFAULT_CSS = """
    DetailPane { scrollbar-size-vertical: 1; padding: 0 1; }
    DetailPane > Static { height: auto; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.detail: Detail | None = None
        """The shown description."""
        self._drawn: tuple[Detail, int] | None = None

    def compose(self) -> ComposeResult:
        """Lay out one text."""
        yield Static("", markup=False)

    def show_detail(self, detail: Detail) -> None:
        """Show this description."""
        before, self.detail = self.detail, detail
        self._draw()
        if before is not None and before.title != detail.title:
            self.scroll_home(animate=False)

    def on_resize(self) -> None:
        """Arrange the columns for the new width."""
        self._draw()

    def _draw(self) -> None:
        width = self.content_size.width
        if self.detail is None or (self.detail, width) == self._drawn or not width:
            return
        self._drawn = (self.detail, width)
        self.query_one(Static).update(_text(self.detail, width))


class DetailView(View):
    """A view with a DetailPane, at the right or below, that may read a large tree in slices."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._loading = SlicedWork(self)

    @property
    def is_loading(self) -> bool:
        """Return whether a large tree is read in slices now."""
        return self._loading.is_running

    def on_resize(self, event: events.Resize) -> None:
        """Move the description to where there is room, or hide it."""
        self.set_class(event.size.width >= WIDE, "-wide")
        self.set_class(event.size.width < WIDE and event.size.height < LOW, "-low")

    def action_scroll_detail(self, lines: int) -> None:
        """Scroll the description."""
        self.query_one(DetailPane).scroll_relative(y=lines, animate=False)


def _text(detail: Detail, width: int) -> Content:
    """Lay out a description in `width` cells: short facts in columns, then each long fact on lines of its own."""
    names = max((len(name) for name, _ in detail.facts), default=0)
    fits = [fact for fact in detail.facts if len(fact[1]) <= SHORT]
    long = [fact for fact in detail.facts if len(fact[1]) > SHORT]
    widest = max((len(value) for _, value in fits), default=0)
    across = max(1, (width + 3) // (names + widest + 5)) if width > 64 else 1
    if across == 1:
        fits, long = [], list(detail.facts)
    parts: list[str | tuple[str, str]] = [(detail.title, "bold")]
    parts.extend(f"\n{note}" for note in detail.notes)
    for place, (name, value) in enumerate(fits):
        parts += ["\n" if place % across == 0 else "   ", _name(name, names), f"{value:<{widest}}"]
    for name, value in long:
        folded = wrap(value, max(8, width - names - 2)) or [""]
        parts += ["\n", _name(name, names), f"\n{' ' * (names + 2)}".join(folded)]
    return Content.assemble(*parts)


def _name(name: str, width: int) -> tuple[str, str]:
    return f"{name:<{width}}  ", "$foreground 60%"
