"""A list of running engines to choose from. Knows what was found; does not know how to attach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from radixkv_monitor.shutdown import heed
from radixkv_monitor.theme import DARK, THEMES


class PickerApp(App[int]):
    """Returns the index of the line that was chosen, or None."""

    CSS = """
    Label { padding: 1 2; text-style: bold; }
    OptionList { height: auto; max-height: 1fr; margin: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self._lines = lines
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name

    def compose(self) -> ComposeResult:
        """A question and the lines."""
        yield Label(f"{len(self._lines)} engines run here. Which one? (enter: watch it, q: quit)")
        yield OptionList(*(Option(line) for line in self._lines), markup=False)

    def on_mount(self) -> None:
        """Be ready to leave."""
        heed(self)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """That one."""
        self.exit(event.option_index)
