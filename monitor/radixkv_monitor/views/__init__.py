"""The views: their common interface, the table of views, the messages between them, exported rows, and the filter line.

A view draws a State. It reads no feed and refers to no other view; it posts a message when something is selected.

Every key that is typed after `/` arrives in the filter line, at any speed. Textual hands a key to the widget that has
the focus when the key arrives. `Widget.focus` takes effect later, and a key binding runs after keys that have arrived
already. So the view moves the focus at once, its `/` is a priority binding, and the input leaves keys that it received
too early to the widget that has the focus now.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, cast

from textual import events, on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.message_pump import MessagePump
from textual.widget import Widget
from textual.widgets import Input

from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.state import State


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected node, block of the pool, request, and block of host memory; None if there is none."""

    node: int | None = None
    block: int | None = None
    request: int | None = None
    host_block: int | None = None


class Selected(Message):
    """A view selected something. With `show`, the app shows the view where it belongs."""

    kind = ""
    home = ""

    def __init__(self, number: int, *, show: bool = False) -> None:
        super().__init__()
        self.number = number
        self.show = show


class NodeSelected(Selected):
    """A node of the tree was selected."""

    kind, home = "node", "tree"


class BlockSelected(Selected):
    """A block of the pool was selected."""

    kind, home = "block", "pool"


class HostBlockSelected(Selected):
    """A block of host memory was selected."""

    kind, home = "host_block", "pool"


class RequestSelected(Selected):
    """A request was selected, by its number."""

    kind, home = "request", "requests"


@dataclass(frozen=True, slots=True)
class Table:
    """Named rows for export; all have the same keys. Values are str, int, float, bool, None, or lists of those."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """Return a JSON array of objects."""
        return json.dumps([dict(row) for row in self.rows], indent=2)

    def to_csv(self) -> str:
        """Return a header and a line per row; lists are joined by blanks. Empty without rows."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in self.rows)
        return out.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


class View(Widget, can_focus=False):
    """One screen: it fills the room that it is given, and draws only the states that `update` receives."""

    thresholds: Thresholds = DEFAULTS
    """Those of the verdict. The app sets them before the first state."""
    _state: State | None = None
    """The state that is on screen."""

    def on_mount(self) -> None:
        """Draw a state that arrived before the widget was mounted."""
        state, self._state = self._state, None
        if state is not None:
            self.update(state)

    def update(self, state: State) -> None:
        """Draw this state. Called on the app's thread while the view is on screen, at most five times a second."""
        raise NotImplementedError

    def export(self) -> Table:
        """Return the shown content as rows, sorted and filtered as on screen."""
        raise NotImplementedError

    def selected_row(self) -> Mapping[str, Any] | None:
        """Return the selected row as it would be exported; None without one."""
        return None

    def select(self, selection: Selection) -> None:
        """Show the selection of another view. Called when it changes and when this view is shown."""

    @property
    def is_loading(self) -> bool:
        """Return whether the view reads its first state in slices, and shows only its progress."""
        return False

    def take_focus(self) -> None:
        """Focus a widget of this view: by default the first that can take the focus."""
        for widget in self.query("*"):
            if widget.focusable:
                focus_now(widget)
                return

    @classmethod
    def sorts(cls) -> Sequence[str]:
        """Return the names that `sort_by` takes."""
        return ()

    def sort_by(self, name: str) -> bool:
        """Sort by a column or an order; return False if this view has none of that name."""
        return False


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the table of views. The class, such as `tree.TreeView`, is imported when it is shown first."""

    title: str
    about: str

    @property
    def name(self) -> str:
        """The name in messages and options."""
        return self.title.lower()

    def load(self) -> type[View]:
        """Import and return the class of the view."""
        return cast("type[View]", getattr(import_module(f"radixkv_monitor.views.{self.name}"), f"{self.title}View"))


VIEWS = (
    Entry("Overview", "health of the engine: hits, pool, latency, problems"),
    Entry("Tree", "the radix tree: cached tokens and their holders"),
    Entry("Pool", "the blocks: free, active, cached, pinned"),
    Entry("Sessions", "conversations and their cache hits"),
    Entry("Evictions", "evicted tokens, and those requested again"),
    Entry("Requests", "requests over time, and why prompts missed"),
    Entry("Latency", "histograms of TTFT, queue time, ITL and E2E latency"),
)
"""In the order of the keys 1 to 7."""


def sorts() -> Mapping[str, Sequence[str]]:
    """Return the names of orders by view. Imports all views."""
    return {entry.name: names for entry in VIEWS if (names := entry.load().sorts())}


class FilteredView(View):
    """A view with a filter, its only FilterInput."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", priority=True),
        Binding("escape", "clear_filter", "Clear the filter", show=False),
    ]

    @property
    def filter_line(self) -> FilterInput:
        """The input."""
        return self.query_one(FilterInput)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the key that opens the filter where it is a character of the filter."""
        if action == "filter" and self.is_mounted and self.screen.focused is self.filter_line:
            return False
        return super().check_action(action, parameters)

    def action_filter(self) -> None:
        """Open the filter. The next key is a part of it."""
        self.filter_line.add_class("open")
        focus_now(self.filter_line)

    def action_clear_filter(self) -> None:
        """Clear and close the filter."""
        self.filter_line.value = ""
        self.filter_line.remove_class("open")
        self.apply_filter("")
        self.take_focus()

    def accept_filter(self, text: str) -> None:
        """Apply this filter, and leave the input; an empty one closes it."""
        self.apply_filter(text)
        if not text:
            self.filter_line.remove_class("open")
        self.take_focus()

    def apply_filter(self, text: str) -> None:
        """Show the rows that match this text."""
        raise NotImplementedError

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.apply_filter(self.filter_line.value)  # not the event's: it may be older


# ---- the filter


def focus_now(widget: Widget) -> None:
    """Move the focus to a widget, before the next key arrives."""
    widget.screen.set_focus(widget, scroll_visible=False)


class FilterInput(Input):
    """An input that `enter` and `escape` leave.

    `accept` gets the text that was entered, and `clear` is called for escape. Both must move the focus by `focus_now`.
    """

    def __init__(self, placeholder: str, accept: Callable[[str], None], clear: Callable[[], None]) -> None:
        super().__init__(placeholder=placeholder, compact=True)
        self._accept, self._clear = accept, clear

    async def _on_key(self, event: events.Key) -> None:
        focused = self.screen.focused
        if focused is not self:
            event.prevent_default()
            event.stop()
            if focused is not None:
                focused.post_message(events.Key(event.key, event.character))
        elif event.key in ("enter", "escape"):
            event.prevent_default()
            event.stop()
            if event.key == "enter":
                self._accept(self.value)
            else:
                self._clear()
        else:
            await super()._on_key(event)


# ---- long work


LARGE = 20_000
"""The nodes from which on a view reads all of them in slices."""
SECONDS = 0.04
"""The time after which a slice ends, so that a key waits no longer."""
PAUSE = 0.005
"""The time between two slices."""


class Work(NamedTuple):
    """The steps, which yield the completed share; a function that shows the share; and one for the end."""

    steps: Iterator[float]
    show: Callable[[float], None]
    done: Callable[[], None]


class SlicedWork:
    """Run long work on the app's thread in slices, so that keys are handled and frames are drawn in between.

    A widget has at most one piece of work. It ends with the widget, because its timers do.
    """

    def __init__(self, widget: MessagePump, clock: Callable[[], float] = time.perf_counter) -> None:
        self._widget, self._clock = widget, clock
        self._work: Work | None = None

    @property
    def is_running(self) -> bool:
        """Return whether work has begun and not ended."""
        return self._work is not None

    def start(self, steps: Iterator[float], show: Callable[[float], None], done: Callable[[], None]) -> None:
        """Take all `steps`, which yield the completed share. Between slices `show` it; call `done` after the last one.

        The first slice comes after the caller's messages were handled, so `show(0.0)` is on screen before it.
        """
        assert not self.is_running
        self._work = Work(steps, show, done)
        show(0.0)
        self._widget.set_timer(PAUSE, self._slice)

    def _slice(self) -> None:
        assert self._work is not None
        work, end = self._work, self._clock() + SECONDS
        for share in work.steps:
            if self._clock() >= end:
                work.show(share)
                self._widget.set_timer(PAUSE, self._slice)
                return
        self._work = None
        work.done()
