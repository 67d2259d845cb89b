"""The screens' common face, and the table of them. Views draw a State; they know no feed and no other view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Draw this state; told while the view is on screen, at most five times a second, on the app's thread."""
        raise NotImplementedError

    def export(self) -> Table:
        """What the view shows now, sorted and filtered as on screen, as rows."""
        raise NotImplementedError

    def select(self, selection: Selection) -> None:
        """Show what another view selected; told when it changes and when this view comes to the front."""

    def take_focus(self) -> None:
        """Give the keyboard to what in this view wants it: by default the first that can have it."""
        for widget in self.query("*"):
            if widget.focusable:
                widget.focus(scroll_visible=False)
                return

    @classmethod
    def sorts(cls) -> Sequence[str]:
        """What `sort_by` takes."""
        return ()

    def sort_by(self, name: str) -> bool:
        """Sort by a column's or an order's name; False if this view has none of that name."""
        return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A view's place in the app. Its class, such as `tree.TreeView`, is imported when it is first shown."""

    title: str
    about: str

    @property
    def name(self) -> str:
        """By which messages and options call it."""
        return self.title.lower()

    def load(self) -> type[View]:
        """The view's class."""
        return cast("type[View]", getattr(import_module(f"radixkv_monitor.views.{self.name}"), f"{self.title}View"))


VIEWS = (
    Entry("Overview", "how the engine is doing: hits, pool, times, trouble"),
    Entry("Tree", "the radix tree: what is cached, who holds it"),
    Entry("Pool", "the blocks: free, active, cached, pinned"),
    Entry("Sessions", "conversations, and what they found in the cache"),
    Entry("Evictions", "what had to go, and what was wanted again"),
    Entry("Requests", "requests in time, and why a prompt was not found"),
)
"""In the order of the keys 1 to 6."""


def sorts() -> Mapping[str, Sequence[str]]:
    """By view, what it can be sorted by. Imports them all."""
    return {entry.name: names for entry in VIEWS if (names := entry.load().sorts())}
