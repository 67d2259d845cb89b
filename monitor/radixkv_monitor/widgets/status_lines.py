"""The lines around a view: tabs and the source at the top, notices below them, keys and the monitor's cost at the
bottom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

NARROW = 120
"""The width below which texts are shortened."""


TAB_FORMS = (" {number} {title} ", "{number} {title} ", "{number}{title} ")
"""How a tab is written, the widest form first. If none of them fits, only the current tab has its title."""


class Tabs(Static):
    """The keys and names of the views; a click acts as the key does."""

    def __init__(self, titles: Sequence[tuple[str, str]]) -> None:
        super().__init__(id="tabs", markup=False)
        self._titles = titles
        self._current = ""
        self._texts: list[str] = []

    def show(self, current: str) -> None:
        """Mark the current view."""
        self._current = current
        self._draw()

    def fit(self, room: int) -> int:
        """Write the tabs in the widest form that needs at most `room` cells; return the cells that they need."""
        titles = [title for _, title in self._titles]
        forms = [[form.format(number=at, title=each) for at, each in enumerate(titles, 1)] for form in TAB_FORMS]
        texts = next((each for each in forms if sum(map(len, each)) <= room), [])
        if texts != self._texts:
            self._texts = texts
            self._draw()
        return sum(map(len, texts))

    def _draw(self) -> None:
        parts = []
        for at, (name, title) in enumerate(self._titles):
            form = TAB_FORMS[1] if name == self._current else "{number} "
            text = self._texts[at] if self._texts else form.format(number=at + 1, title=title)
            tab = Content.from_markup(f"[@click=app.show('{name}')]$text[/]", text=text)
            parts.append(tab.stylize("reverse bold" if name == self._current else ""))
        self.update(Content("").join(parts))


class TopLine(Horizontal):
    """Tabs on the left, the source and its condition on the right."""

    def __init__(self, titles: Sequence[tuple[str, str]]) -> None:
        super().__init__(id="top")
        self._titles = titles
        self._tabs = Tabs(titles)
        self._source = Static(id="source", markup=False)
        self._text: tuple[str, str] = ("", "")
        self._kind = ""

    def compose(self) -> ComposeResult:
        """Lay out both halves."""
        yield self._tabs
        yield self._source

    def show(self, current: str) -> None:
        """Mark the current view."""
        self._tabs.show(current)

    def set_text(self, source: str, link: str, kind: str) -> None:
        """Show the source, if there is room for it, and its condition, in the colour of `kind`: "bad" or "warn"."""
        if kind != self._kind:
            self._kind = kind
            for each in ("bad", "warn"):
                self._source.set_class(each == kind, f"-{each}")
        if (source, link) != self._text:
            self._text = (source, link)
            self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Show more or less of the source."""
        self._draw()

    def _draw(self) -> None:
        source, link = self._text
        needed = self._tabs.fit(self.size.width - len(link) - 2)
        long = f"{source}  {link} "
        has_room = needed and len(long) <= self.size.width - needed
        self._source.update(long if has_room else f"{link} ")


class Banner(Static):
    """Notices in one to three lines, hidden while there are none."""

    def __init__(self) -> None:
        super().__init__(id="banner", markup=False)
        self.display = False
        self._text = ("", "")

    def set_text(self, text: str, kind: str) -> None:
        """Show a text; `kind` is "bad", "warn" or "info"."""
        if (text, kind) == self._text:
            return
        self._text = (text, kind)
        self.display = bool(text)
        self.update(text)
        for each in ("bad", "warn", "info"):
            self.set_class(each == kind, f"-{each}")


class BottomLine(Horizontal):
    """The keys of the view, and the cost of the monitor."""

    def __init__(self) -> None:
        super().__init__(id="bottom")
        self._hints = Static(id="keys", markup=False)
        self._cost = Static(id="cost", markup=False)
        self._keys: tuple[tuple[str, str, str], ...] = ()

    def compose(self) -> ComposeResult:
        """Lay out both halves."""
        yield self._hints
        yield self._cost

    def set_text(self, bindings: Iterable[tuple[str, Binding]], cost: str) -> None:
        """Show these keys and the cost."""
        keys = tuple((key, binding.description, binding.action) for key, binding in bindings)
        if keys != self._keys:
            self._keys = keys
            hints = (Content.assemble((f" {key} ", "bold $accent"), what.lower()) for key, what, _ in keys)
            self._hints.update(Content(" ").join(hints))
        if self.size.width < NARROW:
            cost = cost.replace("of a core", "cpu")
        self._cost.update(f"{cost} " if cost else "")
