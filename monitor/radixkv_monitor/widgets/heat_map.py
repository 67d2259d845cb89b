"""A map of cells, each a small number: two cells a character in colour, or one with its sign.

Where the two cells of a character are equal, it shows their sign too. Few cells grow to several columns and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from radixkv_monitor import theme
from radixkv_monitor.theme import SELECTED, Shade
from radixkv_monitor.widgets.cached_lines import CachedLines

Cells = npt.NDArray[np.uint8]
Key = tuple[bytes, int, int, int]

GUTTER = 9
"""The columns for the number of a line's first block."""
LEVEL, MARKED, CURSOR = 0x3F, 0x40, 0x80
"""The bits of a drawn cell: its level, a mark, and the cursor."""
OUTSIDE = LEVEL
DIM = Shade("#7d8590", "#6a717c", " ")
TALLEST = 6
"""The most lines of a cell."""


class HeatMap(CachedLines[Key]):
    """Cells line by line, in reading order. O(visible cells) an update; only lines that differ are drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "left", show=False),
        Binding("right,l", "move(1, 0)", "right", show=False),
        Binding("up,k", "move(0, -1)", "up", show=False),
        Binding("down,j", "move(0, 1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "edge(0)", "first", show=False),
        Binding("end", "edge(-1)", "last", show=False),
        Binding("enter", "open", "open", show=False),
    ]

    class Moved(Message):
        """The cursor moved to another cell."""

        def __init__(self, cell: int) -> None:
            super().__init__()
            self.cell = cell

    class Opened(Message):
        """Enter was pressed, or the cell under the cursor was clicked."""

        def __init__(self, cell: int) -> None:
            super().__init__()
            self.cell = cell

    class Resized(Message):
        """The number of visible cells changed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._cells: Cells = np.empty(0, np.uint8)
        self._shown: Cells = self._cells  # with marks and the cursor
        self._marked: npt.NDArray[np.bool_] | None = None
        self._shades: tuple[Shade, ...] = ()
        self.cursor = 0
        self.per = 1  # blocks per cell
        self.signs = False  # whether a character is one cell with its sign
        self.tall = 1  # lines of a cell, which has twice as many columns if it has several lines

    # ---- geometry

    @property
    def columns(self) -> int:
        """The cells in a row: a multiple of eight, if there is room."""
        return self._columns(self.tall)

    def _columns(self, tall: int) -> int:
        room = max(1, (self.line_width - GUTTER) // _wide(tall))
        return room // 8 * 8 or room

    @property
    def cells_a_line(self) -> int:
        """The cells of one line of characters."""
        return self.columns if self.signs else 2 * self.columns

    def room(self, signs: bool) -> int:
        """Return how many cells are visible at once."""
        return self._columns(1) * self.size.height * (1 if signs else 2)

    def _tall(self, cells: int) -> int:
        """Return the most lines that a cell can have so that all cells are in view: more than one only with signs."""
        if not self.signs or self.per > 1:
            return 1
        fitting = (tall for tall in range(TALLEST, 1, -1) if self._columns(tall) * (self.size.height // tall) >= cells)
        return next(fitting, 1)

    # ---- contents

    def set_zoom(self, per: int, signs: bool) -> None:
        """Show `per` blocks per cell, with signs or two cells a character."""
        if (per, signs) != (self.per, self.signs):
            self.cursor = self.cursor * self.per // per
            self.per, self.signs = per, signs
            self.forget_lines()

    def show(self, cells: Cells, shades: Sequence[Shade], marked: npt.NDArray[np.bool_] | None = None) -> None:
        """Show these cells in these shades, and highlight the `marked` ones."""
        if tuple(shades) != self._shades:
            self._shades = tuple(shades)
            self._strips.clear()
        self._cells, self._marked = cells, marked
        self.cursor = min(self.cursor, max(0, len(cells) - 1))
        self.tall = self._tall(len(cells))
        lines = -(-len(cells) // self.cells_a_line) * self.tall
        if self.virtual_size.height != lines or self.virtual_size.width != self.line_width:
            self.virtual_size = Size(self.line_width, lines)
        self.repaint()

    def repaint(self) -> None:
        """Draw the marks and the cursor on the cells, and the lines that differ from the screen."""
        shown = self._cells.copy() if self._marked is None else self._cells | (self._marked * np.uint8(MARKED))
        if self.has_focus and len(shown):
            shown[self.cursor] |= CURSOR
        self._shown = shown
        super().repaint()

    def go_to(self, cell: int) -> None:
        """Move the cursor to a cell, scroll to it, and post the move."""
        cell = min(max(cell, 0), max(0, len(self._cells) - 1))
        self.bring_into_view(cell // self.cells_a_line * self.tall)
        if cell != self.cursor:
            self.cursor = cell
            self.repaint()
            self.post_message(self.Moved(cell))

    # ---- keys and mouse

    def action_move(self, across: int, down: int) -> None:
        """Move the cursor; it stops at the edge of the map."""
        cell = self.cursor + across + down * self.columns
        if 0 <= cell < len(self._cells):
            self.go_to(cell)

    def action_page(self, by: int) -> None:
        """Move the cursor by a screen."""
        self.go_to(self.cursor + by * max(1, self.body // self.tall) * self.cells_a_line)

    def action_edge(self, place: int) -> None:
        """Move the cursor to the first (0) or the last (-1) cell."""
        self.go_to(len(self._cells) - 1 if place else 0)

    def action_open(self) -> None:
        """Open the cell under the cursor."""
        if len(self._cells):
            self.post_message(self.Opened(self.cursor))

    def cell_at(self, x: int, y: int) -> int | None:
        """Return the cell at this place of the widget: of two in a character, the upper one."""
        column = (x - GUTTER) // _wide(self.tall)
        cell = (y + self.top) // self.tall * self.cells_a_line + column
        return cell if 0 <= column < self.columns and cell < len(self._cells) else None

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked cell; a click on the cursor opens it."""
        cell = self.cell_at(event.x, event.y)
        if cell is None:
            return
        if not self.signs and self.cursor == cell + self.columns:
            cell = self.cursor  # the lower cell of the same character
        if cell == self.cursor and self.has_focus:
            self.action_open()
        self.go_to(cell)

    def on_resize(self, event: events.Resize) -> None:
        """Fit the cells into the new width."""
        self.forget_lines()
        self.post_message(self.Resized())

    # ---- drawing

    def key_of(self, line: int) -> Key:
        """Return its cells."""
        first = line // self.tall * self.cells_a_line
        return self._shown[first : first + self.cells_a_line].tobytes(), self.per, self.columns, self.tall

    def draw(self, line: int, key: Key) -> Strip:
        """Draw the number of its first block, and runs of equal characters. The last line of tall cells is blank."""
        cells = np.frombuffer(key[0], np.uint8)
        row, part = divmod(line, self.tall)
        if not len(cells) or part + 1 == self.tall > 1:
            return Strip.blank(self.line_width, self.base_style)
        here = bool((cells & CURSOR).any())
        number = f"{row * self.cells_a_line * self.per:,}" if not part else ""
        text = f"{number:>{GUTTER - 1}}{'▸' if here and not part else ' '}"
        gutter = Segment(text, self.style(SELECTED, None, "bold") if here else self.style(DIM))
        return Strip([gutter, *(self._signs(cells) if self.signs else self._halves(cells))])

    def _signs(self, cells: Cells) -> list[Segment]:
        """Draw the sign of each cell."""
        if self.tall == 1:
            return [self._sign(value, length) for value, length in _runs(cells)]
        blank = Segment(" ", self.base_style)
        return [each for value in cells.tolist() for each in (self._sign(value, _wide(self.tall) - 1), blank)]

    def _sign(self, value: int, length: int) -> Segment:
        shade = self._shades[value & LEVEL]
        if not theme.has_colours(self.app):
            sign = SELECTED.sign if value & CURSOR else shade.sign
            return Segment(sign * length, self.style(None, None, "reverse" if value & MARKED else ""))
        if value & CURSOR:
            return Segment(shade.sign * length, self.style(shade.ground(), SELECTED, "bold"))
        shade = shade.highlighted() if value & MARKED else shade
        return Segment(shade.sign * length, self.style(shade, shade.ground()))

    def _halves(self, cells: Cells) -> list[Segment]:
        """Draw pairs of cells, the upper one as text colour and the lower one as background, or as one sign."""
        width = self.columns
        padded = np.full(2 * width, OUTSIDE, np.uint8)
        padded[: len(cells)] = cells
        pairs = padded[:width].astype(np.int32) * 256 + padded[width:]
        return [self._pair(value >> 8, value & 255, length) for value, length in _runs(pairs)]

    def _pair(self, upper: int, lower: int, length: int) -> Segment:
        if upper == OUTSIDE:
            return Segment(" " * length, self.base_style)
        if upper == lower:
            return self._sign(upper, length)
        return Segment("▀" * length, self.style(self._ink(upper), self._ink(lower)))

    def _ink(self, value: int) -> Shade | None:
        if value == OUTSIDE:
            return None
        if value & CURSOR:
            return SELECTED
        shade = self._shades[value & LEVEL]
        return shade.highlighted() if value & MARKED else shade


def _wide(tall: int) -> int:
    """Return the columns of a cell with this many lines."""
    return 1 if tall == 1 else 2 * tall


def _runs(values: npt.NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """Return runs of equal neighbours as (value, length)."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate(([0], cuts))
    lengths = np.diff(np.concatenate((starts, [len(values)])))
    return list(zip(values[starts].tolist(), lengths.tolist(), strict=True))
