"""A view with a filter: one line of input that opens over it and goes again. Knows no rows."""

from __future__ import annotations

from textual.widgets import Input

from radixkv_monitor.views import View


class FilteredView(View):
    """A view that has one Input, which is its filter."""

    def action_filter(self) -> None:
        """Open the filter."""
        line = self.query_one(Input)
        line.add_class("open")
        line.focus()

    def action_clear_filter(self) -> None:
        """Show all rows again."""
        line = self.query_one(Input)
        line.value = ""
        line.remove_class("open")
        self.take_focus()
