"""A table of any number of rows, of which only the visible ones are drawn; the cursor stays with its row.

Knows columns, cells and the cursor. Does not know what the rows mean: a cell is pieces of text, each in one of the
named styles below, which the themes colour.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

Row = TypeVar("Row")
Cell = Sequence[tuple[str, str]]
"""Pieces of text, each with the name of its style: see RowTable.COMPONENT_CLASSES, without "row-table--"."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: `cell` says what it shows of a row in `width` cells.

    Where the table is too narrow for all, those of the highest `rank` are left out first. A column that `grows` takes
    what is left over, up to `most` cells.
    """

    title: str
    width: int
    cell: Callable[[Row, int], Cell]
    rank: int = 0
    right: bool = False
    grows: bool = False
    most: int = 1000


class RowTable(ScrollView, Generic[Row], can_focus=True):
    """Rows under a header; O(visible rows) to draw, O(rows) to show new ones."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "row-table--header",
        "row-table--plain",
        "row-table--dim",
        "row-table--good",
        "row-table--warn",
        "row-table--bad",
        "row-table--info",
        "row-table--accent",
        "row-table--cursor",
    }
    DEFAULT_CSS = """
    RowTable { height: 1fr; scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
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
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "edge(0)", "first", show=False),
        Binding("end", "edge(-1)", "last", show=False),
        Binding("enter", "select", "open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row; `key` is None where there is no row."""

        def __init__(self, table: RowTable[Any], key: Hashable) -> None:
            self.table = table
            self.key = key
            super().__init__()

        @property
        def control(self) -> RowTable[Any]:
            """The table."""
            return self.table

    class Opened(Moved):
        """Enter, or a click on the row under the cursor."""

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        key: Callable[[Row], Hashable],
        *,
        empty: str = "nothing yet",
        id: str | None = None,
    ) -> None:
        """Show `columns` of rows that `key` tells apart; `empty` is said while there are none."""
        super().__init__(id=id)
        self._columns, self._key, self._empty = tuple(columns), key, empty
        self._rows: Sequence[Row] = ()
        self._at = 0
        self._cursor_key: Hashable = None
        self._shown: list[tuple[Column[Row], int]] = []
        self._fitted = -1

    # ---- what is shown

    @property
    def wide(self) -> int:
        """Columns that are drawn on: the scroll bar's place stays free, as a bar that comes or goes is no resize."""
        return self.scrollable_content_region.width

    @property
    def rows(self) -> Sequence[Row]:
        """What is shown, from top to bottom."""
        return self._rows

    @property
    def cursor(self) -> Row | None:
        """The row under the cursor."""
        return self._rows[self._at] if self._at < len(self._rows) else None

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows; the cursor stays on its row, or in its place if that is gone."""
        self._rows = rows
        found = next((index for index, row in enumerate(rows) if self._key(row) == self._cursor_key), None)
        self._at = min(self._at, max(len(rows) - 1, 0)) if found is None else found
        self.virtual_size = Size(self.wide, len(rows) + 1)
        self._note_cursor()
        self.refresh()

    def say_when_empty(self, text: str) -> None:
        """What to say while there are no rows."""
        if text != self._empty:
            self._empty = text
            self.refresh()

    def go_to(self, key: Hashable) -> bool:
        """Put the cursor on the row of this key, if it is shown."""
        for index, row in enumerate(self._rows):
            if self._key(row) == key:
                self._move_to(index)
                return True
        return False

    # ---- keys and mouse

    def action_move(self, by: int) -> None:
        """Move the cursor by so many rows."""
        self._move_to(self._at + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by so many screens."""
        self._move_to(self._at + by * max(1, self.size.height - 2))

    def action_edge(self, place: int) -> None:
        """Move the cursor to the first (0) or the last (-1) row."""
        self._move_to(len(self._rows) - 1 if place else 0)

    def action_select(self) -> None:
        """Open the row under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Opened(self, self._cursor_key))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the row that was clicked; a click on the cursor opens it."""
        row = event.y - 1 + int(self.scroll_offset.y)
        if event.y < 1 or not 0 <= row < len(self._rows):
            return
        if row == self._at:
            self.action_select()
        self._move_to(row)

    def _move_to(self, index: int) -> None:
        if not self._rows:
            return
        self._at = min(max(index, 0), len(self._rows) - 1)
        body = max(1, self.size.height - 1)
        top = int(self.scroll_offset.y)
        if not top <= self._at < top + body:
            self.scroll_to(y=self._at if self._at < top else self._at - body + 1, animate=False)
        self._note_cursor()
        self.refresh()

    def _note_cursor(self) -> None:
        key = self._key(self._rows[self._at]) if self._rows else None
        if key != self._cursor_key:
            self._cursor_key = key
            self.post_message(self.Moved(self, key))

    # ---- drawing

    def on_resize(self, event: events.Resize) -> None:
        """Rows are as wide as the table."""
        self.virtual_size = Size(self.wide, len(self._rows) + 1)

    def render_line(self, y: int) -> Strip:
        """The header, or a row."""
        width = self.wide
        if width != self._fitted:
            self._fitted, self._shown = width, _fitting(self._columns, width)
        if y == 0:
            return self._line([[(column.title, "header")] for column, _ in self._shown], width, self._style("header"))
        index = y - 1 + int(self.scroll_offset.y)
        if not self._rows and y == 2:
            return Strip([Segment(set_cell_size(f"  {self._empty}", width), self._style("dim"))], width)
        if index >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        over = None
        if index == self._at and self.has_focus:
            over = self._style("cursor")
        row = self._rows[index]
        return self._line([column.cell(row, size) for column, size in self._shown], width, over)

    def _line(self, cells: Sequence[Cell], width: int, over: Style | None) -> Strip:
        segments = []
        for cell, (column, size) in zip(cells, self._shown, strict=True):
            segments += self._segments(cell, size, column.right)
            segments.append(Segment(" ", self.rich_style))
        strip = Strip(segments).adjust_cell_length(width, self.rich_style)
        if over is None:
            return strip
        lit = Style(bgcolor=over.bgcolor, bold=True)
        return Strip(Segment.apply_style(strip, post_style=lit), width)

    def _segments(self, cell: Cell, width: int, right: bool) -> list[Segment]:
        """The pieces of a cell, cut or filled up to its width."""
        segments, left = [], width
        for text, style in cell:
            if left <= 0:
                break
            if cell_len(text) > left:
                text = set_cell_size(text, left - 1) + "…"
            segments.append(Segment(text, self._style(style)))
            left -= cell_len(text)
        filling = [Segment(" " * left, self.rich_style)] if left > 0 else []
        return [*filling, *segments] if right else [*segments, *filling]

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"row-table--{name}")


def _fitting(columns: Sequence[Column[Row]], width: int) -> list[tuple[Column[Row], int]]:
    """The columns that fit into `width`, with their widths; what is left over goes to those that grow."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) > width:
        kept.remove(max(reversed(kept), key=lambda column: column.rank))
    growing = [column for column in kept if column.grows]
    left = max(0, width - sum(column.width + 1 for column in kept))
    more = left // len(growing) if growing else 0
    return [(column, min(column.width + more * column.grows, column.most)) for column in kept]
