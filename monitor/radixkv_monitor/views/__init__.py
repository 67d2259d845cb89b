"""The screens' common face, and the table of them. Views draw a State; they know no feed and no other view."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from textual.widget import Widget

from radixkv_monitor.export import Table
from radixkv_monitor.messages import Selection
from radixkv_monitor.state import State


class View(Widget, can_focus=False):
    """One screen. A view fills the room that it is given and draws what `update` tells it, nothing else."""

    def update(self, state: State) -> None:
        """Draw this state; told while the view is on screen, at most ten times a second, on the app's thread."""
        raise NotImplementedError

    def export(self) -> Table:
        """What the view shows now, sorted and filtered as on screen, as rows."""
        raise NotImplementedError

    def select(self, selection: Selection) -> None:
        """Show what another view selected; told when it changes and when this view comes to the front."""

    def sort_by(self, name: str) -> bool:
        """Sort by a column's or an order's name; False if this view has none of that name."""
        return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A view's place in the app: its name, title and module; the class is imported when it is first shown."""

    name: str
    title: str
    module: str
    class_name: str

    def load(self) -> type[View]:
        """The view's class."""
        return cast("type[View]", getattr(import_module(self.module), self.class_name))


VIEWS = tuple(
    Entry(title.lower(), title, f"radixkv_monitor.views.{title.lower()}", f"{title}View")
    for title in ("Overview", "Tree", "Pool", "Sessions", "Evictions", "Requests")
)
"""In the order of the keys 1 to 6."""
