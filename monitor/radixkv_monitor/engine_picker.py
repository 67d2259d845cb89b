"""Choose an engine: a list of the running ones, read again each second, at the start and in a dialog of the app.

The files of engines are read on a thread, because a socket may have to be tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from radixkv.telemetry.discovery import FoundEngine, engines
from radixkv_monitor.feed_factory import describe
from radixkv_monitor.formatting import plural
from radixkv_monitor.shutdown import exit_on_signals
from radixkv_monitor.theme import DARK, THEMES

_log = logging.getLogger(__name__)

INTERVAL = 1.0
"""The seconds between two looks for engines."""
PRESENT = "present source"
"""The id of the line of a present source that is no running engine of this machine."""


class EngineList(OptionList):
    """The running engines, the oldest first. The list is updated each second, and the cursor stays on its engine.

    `present` describes the source that is watched now, if there is one, and `watched` is the name of its engine. That
    engine is marked; any other present source has a line of its own at the top.
    """

    class Updated(Message):
        """The list was read again."""

    def __init__(
        self, found: Sequence[FoundEngine], present: str = "", watched: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(markup=False)
        self._clock = clock
        self._present, self._watched = present, watched
        self._found: dict[str, FoundEngine] = {}
        self._names: list[str] = []
        self.show(found)

    def on_mount(self) -> None:
        """Begin to look for engines."""
        self._look()
        self.set_interval(INTERVAL, self._look)

    @property
    def heading(self) -> str:
        """The number of engines, as a sentence."""
        number = len(self._found)
        return f"{plural(number, 'engine')} {'is' if number == 1 else 'are'} running." if number else "No engine runs."

    def engine(self, option: str | None) -> FoundEngine | None:
        """Return the engine of a line; None for the present source."""
        return None if option == self._watched else self._found.get(option or "")

    def show(self, found: Sequence[FoundEngine]) -> None:
        """List these engines."""
        self._found = {each.engine: each for each in found}
        now = self._clock()
        lines = {name: self._mark(name) + describe(each, now) for name, each in self._found.items()}
        if self._present and self._watched not in lines:
            lines = {PRESENT: f"● {self._present}", **lines}
        if list(lines) == self._names:
            for name, line in lines.items():
                self.replace_option_prompt(name, line)
        else:
            self._replace(lines)

    def _replace(self, lines: dict[str, str]) -> None:
        """Show other lines. If the line with the cursor is gone, no line has it, so that enter chooses no other one."""
        is_first, at = not self._names, self.highlighted
        chosen = self._names[at] if at is not None else None
        if chosen in (PRESENT, self._watched):
            chosen = PRESENT if PRESENT in lines else self._watched
        self._names = list(lines)
        self.set_options([Option(line, id=name) for name, line in lines.items()])
        if chosen in lines:
            self.highlighted = self._names.index(chosen)
        elif is_first and lines:
            self.highlighted = 0

    def _mark(self, name: str) -> str:
        if not self._present:
            return ""
        return "● " if name == self._watched else "  "

    def _look(self) -> None:
        self.run_worker(self._read, thread=True, exclusive=True, exit_on_error=False)

    def _read(self) -> None:
        try:
            found = engines()
        except OSError as error:
            _log.warning("engines cannot be listed: %s", error)
            return
        self.app.call_from_thread(partial(self._update, found))

    def _update(self, found: Sequence[FoundEngine]) -> None:
        if self.is_attached:
            self.show(found)
            self.post_message(self.Updated())


class EngineScreen(ModalScreen[FoundEngine | None]):
    """Ask which engine to watch from now on; the result is None if it is the present source."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,g", "dismiss", "Close")]

    def __init__(self, present: str, watched: str) -> None:
        super().__init__()
        self._list = EngineList((), present, watched)

    def compose(self) -> ComposeResult:
        """Lay out the question and the list."""
        with VerticalScroll(id="dialog"):
            yield Label("Watch another engine (enter: watch, esc: stay)", markup=False)
            yield self._list

    def on_mount(self) -> None:
        """Move the cursor with the keys of lists."""
        self._list.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the chosen engine."""
        self.dismiss(self._list.engine(event.option_id))


class EnginePicker(App[FoundEngine]):
    """Ask which engine to watch before the app starts; the result is None if none was chosen."""

    CSS = """
    Label { padding: 1 2; text-style: bold; }
    OptionList { height: auto; max-height: 1fr; margin: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, found: Sequence[FoundEngine], clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._list = EngineList(found, clock=clock)
        self._heading = Label(markup=False)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name

    def compose(self) -> ComposeResult:
        """Lay out the question and the list."""
        yield self._heading
        yield self._list

    def on_mount(self) -> None:
        """End on signals."""
        exit_on_signals(self)
        self.on_engine_list_updated()

    def on_engine_list_updated(self) -> None:
        """Update the number of engines."""
        self._heading.update(f"{self._list.heading} Choose one (enter: watch, q: quit).")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the chosen engine."""
        if (found := self._list.engine(event.option_id)) is not None:
            self.exit(found)
