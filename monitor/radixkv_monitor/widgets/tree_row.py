"""Draw a row of the tree: the line work, its token range, and numbers in columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor import theme
from radixkv_monitor.block_map import count_blocks
from radixkv_monitor.formatting import duration, plural, share, short, size
from radixkv_monitor.theme import Shade
from radixkv_monitor.tree_branch import Branch
from radixkv_monitor.tree_rows import TreeRows
from radixkv_monitor.widgets.cached_lines import CachedLines

PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class RowContext:
    """Values that rows depend on in addition to their branch."""

    now: float = 0.0
    bytes_per_block: int = 0
    all_tokens: int = 0
    sends_reused: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column at the right: `text` of a branch in `width` cells, in a tree that has at least `from_width` cells.

    `sort` names the order of tree_rows.SORTS that the column shows. `by_age` takes the colour of the branch's age.
    `with_reused` is whether the column is for engines that send `NodeRecord.reused`, or for older ones; None: for both.
    """

    title: str
    width: int
    text: Callable[[Branch, RowContext], str]
    sort: str = ""
    from_width: int = 0
    by_age: bool = False
    with_reused: bool | None = None


def _blocks(branch: Branch) -> int:
    return branch.blocks if branch.is_root else count_blocks(branch.node.blocks)


COLUMNS = (
    Column("tokens", 8, lambda b, _: _whole(b.tokens if b.is_root else b.node.tokens, 8), "size"),
    Column("refs", 5, lambda b, _: _whole(b.node.locks, 5) if b.node.locks else "·"),
    Column("reused", 7, lambda b, _: _requests(b.node.reused), "reused", with_reused=True),
    Column("ended here", 11, lambda b, _: _requests(b.node.hits), "ended-here", 100, with_reused=True),
    Column("ended here", 11, lambda b, _: _requests(b.node.hits), "ended-here", with_reused=False),
    Column("idle", 8, lambda b, context: idle(context.now - b.newest), "recency", by_age=True),
    Column("blocks", 7, lambda b, _: _whole(_blocks(b), 7)),
    Column("bytes", 9, lambda b, context: size(_blocks(b) * context.bytes_per_block), from_width=92),
    Column("share", 11, lambda b, context: _share(b.tokens, context.all_tokens), "subtree", 72, by_age=True),
)


def _whole(number: int, width: int) -> str:
    """Write a whole number so that it does not touch the column at its left.

    >>> _whole(12_345, 7), _whole(123_456, 7)
    ('12,345', '123k')
    """
    text = f"{number:,}"
    return text if len(text) < width else short(number)


def _requests(number: int | None) -> str:
    return "-" if number is None else short(number) if number else "·"


def columns(line_width: int, sends_reused: bool) -> list[Column]:
    """Return the columns that there is room for, of those that the engine sends."""
    return [
        column for column in COLUMNS if line_width >= column.from_width and column.with_reused in (None, sends_reused)
    ]


def left_width(line_width: int, sends_reused: bool) -> int:
    """Return the width that the columns leave for the tree."""
    return max(12, line_width - sum(column.width for column in columns(line_width, sends_reused)) - 1)


def lead_of(rows: TreeRows, branch: Branch, left: int) -> str:
    """Return the row's line work, cut where the tree is deep."""
    most = max(4, left // 2)
    lead = rows.lead(branch, most)
    return lead if len(lead) <= most else "…" + lead[1 - most :]


class RowRenderer:
    """Draw rows for `lines`, in its colours and width, with the nodes of `path` highlighted."""

    def __init__(
        self, lines: CachedLines[Any], dim: Style, rows: TreeRows, context: RowContext, path: frozenset[int]
    ) -> None:
        self._lines, self._dim, self._rows, self._row_context, self._path = lines, dim, rows, context, path
        self._columns = columns(lines.line_width, context.sends_reused)
        self._left = left_width(lines.line_width, context.sends_reused)

    def header(self, look: Style) -> Strip:
        """Draw the titles, with a mark on the sorted one."""
        by = "" if any(self._rows.sort == column.sort for column in self._columns) else f" (by {self._rows.sort})"
        segments = [Segment(set_cell_size(f"  prefix{by}", self._left), look)]
        for column in self._columns:
            title = f"{column.title}▾" if column.sort == self._rows.sort else column.title
            segments.append(Segment(f"{title:>{column.width}}", look))
        return Strip(segments).adjust_cell_length(self._lines.line_width, look)

    def row(self, branch: Branch) -> Strip:
        """Draw the tree on the left and numbers on the right."""
        tree = Strip(self._tree(branch)).adjust_cell_length(self._left, self._lines.base_style)
        return Strip([*tree, *self._numbers(branch)])

    def _tree(self, branch: Branch) -> list[Segment]:
        node, dim = branch.node, self._dim
        closed = node.id in self._rows.closed
        on_path = node.id in self._path
        sign = "▸" if closed and branch.children else "▾" if branch.children else "─"
        lead = Segment(
            lead_of(self._rows, branch, self._left) + sign, self._lines.style(theme.PATH) if on_path else dim
        )
        hidden = Segment(f"  +{branch.nodes - 1:,}" if closed and branch.children else "", dim)
        if branch.is_root:
            name = Segment(f" {branch.namespace or 'default'}", self._ink("bold"))
            host = f", {branch.host_nodes:,} {theme.HOST.sign}" if branch.host_nodes else ""
            return [lead, name, Segment(f"  {plural(branch.nodes - 1, 'node')}{host}", dim)]
        shade = shade_of(node)
        faint = self._rows.is_filtered and not branch.is_match
        weight = "bold" if on_path or (self._rows.is_filtered and branch.is_match) else ""
        return [
            lead,
            Segment(f" {sign_of(node)} ", self._lines.style(shade)),
            Segment(f"{node.start:,}-{node.start + node.tokens:,}", dim if faint else self._ink(weight)),
            hidden,
            Segment(f"  {_begins(node)}", dim),
        ]

    def _ink(self, weight: str) -> Style:
        return self._lines.style(None, None, weight)

    def _numbers(self, branch: Branch) -> list[Segment]:
        age = self._row_context.now - branch.newest
        aged = self._lines.style(theme.AGES[sum(age >= limit for limit in theme.AGE_LIMITS)])
        segments = []
        for column in self._columns:
            text, style = column.text(branch, self._row_context), aged if column.by_age else self._lines.base_style
            segments.append(Segment(f"{text:>{column.width}}", style))
        return segments


def sign_of(node: NodeRecord) -> str:
    """Return a sign for the state of a node, with the same meaning as its shade."""
    if node.residence == "host":
        return theme.HOST.sign
    if node.pins:
        return "◆"
    return "●" if node.locks else "▽" if node.demoted else "○"


def shade_of(node: NodeRecord) -> Shade:
    """Return the shade of a node's state."""
    if node.residence == "host":
        return theme.HOST
    if node.pins:
        return theme.PINNED
    return theme.ACTIVE if node.locks else theme.DEMOTED if node.demoted else theme.CACHED


def idle(seconds: float) -> str:
    """Format an age in whole seconds, so that rows are drawn at most once a second.

    >>> [idle(each) for each in (0.3, 4.9, 42, 200)]
    ['now', '4 s', '42 s', '3.3 min']
    """
    return "now" if seconds < 1 else f"{int(seconds)} s" if seconds < 60 else duration(seconds)


def _begins(node: NodeRecord) -> str:
    if node.text is not None:
        return repr(node.text)
    return " ".join(map(str, node.head)) + (" …" if node.tokens > len(node.head) else "")


def _share(part: int, whole: int) -> str:
    """Write a share in percent, and draw it as a bar of five cells.

    >>> _share(1, 2), _share(0, 0)
    (' 50% ██▌  ', '   -      ')
    """
    return f"{share(part, whole):>4} {_bar(part, whole, 5):<5}"


def _bar(part: int, whole: int, width: int) -> str:
    """Draw a share to an eighth of a cell; values above 0 show at least an eighth.

    >>> _bar(1, 2, 4), _bar(1, 1000, 4), _bar(0, 0, 4), _bar(9, 9, 2)
    ('██', '▏', '', '██')
    """
    eighths = min(8 * width, max(1, round(8 * width * part / whole))) if part > 0 and whole > 0 else 0
    return "█" * (eighths // 8) + (PARTS[eighths % 8] if eighths % 8 else "")
