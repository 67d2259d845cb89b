"""Show in full all that the lines of the screen may cut: the verdict, the notices, and the selected item."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from radixkv_monitor.dialogs import TextScreen


class InfoScreen(TextScreen):
    """Show titled texts, wrapped, in a box that scrolls."""

    def __init__(self, parts: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.parts = [(title, text) for title, text in parts if text]

    def compose(self) -> ComposeResult:
        """Lay out the texts, one below the other."""
        with VerticalScroll(id="dialog"):
            for title, text in self.parts:
                yield Static(Content.assemble((title, "bold $primary"), f"\n{text}\n"), markup=False)
