"""The radix tree as lines: what joins a node to its neighbours, its token range, and numbers in columns.

Knows rows, shades and a cursor. Knows no filter's language and no other widget. While the tree changes, the view stays
with a node: with the one under the cursor if the person put it there and it is visible, else with the topmost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor import palette
from radixkv_monitor.palette import Shade
from radixkv_monitor.phrases import duration, short, size, some
from radixkv_monitor.runs import count_blocks
from radixkv_monitor.tree_rows import Branch, Row, TreeRows
from radixkv_monitor.widgets.cached_lines import CachedLines

PARTS = " ▏▎▍▌▋▊▉█"
AGE_LIMITS = (10.0, 60.0, 600.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers; it is there where the widget has room for it and all before it."""

    title: str
    width: int
    sort: str = ""
    from_width: int = 0  # of the widget


COLUMNS = (
    Column("tokens", 8, "size"),
    Column("refs", 5),
    Column("hits", 6, "hits"),
    Column("idle", 8, "recency"),
    Column("blocks", 7),
    Column("bytes", 9, "", 92),
    Column("share", 9, "subtree", 72),
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What else the look of rows depends on."""

    now: float = 0.0
    bytes_per_block: int = 0
    all_tokens: int = 0


class FlatTree(CachedLines[tuple[Any, ...]]):
    """The rows of a TreeRows; O(visible rows) an update."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"flat-tree--header", "flat-tree--dim", "flat-tree--cursor"}
    DEFAULT_CSS = """
    FlatTree > .flat-tree--header { color: $text-muted; text-style: bold; background: $panel; }
    FlatTree > .flat-tree--dim { color: $text-muted; }
    FlatTree > .flat-tree--cursor { background: $primary 30%; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "edge(0)", "first", show=False),
        Binding("end", "edge(-1)", "last", show=False),
        Binding("right,l", "open", "open", show=False),
        Binding("left,h", "close", "close", show=False),
        Binding("o", "turn", "open or close", show=False),
        Binding("O", "all(True)", "open all", show=False),
        Binding("C", "all(False)", "close all", show=False),
        Binding("enter", "choose", "show in the pool", show=False),
    ]
    header = 1

    class Moved(Message):
        """The cursor is on another node; `by_hand` if the person put it there."""

        def __init__(self, node: int, by_hand: bool) -> None:
            super().__init__()
            self.node = node
            self.by_hand = by_hand

    class Chosen(Message):
        """Enter on a node."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    def __init__(self, rows: TreeRows, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows = rows
        self._terms = Terms()
        self._at = 0
        self._node: int | None = None  # where the person, or `go_to`, put the cursor; None: it stays in the first row
        self._path: frozenset[int] = frozenset()

    # ---- what is shown

    @property
    def cursor(self) -> Branch | None:
        """The branch under the cursor."""
        rows = self.rows.rows
        return rows[self._at].branch if self._at < len(rows) else None

    def show(self, terms: Terms, before: Sequence[Row] | None = None) -> None:
        """Draw what differs. `before` are the rows that were shown, if they moved since."""
        self._terms = terms
        if before is not None:
            self._stay(before)
        self.repaint()

    def mark_path(self, nodes: frozenset[int]) -> None:
        """These are the path that the view follows."""
        self._path = nodes

    def _stay(self, before: Sequence[Row]) -> None:
        """The rows moved: keep the cursor on its node, and the view where its anchor is."""
        top, visible = self.top, range(self.top, self.top + self.body)
        anchor = self._at if self._node is not None and self._at in visible else top
        stays = self._survivor(before, anchor) if top or self._node is not None else None
        if self._node is not None:
            found = self._survivor(before, self._at)
            self._at = 0 if found is None else found
        self._at = min(self._at, max(0, len(self.rows.rows) - 1))
        self.virtual_size = Size(self.wide, len(self.rows.rows) + self.header)
        if stays is not None and (wanted := max(0, stays - (anchor - top))) != top:
            self.scroll_to(y=wanted, animate=False)
        self._note(by_hand=False)
        self.repaint()

    def _survivor(self, before: Sequence[Row], place: int) -> int | None:
        """Where the row is that was in this place, or the nearest one to it that still is."""
        index = self.rows.index
        for row in (*before[place:], *reversed(before[:place])):
            if (found := index.get(row.branch.node.id)) is not None:
                return found
        return None

    def go_to(self, node: int, *, by_hand: bool = False) -> bool:
        """Put the cursor on a node, and open what hides it. False if it cannot be shown."""
        before = self.rows.rows
        if not self.rows.open_to(node):
            return False
        if self.rows.rows is not before:
            self.virtual_size = Size(self.wide, len(self.rows.rows) + self.header)
            self.refresh()
        self._move_to(self.rows.index[node], by_hand=by_hand)
        return True

    # ---- keys and mouse

    def action_move(self, by: int) -> None:
        """Move the cursor by so many rows."""
        self._move_to(self._at + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by so many screens."""
        self._move_to(self._at + by * max(1, self.body - 1))

    def action_edge(self, place: int) -> None:
        """Move the cursor to the first (0) or the last (-1) row."""
        self._move_to(len(self.rows.rows) - 1 if place else 0)

    def action_open(self) -> None:
        """Open the node; if it is open, go to its first child."""
        branch = self.cursor
        if branch is not None and branch.children:
            if branch.node.id in self.rows.closed:
                self._open(branch, True)
            else:
                self._move_to(self._at + 1)

    def action_close(self) -> None:
        """Close the node; if it is closed, or a leaf, go to its parent."""
        branch = self.cursor
        if branch is None:
            return
        if branch.children and branch.node.id not in self.rows.closed:
            self._open(branch, False)
        elif (parent := self.rows.index.get(branch.node.parent)) is not None:
            self._move_to(parent)

    def action_turn(self) -> None:
        """Open or close the node."""
        branch = self.cursor
        if branch is not None and branch.children:
            self._open(branch, branch.node.id in self.rows.closed)

    def action_all(self, is_open: bool) -> None:
        """Open everything, or close all but the namespaces."""
        closable = [number for number, branch in self.rows.branches.items() if branch.children and not branch.is_root]
        self._pin_cursor()
        before = self.rows.rows
        self.rows.open(self.rows.closed.copy() if is_open else closable, is_open)
        if not is_open and self._node is not None and self._node not in self.rows.index:
            self._node = self._first_shown_above(self._node)
            self._at = self.rows.index.get(self._node, 0) if self._node is not None else 0
            before = self.rows.rows
        self._stay(before)
        self.bring_into_view(self._at)

    def action_choose(self) -> None:
        """Choose the node under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Chosen(self.cursor.node.id))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the row that was clicked; a click on the cursor, or on the sign, opens or closes."""
        place = event.y - self.header + self.top
        if event.y < self.header or not 0 <= place < len(self.rows.rows):
            return
        row = self.rows.rows[place]
        on_sign = event.x == cell_len(self._lead(row, self._left_width()))
        again = place == self._at and self._node is not None
        self._move_to(place)
        if again or on_sign:
            self.action_turn()

    def on_resize(self, event: events.Resize) -> None:
        """Other columns."""
        self.forget_lines()
        self.virtual_size = Size(self.wide, len(self.rows.rows) + self.header)

    def _pin_cursor(self) -> None:
        if self._node is None and self.cursor is not None:
            self._node = self.cursor.node.id

    def _first_shown_above(self, node: int) -> int | None:
        above = (up.record.id for up in self.rows.branches[node].up() if up.record is not None)
        return next((number for number in above if number in self.rows.index), None)

    def _open(self, branch: Branch, is_open: bool) -> None:
        self._pin_cursor()
        before = self.rows.rows
        self.rows.open([branch.node.id], is_open)
        self._stay(before)

    def _move_to(self, place: int, *, by_hand: bool = True) -> None:
        if not self.rows.rows:
            return
        self._at = min(max(place, 0), len(self.rows.rows) - 1)
        self.bring_into_view(self._at, margin=2)
        if self._node is None:
            self._pin_cursor()
            self.post_message(self.Moved(self.rows.rows[self._at].id, by_hand))
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
        """The header; or the record, its place in the tree, and what is shown of time, order and cursor."""
        if line < 0:
            return (self.rows.sort, self.wide)
        rows = self.rows.rows
        if line >= len(rows):
            return (line == 1 and not rows,)
        branch, lead = rows[line]
        node = branch.node
        return (
            node,
            lead,
            branch.nodes,
            branch.tokens,
            self._terms.all_tokens and 64 * branch.tokens // self._terms.all_tokens,
            _idle(self._terms.now - branch.newest),
            bool(branch.children) + (node.id in self.rows.closed),
            self.rows.is_filtered and branch.is_wanted,
            line == self._at and self.has_focus,
            node.id in self._path,
        )

    def draw(self, line: int, key: tuple[Any, ...]) -> Strip:
        """A row: the tree on the left, numbers on the right."""
        dim, left = self._look("dim"), self._left_width()
        if line < 0:
            return self._header(left)
        if len(key) == 1:
            return Strip([Segment("  nothing is cached, or fits the filter" if key[0] else "", dim)])
        row = self.rows.rows[line]
        tree = Strip(self._tree(row, left)).adjust_cell_length(left, self.ground)
        strip = Strip([*tree, *self._numbers(row.branch)])
        if key[8]:
            strip = self._lit(strip.adjust_cell_length(self.wide, self.ground))
        return strip

    def _lit(self, strip: Strip) -> Strip:
        """On the cursor's ground, each segment in its own ink."""
        over = Style(bgcolor=self._look("cursor").bgcolor, bold=True)
        return Strip([Segment(text, over if style is None else style + over) for text, style, _ in strip])

    def _look(self, name: str) -> Style:
        return self.get_component_rich_style(f"flat-tree--{name}")

    def _columns(self) -> list[Column]:
        return [column for column in COLUMNS if self.wide >= column.from_width]

    def _left_width(self) -> int:
        return max(12, self.wide - sum(column.width for column in self._columns()) - 1)

    def _header(self, left: int) -> Strip:
        look = self._look("header")
        by = "" if any(self.rows.sort == column.sort for column in COLUMNS) else f" (by {self.rows.sort})"
        segments = [Segment(set_cell_size(f"  prefix{by}", left), look)]
        for column in self._columns():
            title = f"{column.title}▾" if column.sort == self.rows.sort else column.title
            segments.append(Segment(f"{title:>{column.width}}", look))
        return Strip(segments).adjust_cell_length(self.wide, look)

    def _lead(self, row: Row, left: int) -> str:
        most = max(4, left // 2)
        return row.lead if len(row.lead) <= most else "…" + row.lead[1 - most :]

    def _tree(self, row: Row, left: int) -> list[Segment]:
        branch, node, dim = row.branch, row.branch.node, self._look("dim")
        closed = node.id in self.rows.closed
        on_path = node.id in self._path
        sign = "▸" if closed and branch.children else "▾" if branch.children else "─"
        lead = Segment(self._lead(row, left) + sign, self.style(palette.PATH) if on_path else dim)
        hidden = Segment(f"  +{branch.nodes - 1:,}" if closed and branch.children else "", dim)
        if branch.is_root:
            name = Segment(f" {branch.namespace or 'default'}", self.style(None, None, "bold"))
            return [lead, name, Segment(f"  {some(branch.nodes - 1, 'node')}", dim)]
        shade = shade_of(node)
        faint = self.rows.is_filtered and not branch.is_wanted
        text = "bold" if on_path or (self.rows.is_filtered and branch.is_wanted) else ""
        return [
            lead,
            Segment(f" {sign_of(node)} ", self.style(shade)),
            Segment(f"{node.start:,}-{node.start + node.tokens:,}", dim if faint else self.style(None, None, text)),
            hidden,
            Segment(f"  {_begins(node)}", dim),
        ]

    def _numbers(self, branch: Branch) -> list[Segment]:
        node, terms = branch.node, self._terms
        blocks = branch.blocks if branch.is_root else count_blocks(node.blocks)
        heat = heat_of(terms.now - branch.newest)
        plain = self.ground
        known = {
            "tokens": (f"{branch.tokens if branch.is_root else node.tokens:,}", plain),
            "refs": (f"{node.locks:,}" if node.locks else "·", plain),
            "hits": (short(node.hits) if node.hits else "·", plain),
            "idle": (_idle(terms.now - branch.newest), self.style(heat)),
            "blocks": (f"{blocks:,}", plain),
            "bytes": (size(blocks * terms.bytes_per_block), plain),
        }
        segments = []
        for column in self._columns():
            if column.title == "share":
                bar = _bar(branch.tokens, terms.all_tokens, column.width - 1)
                segments.append(Segment(f" {bar:<{column.width - 1}}", self.style(heat)))
            else:
                text, style = known[column.title]
                segments.append(Segment(f"{text:>{column.width}}", style))
        return segments


def sign_of(node: NodeRecord) -> str:
    """One sign for the state of a node, which says the same as its shade."""
    if node.pins:
        return "◆"
    return "●" if node.locks else "▽" if node.demoted else "○"


def shade_of(node: NodeRecord) -> Shade:
    """The shade of a node's state."""
    if node.pins:
        return palette.PINNED
    return palette.ACTIVE if node.locks else palette.DEMOTED if node.demoted else palette.CACHED


def heat_of(idle: float) -> Shade:
    """The shade of an age in seconds."""
    return palette.AGES[sum(idle >= limit for limit in AGE_LIMITS)]


def _idle(seconds: float) -> str:
    """An age, no finer than a second: rows are not drawn anew because a tenth of one has passed.

    >>> [_idle(each) for each in (0.3, 4.9, 42, 200)]
    ['now', '4 s', '42 s', '3.3 min']
    """
    return "now" if seconds < 1 else f"{int(seconds)} s" if seconds < 60 else duration(seconds)


def _begins(node: NodeRecord) -> str:
    if node.text is not None:
        return repr(node.text)
    return " ".join(map(str, node.head)) + (" …" if node.tokens > len(node.head) else "")


def _bar(part: int, whole: int, width: int) -> str:
    """A part of a whole, to an eighth of a cell; what is there shows at least that.

    >>> _bar(1, 2, 4), _bar(1, 1000, 4), _bar(0, 0, 4), _bar(9, 9, 2)
    ('██', '▏', '', '██')
    """
    eighths = min(8 * width, max(1, round(8 * width * part / whole))) if part > 0 and whole > 0 else 0
    return "█" * (eighths // 8) + (PARTS[eighths % 8] if eighths % 8 else "")
