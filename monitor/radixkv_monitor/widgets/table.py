"""Show a table of any length: draw only the visible rows, and keep the cursor on its row when rows come and go.

A column is one entry. It holds the title, the width and the value of a row, and how rows are sorted, filtered and
exported by the value. A cell is pieces of text, each in one of the named styles below, which the themes colour.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from radixkv_monitor.widgets.cached_lines import CURSOR_KEYS, CursorLines

Row = TypeVar("Row")
Cell = Sequence[tuple[str, str]]
"""Pieces of text, each with the name of its style: one of RowTable.COMPONENT_CLASSES without "row-table--"."""


def text_of(value: Any) -> str:
    """Return a value as a cell shows it: whole numbers with separators, and a dash for None.

    >>> text_of(12345), text_of("red"), text_of(None)
    ('12,345', 'red', '-')
    """
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column, and everything that a view needs to draw, sort, filter and export it.

    `value` is the plain value of a row. `text` writes it, in `style`; a column with `cell` draws itself instead.
    `sort` names the order by this column, by `sort_key` if that differs from the value; an empty name means none.
    `search` is the text that the filter searches; without it the filter searches a value that is a string.
    `export` names the value in exported rows, if the row's record lacks it.
    A table that is too narrow leaves out the columns of the highest `rank` first. A column that `grows` takes the
    width that is left over, up to `most` cells. An `optional` column is left out while no row has a value.
    """

    title: str
    width: int
    value: Callable[[Row], Any]
    text: Callable[[Any], str] = text_of
    style: str = "plain"
    cell: Callable[[Row, int], Cell] | None = None
    sort: str = ""
    sort_key: Callable[[Row], Any] | None = None
    descending: bool = True
    search: Callable[[Row], str] | None = None
    export: str = ""
    rank: int = 0
    right: bool = False
    grows: bool = False
    most: int = 1000
    optional: bool = False

    draw: Callable[[Row, int], Cell] = field(init=False)
    """Returns the cell of a row in a given width. Set once, because a screen draws a thousand cells."""

    def __post_init__(self) -> None:
        value, text, style = self.value, self.text, self.style
        object.__setattr__(self, "draw", self.cell or (lambda row, _: [(text(value(row)), style)]))

    def key(self, row: Row) -> Any:
        """Return the sort key of a row; rows with None come last."""
        return (self.sort_key or self.value)(row)

    def searched(self, row: Row) -> str:
        """Return the text that the filter searches."""
        if self.search is not None:
            return self.search(row)
        value = self.value(row)
        return value if isinstance(value, str) else ""


class RowTable(CursorLines[tuple[Any, ...]], Generic[Row]):
    """Rows below a header. O(visible rows) to draw, O(rows) to replace."""

    header = 1

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "row-table--header", "row-table--plain", "row-table--dim", "row-table--good", "row-table--warn",
        "row-table--bad", "row-table--info", "row-table--accent", "row-table--cursor",
    }  # fmt: skip
    DEFAULT_CSS = """
    RowTable > .row-table--header { color: $text-muted; text-style: bold; background: $panel; }
    RowTable > .row-table--plain { color: $foreground; }
    RowTable > .row-table--dim { color: $text-muted; }
    RowTable > .row-table--good { color: $success; }
    RowTable > .row-table--warn { color: $warning; }
    RowTable > .row-table--bad { color: $error; }
    RowTable > .row-table--info { color: $primary; }
    RowTable > .row-table--accent { color: $accent; }
    RowTable > .row-table--cursor { background: $primary 30%; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *CURSOR_KEYS,
        Binding("enter", "select", "open", show=False),
    ]

    class Moved(Message):
        """The cursor moved to another row; `key` is None without rows."""

        def __init__(self, table: RowTable[Any], key: Hashable) -> None:
            self.table = table
            self.key = key
            super().__init__()

        @property
        def control(self) -> RowTable[Any]:
            """The table that posted the message."""
            return self.table

    class Opened(Moved):
        """Enter was pressed, or the row under the cursor was clicked."""

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        key: Callable[[Row], Hashable],
        *,
        empty: str = "nothing yet",
        id: str | None = None,
    ) -> None:
        """Show `columns` of rows, each identified by `key`, or the text `empty` without rows."""
        super().__init__(id=id)
        self._columns, self._key, self._empty = tuple(columns), key, empty
        self.rows: Sequence[Row] = ()
        """The shown rows, from top to bottom."""
        self._cursor_key: Hashable = None
        self._is_held = False  # whether the cursor stays with its row; else it stays on the first row
        self.has_lost_row = False
        """Whether the row that the user selected is gone, so that the cursor is on the row in its place."""
        self._shown: list[tuple[Column[Row], int]] = []

    # ---- contents

    @property
    def cursor(self) -> Row | None:
        """The row under the cursor."""
        return self.rows[self.at] if self.at < len(self.rows) else None

    def show(self, rows: Sequence[Row], *, rearranged: bool = False) -> None:
        """Show these rows. The cursor stays on the first row until the user moves it, and then on its row.

        That row stays where it is on the screen. If it is gone, the cursor stays in its place and `has_lost_row` is
        set; after the rows were `rearranged` by another filter or order, it moves to the first row instead.
        """
        before, self.rows = self.at, rows
        self._choose_columns()
        self.virtual_size = Size(self.line_width, len(rows) + self.header)
        found = next((index for index, row in enumerate(rows) if self._key(row) == self._cursor_key), None)
        if not self._is_held or (found is None and rearranged):
            self.at, self._is_held, self.has_lost_row = 0, False, False
        elif found is None:
            self.at = min(self.at, max(len(rows) - 1, 0))
            self.has_lost_row = bool(rows)
        else:
            self.at = found
            if rearranged:
                self.bring_into_view(found)
            elif self.top <= before < self.top + self.body:
                self.scroll_to(y=self.top + found - before, animate=False, immediate=True)
        self._note_cursor()
        self.repaint()

    def set_empty_text(self, text: str) -> None:
        """Set the text that replaces rows while there are none."""
        if text != self._empty:
            self._empty = text
            self.repaint()

    def go_to(self, key: Hashable) -> bool:
        """Move the cursor to the row of this key; return whether it is shown."""
        for index, row in enumerate(self.rows):
            if self._key(row) == key:
                self.move_to(index)
                return True
        return False

    # ---- keys and mouse

    def action_edge(self, place: int) -> None:
        """Move the cursor to the first (0) or the last (-1) row; it stays on the first one when rows come."""
        super().action_edge(place)
        self._is_held = bool(place)

    def action_select(self) -> None:
        """Open the row under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Opened(self, self._cursor_key))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked row; a click on the cursor opens it."""
        row = event.y - 1 + int(self.scroll_offset.y)
        if event.y < 1 or not 0 <= row < len(self.rows):
            return
        if row == self.at:
            self.action_select()
        self.move_to(row)

    def move_to(self, place: int) -> None:
        """Move the cursor to this row, or to the nearest one."""
        if not self.rows:
            return
        self.at = min(max(place, 0), len(self.rows) - 1)
        self._is_held, self.has_lost_row = True, False
        self.bring_into_view(self.at)
        self._note_cursor()
        self.repaint()

    def _note_cursor(self) -> None:
        key = self._key(self.rows[self.at]) if self.rows else None
        if key != self._cursor_key:
            self._cursor_key = key
            self.post_message(self.Moved(self, key))

    # ---- drawing

    def on_resize(self, event: events.Resize) -> None:
        """Fit the columns into the new width."""
        self.forget_lines()
        self.virtual_size = Size(self.line_width, len(self.rows) + self.header)
        self._choose_columns()

    def _choose_columns(self) -> None:
        """Choose the columns that have values and room. O(rows)."""
        used = [
            each for each in self._columns if not each.optional or any(each.value(row) is not None for row in self.rows)
        ]
        shown = _fitting(used, self.line_width)
        if shown != self._shown:
            self._shown = shown
            self.forget_lines()

    def key_of(self, line: int) -> tuple[Any, ...]:
        """Return whether the line is highlighted, and its cells; the empty text if there are no rows."""
        if line < 0:
            return False, [[(column.title, "header")] for column, _ in self._shown]
        if line < len(self.rows):
            row = self.rows[line]
            return line == self.at and self.has_focus, [column.draw(row, size) for column, size in self._shown]
        return (self._empty,) if line == 1 and not self.rows else ()

    def draw(self, line: int, key: tuple[Any, ...]) -> Strip:
        """Draw the header, a row, or the empty text."""
        if len(key) < 2:
            return Strip([Segment(f"  {text}", self._component_style("dim")) for text in key])
        is_lit, cells = key
        segments = []
        for cell, (column, size) in zip(cells, self._shown, strict=True):
            segments += self._segments(cell, size, column.right)
            segments.append(Segment(" ", self.base_style))
        strip = Strip(segments).adjust_cell_length(self.line_width, self.base_style)
        if not is_lit and line >= 0:
            return strip
        over = Style(bgcolor=self._component_style("cursor" if is_lit else "header").bgcolor, bold=True)
        return Strip(Segment.apply_style(strip, post_style=over), self.line_width)

    def _segments(self, cell: Cell, width: int, right: bool) -> list[Segment]:
        """Return the pieces of a cell, cut or padded to its width."""
        segments, left = [], width
        for text, style in cell:
            if left <= 0:
                break
            if cell_len(text) > left:
                text = set_cell_size(text, left - 1) + "…"
            segments.append(Segment(text, self._component_style(style)))
            left -= cell_len(text)
        filling = [Segment(" " * left, self.base_style)] if left > 0 else []
        return [*filling, *segments] if right else [*segments, *filling]

    def _component_style(self, name: str) -> Style:
        return self.get_component_rich_style(f"row-table--{name}")


def _fitting(columns: Sequence[Column[Row]], width: int) -> list[tuple[Column[Row], int]]:
    """Return the columns that fit into `width`, with their widths; columns that grow share the rest."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) > width:
        kept.remove(max(reversed(kept), key=lambda column: column.rank))
    growing = [column for column in kept if column.grows]
    left = max(0, width - sum(column.width + 1 for column in kept))
    more = left // len(growing) if growing else 0
    return [(column, min(column.width + more * column.grows, column.most)) for column in kept]
