"""The radix tree as lines with a cursor.

While the tree changes, the view stays at the node under the cursor, if the user moved the cursor and it is visible.
Else it stays at the topmost node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from radixkv_monitor.tree_branch import Branch
from radixkv_monitor.tree_rows import TreeRows
from radixkv_monitor.widgets.cached_lines import CURSOR_KEYS, CursorLines
from radixkv_monitor.widgets.tree_row import RowContext, RowRenderer, idle, lead_of, left_width


class FlatTree(CursorLines[tuple[Any, ...]]):
    """The rows of a TreeRows. O(visible rows) an update."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"flat-tree--header", "flat-tree--dim", "flat-tree--cursor"}
    DEFAULT_CSS = """
    FlatTree > .flat-tree--header { color: $text-muted; text-style: bold; background: $panel; }
    FlatTree > .flat-tree--dim { color: $text-muted; }
    FlatTree > .flat-tree--cursor { background: $primary 30%; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *CURSOR_KEYS,
        Binding("right,l", "open", "open", show=False),
        Binding("left,h", "close", "close", show=False),
        Binding("o", "turn", "open or close", show=False),
        Binding("O", "all(True)", "open all", show=False),
        Binding("C", "all(False)", "close all", show=False),
        Binding("enter", "choose", "show in the pool", show=False),
    ]
    header = 1

    class Moved(Message):
        """The cursor moved to another node; `by_hand` if the user moved it."""

        def __init__(self, node: int, by_hand: bool) -> None:
            super().__init__()
            self.node = node
            self.by_hand = by_hand

    class Chosen(Message):
        """Enter was pressed on a node."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    def __init__(self, rows: TreeRows, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows = rows
        self._row_context = RowContext()
        self._node: int | None = (
            None  # the node that the user or `go_to` selected; None: the cursor stays in the first row
        )
        self._path: frozenset[int] = frozenset()
        self._notice = ""

    # ---- contents

    @property
    def cursor(self) -> Branch | None:
        """The branch under the cursor."""
        rows = self.rows.rows
        return rows[self.at] if self.at < len(rows) else None

    def show(self, context: RowContext, before: Sequence[Branch] | None = None) -> None:
        """Draw the lines that differ. `before` are the rows of the last call, if they moved since."""
        self._row_context = context
        if before is not None:
            self._stay(before)
        self.repaint()

    def set_notice(self, notice: str) -> None:
        """Set the text of a tree without rows, "" for the usual one."""
        self._notice = notice
        self.repaint()

    def mark_path(self, nodes: frozenset[int]) -> None:
        """Set the path that the view follows."""
        self._path = nodes

    def _stay(self, before: Sequence[Branch]) -> None:
        """Keep the cursor on its node, and the view at its anchor, after the rows moved."""
        top, visible = self.top, range(self.top, self.top + self.body)
        anchor = self.at if self._node is not None and self.at in visible else top
        stays = self._survivor(before, anchor) if top or self._node is not None else None
        if self._node is not None:
            found = self._survivor(before, self.at)
            self.at = 0 if found is None else found
        self.at = min(self.at, max(0, len(self.rows.rows) - 1))
        self.virtual_size = Size(self.line_width, len(self.rows.rows) + self.header)
        if stays is not None and (matching := max(0, stays - (anchor - top))) != top:
            self.scroll_to(y=matching, animate=False)
        self._note(by_hand=False)
        self.repaint()

    def _survivor(self, before: Sequence[Branch], place: int) -> int | None:
        """Return where the row in this place is now, or the nearest row that still exists."""
        index = self.rows.index
        for at in chain(range(place, len(before)), range(min(place, len(before)) - 1, -1, -1)):
            if (found := index.get(before[at].number)) is not None:
                return found
        return None

    def go_to(self, node: int, *, by_hand: bool = False) -> bool:
        """Move the cursor to a node, and open its ancestors. Returns False if the node cannot be shown."""
        before = self.rows.rows
        if not self.rows.open_to(node):
            return False
        if self.rows.rows is not before:
            self.virtual_size = Size(self.line_width, len(self.rows.rows) + self.header)
            self.refresh()
        self.move_to(self.rows.index[node], by_hand=by_hand)
        return True

    # ---- keys and mouse

    def action_open(self) -> None:
        """Open the node; if it is open, move to its first child."""
        branch = self.cursor
        if branch is not None and branch.children:
            if branch.node.id in self.rows.closed:
                self._open(branch, True)
            else:
                self.move_to(self.at + 1)

    def action_close(self) -> None:
        """Close the node; if it is closed, or a leaf, move to its parent."""
        branch = self.cursor
        if branch is None:
            return
        if branch.children and branch.node.id not in self.rows.closed:
            self._open(branch, False)
        elif (parent := self.rows.index.get(branch.node.parent)) is not None:
            self.move_to(parent)

    def action_turn(self) -> None:
        """Open or close the node."""
        branch = self.cursor
        if branch is not None and branch.children:
            self._open(branch, branch.node.id in self.rows.closed)

    def action_all(self, is_open: bool) -> None:
        """Open all nodes, or close all nodes except the namespaces."""
        closable = [number for number, branch in self.rows.branches.items() if branch.children and not branch.is_root]
        self._hold_cursor()
        before = self.rows.rows
        self.rows.open(self.rows.closed.copy() if is_open else closable, is_open)
        if not is_open and self._node is not None and self._node not in self.rows.index:
            self._node = self._first_shown_above(self._node)
            self.at = self.rows.index.get(self._node, 0) if self._node is not None else 0
            before = self.rows.rows
        self._stay(before)
        self.bring_into_view(self.at)

    def action_choose(self) -> None:
        """Choose the node under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Chosen(self.cursor.node.id))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked row; a click on the cursor, or on the sign, opens or closes the node."""
        place = event.y - self.header + self.top
        if event.y < self.header or not 0 <= place < len(self.rows.rows):
            return
        left = left_width(self.line_width, self._row_context.sends_reused)
        on_sign = event.x == cell_len(lead_of(self.rows, self.rows.rows[place], left))
        again = place == self.at and self._node is not None
        self.move_to(place)
        if again or on_sign:
            self.action_turn()

    def on_resize(self, event: events.Resize) -> None:
        """Fit the columns into the new width."""
        self.forget_lines()
        self.virtual_size = Size(self.line_width, len(self.rows.rows) + self.header)

    def _hold_cursor(self) -> None:
        if self._node is None and self.cursor is not None:
            self._node = self.cursor.node.id

    def _first_shown_above(self, node: int) -> int | None:
        above = (up.record.id for up in self.rows.branches[node].up() if up.record is not None)
        return next((number for number in above if number in self.rows.index), None)

    def _open(self, branch: Branch, is_open: bool) -> None:
        self._hold_cursor()
        before = self.rows.rows
        self.rows.open([branch.node.id], is_open)
        self._stay(before)

    def move_to(self, place: int, *, by_hand: bool = True) -> None:
        """Move the cursor to this row, or to the nearest one."""
        if not self.rows.rows:
            return
        self.at = min(max(place, 0), len(self.rows.rows) - 1)
        self.bring_into_view(self.at, margin=2)
        if self._node is None:
            self._hold_cursor()
            self.post_message(self.Moved(self.rows.rows[self.at].number, by_hand))
        self._note(by_hand)
        self.repaint()

    def _note(self, by_hand: bool) -> None:
        branch = self.cursor
        node = None if branch is None else branch.node.id
        if self._node is not None and node != self._node:
            self._node = node
            if node is not None:
                self.post_message(self.Moved(node, by_hand))

    # ---- drawing

    def key_of(self, line: int) -> tuple[Any, ...]:
        """Return the header's order and width; or the record, its place in the tree, and the shown time, order and
        cursor.
        """
        if line < 0:
            return (self.rows.sort, self.line_width, self._row_context.sends_reused)
        rows = self.rows.rows
        if line >= len(rows):
            empty = f"  {self._notice or 'nothing is cached, or nothing matches the filter'}"
            return (empty if line == 1 and not rows else "",)
        branch = rows[line]
        node = branch.node
        return (
            node,
            self.rows.lead(branch, left_width(self.line_width, self._row_context.sends_reused)),
            branch.nodes,
            branch.tokens,
            self._row_context.all_tokens and 200 * branch.tokens // self._row_context.all_tokens,
            idle(self._row_context.now - branch.newest),
            bool(branch.children) + (node.id in self.rows.closed),
            self.rows.is_filtered and branch.is_match,
            line == self.at and self.has_focus,
            node.id in self._path,
        )

    def draw(self, line: int, key: tuple[Any, ...]) -> Strip:
        """Draw the tree on the left and numbers on the right."""
        look = RowRenderer(self, self._component_style("dim"), self.rows, self._row_context, self._path)
        if line < 0:
            return look.header(self._component_style("header"))
        if len(key) == 1:
            return Strip([Segment(key[0], self._component_style("dim"))])
        strip = look.row(self.rows.rows[line])
        if key[8]:
            strip = self._highlighted(strip.adjust_cell_length(self.line_width, self.base_style))
        return strip

    def _highlighted(self, strip: Strip) -> Strip:
        """Return the line on the cursor's background, each segment in its own colour."""
        over = Style(bgcolor=self._component_style("cursor").bgcolor, bold=True)
        return Strip([Segment(text, over if style is None else style + over) for text, style, _ in strip])

    def _component_style(self, name: str) -> Style:
        return self.get_component_rich_style(f"flat-tree--{name}")
