"""Show in full all that the lines of the screen may cut: the verdict, notices, the headline and the selected item."""

from __future__ import annotations

import json
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from radixkv_monitor.dialogs import TextScreen
from radixkv_monitor.formatting import clock
from radixkv_monitor.print_once import to_text
from radixkv_monitor.state import State
from radixkv_monitor.summary import summarise, verdict
from radixkv_monitor.thresholds import DEFAULTS, Thresholds
from radixkv_monitor.views import View


def verdict_texts(state: State, thresholds: Thresholds = DEFAULTS) -> list[tuple[str, str]]:
    """Return the verdict on a state, and its reasons with their levels."""
    found = verdict(state, summarise(state), thresholds)
    reasons = "\n".join(f"{each.level:<5}{each.sentence}" for each in found.reasons)
    return [(f"Verdict at {clock(state.now)}", found.sentence), ("Reasons", reasons)]


def view_texts(view: Widget) -> list[tuple[str, str]]:
    """Return the headline of a view and the description of its selected item, also if there is no room for them."""
    from radixkv_monitor.widgets.detail_pane import DetailPane

    panes = [pane.detail.text for pane in view.query(DetailPane) if pane.detail is not None]
    selected = [*_texts(view, ".detail"), *panes]
    return [("Headline", "\n".join(_texts(view, ".headline"))), ("Selected", "\n\n".join(selected))]


def copied_text(view: View, state: State) -> str:
    """Return the text to copy: the description of the selected item, or the summary of the engine without one."""
    _, (_, selected) = view_texts(view)
    return selected or to_text(state, thresholds=view.thresholds)


def copied_json(view: View) -> str:
    """Return the selected row of a view as JSON, or all its rows without one."""
    row = view.selected_row()
    return view.export().to_json() if row is None else json.dumps(dict(row), indent=2)


def _texts(view: Widget, selector: str) -> list[str]:
    return [text for each in view.query(selector).results(Static) if (text := str(each.content))]


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
