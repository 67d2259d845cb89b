"""What views tell the app: that a node, a block or a request was selected, so that other views can show it, too.

What a view shows, as rows for other programs: JSON and CSV. Knows tables and files; knows no screen.

The screens' common face, and the table of them. Views draw a State; they know no feed and no other view.

A view with a filter: one line of input that opens over it and goes again. Knows no rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input

from radixkv_monitor.state import State


@dataclass(frozen=True, slots=True)
class Selection:
    """What is selected, of each kind; None: nothing of that kind."""

    node: int | None = None
    block: int | None = None
    request: int | None = None


class Selected(Message):
    """A view selected something. With `show`, the view that is home to it comes to the front."""

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


class RequestSelected(Selected):
    """A request was selected, by its number."""

    kind, home = "request", "requests"


@dataclass(frozen=True, slots=True)
class Table:
    """Named rows; every row has the same keys. Values are str, int, float, bool, None, or lists of those."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """A JSON array of objects."""
        return json.dumps([dict(row) for row in self.rows], indent=2)

    def to_csv(self) -> str:
        """A header and a line per row; lists become their values, separated by blanks. Empty if there are no rows."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in self.rows)
        return out.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


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
