"""The base of Sessions, Evictions and Requests: a table with a filter, an order, and a description of one row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from radixkv_monitor.state import State
from radixkv_monitor.views import FilteredView, FilterInput, Selection, Table, focus_now
from radixkv_monitor.widgets.table import Column, RowTable

Row = TypeVar("Row")
TALL = 18
"""The height from which a headline that is too long for one line has two."""


class TableView(FilteredView, Generic[Row]):
    """A filtered and sorted table of rows. O(rows log rows) an update."""

    DEFAULT_CSS = """
    TableView { layout: vertical; }
    TableView > .headline { height: 1; color: $text-muted; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    TableView.-long > .headline { height: 2; text-wrap: wrap; }
    TableView > FilterInput { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    TableView > FilterInput.open { display: block; }
    TableView > .detail { height: auto; max-height: 5; padding: 0 1; border-top: solid $panel; }
    TableView > .detail.-long { max-height: 13; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Previous order", show=False),
        Binding("n", "step(1)", "Next", show=False),
        Binding("N", "step(-1)", "Previous", show=False),
    ]

    title: ClassVar[str]
    columns: ClassVar[Sequence[Column[Any]]]
    first_sorts: ClassVar[Sequence[str]]
    """The orders that the `s` key takes first; the first one is the default. The others follow in the order of their
    columns.
    """
    old_sorts: ClassVar[Mapping[str, str]] = {}
    """The present names of orders by their former names, which `--sort` still takes."""
    empty: ClassVar[str]
    noun: ClassVar[str]
    """The thing that a row shows, in the singular."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._order = 0
        self._all: Sequence[Row] = ()
        self._words: Sequence[str] = ()  # of the filter
        self._detail_text = Content("")  # of the row under the cursor
        self._selected_key: Hashable = None  # of the last selection that moved the cursor or was posted by it

    # ---- for subclasses

    def rows_of(self, state: State) -> Sequence[Row]:
        """Return the rows of a state, in any order."""
        raise NotImplementedError

    def key(self, row: Row) -> Hashable:
        """Return a value that identifies the row, and does not change."""
        raise NotImplementedError

    def record(self, row: Row) -> Any:
        """Return the record that a row shows, for export."""
        raise NotImplementedError

    def more_words(self, row: Row) -> str:
        """Return text that the filter searches in addition to the columns."""
        return ""

    def detail(self, row: Row, state: State) -> Content:
        """Describe the row under the cursor in a few lines."""
        raise NotImplementedError

    def headline(self, rows: Sequence[Row], state: State) -> str:
        """Summarise all rows in one line."""
        raise NotImplementedError

    # ---- the widget

    def compose(self) -> ComposeResult:
        """Lay out headline, filter, table and description."""
        yield Static("", classes="headline", markup=False)
        yield FilterInput("filter: words that a row must have", self.accept_filter, self.action_clear_filter)
        yield RowTable(self.columns, self.key, empty=self.empty)
        yield Static("", classes="detail", markup=False)

    @property
    def table(self) -> RowTable[Row]:
        """The table."""
        return self.query_one(RowTable)

    @classmethod
    def orders(cls) -> Sequence[Column[Any]]:
        """Return the columns that rows can be sorted by, in the order of the `s` key."""
        sortable = [column for column in cls.columns if column.sort]
        first = list(cls.first_sorts)
        return sorted(sortable, key=lambda each: first.index(each.sort) if each.sort in first else len(first))

    @property
    def order(self) -> Column[Row]:
        """The column that rows are sorted by."""
        return self.orders()[self._order]

    def on_resize(self) -> None:
        """Give a long headline a second line where there is room."""
        self._refresh()

    def take_focus(self) -> None:
        """Focus the table."""
        focus_now(self.table)

    def update(self, state: State) -> None:
        """Draw this state."""
        self._state = state
        self._all = self.rows_of(state)
        if self.is_mounted:
            self._refresh()

    def export(self) -> Table:
        """Return the shown rows, as they are sorted."""
        return Table(self.title, [self._exported(row) for row in self.table.rows])

    def selected_row(self) -> Mapping[str, Any] | None:
        """Return the row under the cursor."""
        row = self.table.cursor
        return None if row is None else self._exported(row)

    def _exported(self, row: Row) -> dict[str, Any]:
        derived = {column.export: column.value(row) for column in self.columns if column.export}
        return asdict(self.record(row)) | derived

    def selected(self, selection: Selection) -> Hashable:
        """Return the key of the row that another view selected; None without one."""
        return None

    def select(self, selection: Selection) -> None:
        """Move the cursor to the selection of another view, once: the app repeats it whenever it shows this view."""
        key = self.selected(selection)
        if key not in (None, self._selected_key) and self.is_mounted and self.table.go_to(key):
            self._selected_key = key

    @classmethod
    def sorts(cls) -> Sequence[str]:
        """Return the names of the orders, with dashes for blanks, and the former names."""
        return [*(column.sort.replace(" ", "-") for column in cls.orders()), *cls.old_sorts]

    def sort_by(self, name: str) -> bool:
        """Sort by the order of this name, in which blanks may be dashes."""
        name = name.replace(" ", "-")
        names = self.sorts()
        if name not in names:
            return False
        self._order = names.index(self.old_sorts.get(name, name))
        if self.is_mounted:
            self._refresh()
        return True

    # ---- keys

    def action_sort(self, by: int) -> None:
        """Sort by the next or previous order."""
        self._order = (self._order + by) % len(self.orders())
        self._refresh(rearranged=True)

    def action_step(self, by: int) -> None:
        """Move to the next or previous row that matches the filter."""
        self.table.action_move(by)

    def apply_filter(self, text: str) -> None:
        """Show the rows that have all words of this text."""
        self._words = text.lower().split()
        self._refresh(rearranged=True)

    @on(RowTable.Moved)
    def _moved(self, event: RowTable.Moved) -> None:
        event.stop()
        self._show_detail()

    # ---- drawing

    def _refresh(self, *, rearranged: bool = False) -> None:
        if self._state is None:
            return
        wanted = self._words
        rows = [row for row in self._all if self._matches(row, wanted)] if wanted else self._all
        self.table.set_empty_text(self.empty if not wanted else "no row has all of these words (Esc shows all)")
        self.table.show(_sorted(rows, self.order), rearranged=rearranged)
        left = f" · {len(rows):,} of {len(self._all):,} shown" if wanted else ""
        head = f"by {self.order.sort}{left} · {self.headline(self._all, self._state)}"
        is_long = len(head) > self.size.width - 2 and self.size.height >= TALL
        self.set_class(is_long, "-long")
        self.query_one(".headline", Static).update(head, layout=False)
        self._show_detail()

    def _matches(self, row: Row, words: Sequence[str]) -> bool:
        text = " ".join((*(column.searched(row) for column in self.columns), self.more_words(row))).lower()
        return all(word in text for word in words)

    def _show_detail(self) -> None:
        row, state = self.table.cursor, self._state
        text = Content("") if row is None or state is None else self.detail(row, state)
        if self.table.has_lost_row:
            text = Content(f"The selected {self.noun} is no longer listed. The one in its place: ") + text
        if text != self._detail_text:
            self._detail_text = text
            detail = self.query_one(".detail", Static)
            detail.update(text)
            detail.set_class(text.plain.count("\n") > 2, "-long")


def _sorted(rows: Sequence[Row], order: Column[Row]) -> list[Row]:
    """Sort by this column; rows without a key come last, in their present order."""
    keyed = [(order.key(row), row) for row in rows]
    known = [each for each in keyed if each[0] is not None]
    known.sort(key=itemgetter(0), reverse=order.descending)
    return [row for _, row in known] + [row for key, row in keyed if key is None]
