"""The Tree view: the live radix tree with a filter, an order, and a description of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from radixkv_monitor import detail, questions, tree_branch
from radixkv_monitor.block_map import block_at, count_blocks
from radixkv_monitor.detail import Detail
from radixkv_monitor.formatting import plural
from radixkv_monitor.questions import ControlledView, Question
from radixkv_monitor.state import SessionTracker, State, Touched
from radixkv_monitor.tree_branch import SORTS, Branch, InvalidFilter, NodeFilter
from radixkv_monitor.tree_rows import TreeRows
from radixkv_monitor.views import (
    LARGE,
    BlockSelected,
    FilteredView,
    FilterInput,
    HostBlockSelected,
    NodeSelected,
    Selection,
    Table,
    focus_now,
)
from radixkv_monitor.widgets.detail_pane import DETAIL_KEYS, DetailPane, DetailView, Headline
from radixkv_monitor.widgets.flat_tree import FlatTree
from radixkv_monitor.widgets.tree_row import RowContext

MIN_INTERVALS = ((1000, 0.39), (LARGE, 0.95))
"""From this many nodes on, a tree is drawn at most once in this many seconds."""
OLD_SORTS = {"hits": "ended-here"}
"""Former names of orders, which `--sort` still takes."""

ASK = {"pin": questions.pin, "unpin": questions.unpin, "demote": questions.demote, "clear": questions.clear}
"""The questions for commands to a node, by their verbs."""


class TreeView(DetailView, ControlledView, FilteredView):
    """The radix tree. O(changes) an update, and O(rows) if rows moved."""

    DEFAULT_CSS = """
    TreeView { layout: vertical; }
    TreeView > FilterInput { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    TreeView > FilterInput.open { display: block; }
    TreeView > Container { height: 1fr; layout: vertical; }
    TreeView DetailPane { height: 7; border-top: solid $panel; }
    TreeView.-low DetailPane { display: none; }
    TreeView.-wide > Container { layout: horizontal; }
    TreeView.-wide FlatTree { width: 1fr; }
    TreeView.-wide DetailPane { width: 46; height: 1fr; border-top: none; border-left: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Previous order", show=False),
        Binding("f", "follow", "Follow"),
        Binding("p", "control('pin')", "Pin", tooltip="pin the text up to the node"),
        Binding("u", "control('unpin')", "Unpin", tooltip="release the pins at the node"),
        Binding("d", "control('demote')", "Demote", tooltip="evict the node before others"),
        Binding("x", "control('clear')", "Clear", tooltip="clear the namespace"),
        Binding("n", "step(1)", "Next", show=False),
        Binding("N", "step(-1)", "Previous", show=False),
        *DETAIL_KEYS,
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows = TreeRows()
        self.is_following = False
        self._sessions = SessionTracker()
        self._wanted: int | None = None  # the node to show after loading
        self._filter: NodeFilter | None = None
        self._filter_error = ""

    def compose(self) -> ComposeResult:
        """Lay out headline, filter, tree and description."""
        yield Headline()
        yield FilterInput(tree_branch.FILTER_EXAMPLES, self.accept_filter, self.action_clear_filter)
        with Container():
            yield FlatTree(self.rows)
            yield DetailPane()

    @property
    def lines(self) -> FlatTree:
        """The widget with the lines."""
        return self.query_one(FlatTree)

    def take_focus(self) -> None:
        """Focus the tree."""
        focus_now(self.lines)

    # ---- states

    def update(self, state: State) -> None:
        """Draw this state, unless it soon follows the last one of a large tree.

        A tree of LARGE nodes or more is first read in slices, with a notice.
        """
        if self._loading.is_running or not self.is_mounted:
            self._state = state
            return
        if self._can_skip(state):
            return
        last, self._state = self._state, state
        if last is not None and last.facts.engine != state.facts.engine:
            self.rows.open(list(self.rows.closed))
        before = () if last is None else self.rows.rows
        touched = state.touched_since(last)
        if touched is None and len(state.nodes) >= LARGE:
            self._loading.start(self.rows.load(state.nodes), self._show_progress, partial(self._loaded, before))
        else:
            self._update_rows(state, touched, before)

    def _update_rows(self, state: State, touched: Touched | None, before: Sequence[Branch]) -> None:
        """Update the rows to this state, and draw them; `before` are the rows on screen."""
        changed = self._sessions.update(state)
        if self._filter is not None and self._filter.sessions:
            self.rows.apply_filter(changed)
        self.rows.update(state.nodes, None if touched is None else touched.nodes)
        self._draw(state, None if self.rows.rows is before else before)

    def _show_progress(self, share: float) -> None:
        assert self._state is not None
        progress = f"reading {len(self._state.nodes):,} nodes: {100 * share:.0f}%"
        self.query_one(Headline).set_text(progress)
        self.lines.set_notice(progress)

    def _loaded(self, before: Sequence[Branch]) -> None:
        assert self._state is not None
        self.lines.set_notice("")
        self._update_rows(self._state, None, before)
        wanted, self._wanted = self._wanted, None
        self.select(Selection(wanted))

    def _can_skip(self, state: State) -> bool:
        """Return whether a large tree can wait for the next state, which arrives within a second while live."""
        last = self._state
        if last is None or last.line != state.line or state.frozen or state.stale:
            return False
        interval = max((seconds for nodes, seconds in MIN_INTERVALS if len(state.nodes) >= nodes), default=0.0)
        return 0 <= state.now - last.now < interval

    def _draw(self, state: State, before: Sequence[Branch] | None) -> None:
        top = self.rows.branches[0]
        context = RowContext(state.now, state.facts.bytes_per_block, top.tokens, _sends_reused(state))
        self.lines.show(context, before)
        if self.is_following:
            self._follow()
        self._update_text(state)

    def _update_text(self, state: State) -> None:
        """Update the headline and the description."""
        if self._loading.is_running:
            return
        roots = len(self.rows.branches[0].children)
        parts = [
            f"{plural(len(state.nodes) - roots, 'node')} in {plural(roots, 'namespace')}",
            plural(self.rows.branches[0].tokens, "token"),
            f"by {self.rows.sort}",
        ]
        if state.facts.host_blocks:
            parts.insert(1, f"{self.rows.branches[0].host_nodes:,} on the host")
        if self.rows.is_filtered:
            parts.append(f"{self.rows.matching:,} match the filter")
        if self._filter is not None and self._filter.least_reused and not _sends_reused(state):
            parts.append("reused: not sent by this engine")
        if self.is_following:
            parts.append("following")
        parts.append(detail.next_to_go(state))
        self.query_one(Headline).set_text(self._filter_error or " · ".join(parts))
        self._update_detail(state)

    def _update_detail(self, state: State) -> None:
        branch = self.lines.cursor
        nothing = "No node matches the filter" if self.rows.is_filtered and state.nodes else "Nothing is cached"
        description = Detail(nothing) if branch is None else detail.node_detail(state, branch)
        self.query_one(DetailPane).show_detail(description)

    def select(self, selection: Selection) -> None:
        """Move the cursor to the node that another view selected."""
        if self._loading.is_running:
            self._wanted = selection.node
        elif selection.node is not None and self.is_mounted:
            branch = self.lines.cursor
            if branch is None or branch.node.id != selection.node:
                self.lines.go_to(selection.node)

    @classmethod
    def sorts(cls) -> Sequence[str]:
        """Return the orders of rows."""
        return (*SORTS, *OLD_SORTS)

    def sort_by(self, name: str) -> bool:
        """Sort by one of the orders of rows."""
        name = name.replace(" ", "-")
        name = OLD_SORTS.get(name, name)
        if name not in SORTS:
            return False
        before = self.rows.rows
        self.rows.sort_by(name)
        if self.is_mounted and self._state is not None:
            self._draw(self._state, before)
            self.lines.repaint()
        return True

    def export(self) -> Table:
        """Return the shown rows, as they are sorted."""
        return Table("tree", [_facts(branch) for branch in self.rows.rows])

    # ---- commands

    def question(self, verb: str) -> Question | None:
        """Return the question for a command to the node under the cursor."""
        branch = self.lines.cursor
        if self._state is None or branch is None:
            return None
        return ASK[verb](self._state, self._state.nodes.get(branch.node.id, branch.node))

    def selected_row(self) -> Mapping[str, object] | None:
        """Return the node under the cursor."""
        branch = self.lines.cursor
        return None if branch is None else _facts(branch)

    # ---- keys

    def action_sort(self, by: int) -> None:
        """Sort by the next or previous order."""
        shows_reused = self._state is None or _sends_reused(self._state)
        names = [name for name in SORTS if name != "reused" or shows_reused or self.rows.sort == name]
        self.sort_by(names[(names.index(self.rows.sort) + by) % len(names)])

    def action_step(self, by: int) -> None:
        """Move to the next or previous row that matches the filter."""
        at = self.rows.index.get(self.lines.cursor.node.id, 0) if self.lines.cursor is not None else 0
        found = self.rows.next_match(at, by)
        if found is not None:
            self.lines.go_to(self.rows.rows[found].number, by_hand=True)

    def action_follow(self) -> None:
        """Keep the most recently used path in view, or stop following it."""
        self.is_following = not self.is_following
        if not self.is_following:
            self.lines.mark_path(frozenset())
        if self._state is not None:
            self._draw(self._state, None)

    def _follow(self) -> None:
        most_recent = self.rows.most_recent()
        if most_recent is None:
            return
        above = (up.record.id for up in most_recent.up() if up.record is not None)
        self.lines.mark_path(frozenset((most_recent.node.id, *above)))
        self.lines.go_to(most_recent.node.id)
        self.lines.repaint()

    def apply_filter(self, text: str) -> None:
        """Show the nodes that match this text, and those above them; keep the last filter if it is not one."""
        try:
            self._filter = tree_branch.parse_filter(text)
            self._filter_error = ""
        except InvalidFilter as error:
            self._filter_error = str(error)
        else:
            before = self.rows.rows
            self.rows.filter(None if self._filter is None else self._matches)
            if self._state is not None:
                self._draw(self._state, before)
        if self._state is not None:
            self._update_text(self._state)

    def _matches(self, branch: Branch, namespace: str | None) -> bool:
        matching = self._filter
        return matching is None or matching.matches(branch.node, namespace, self._sessions.of(branch.node.id))

    def accept_filter(self, text: str) -> None:
        """Apply this filter, leave the input, and move to the first node that matches."""
        super().accept_filter(text)
        if self.rows.is_filtered and self.lines.cursor is not None and not self.lines.cursor.is_match:
            self.action_step(1)

    @on(FlatTree.Moved)
    def _moved(self, event: FlatTree.Moved) -> None:
        event.stop()
        if event.by_hand and self.is_following:
            self.action_follow()
        self.post_message(NodeSelected(event.node))
        if self._state is not None:
            self._update_detail(self._state)

    @on(FlatTree.Chosen)
    def _chosen(self, event: FlatTree.Chosen) -> None:
        event.stop()
        branch = self.rows.branches.get(event.node)
        block = None if branch is None else block_at(branch.node.blocks, 0)
        self.post_message(NodeSelected(event.node))
        if branch is not None and block is not None:
            message = HostBlockSelected if branch.node.residence == "host" else BlockSelected
            self.post_message(message(block, show=True))


def _sends_reused(state: State) -> bool:
    """Return whether the engine sends `NodeRecord.reused`, which old recordings and engines lack."""
    return all(node.reused is not None for node in islice(state.nodes.values(), 1))


def _facts(branch: Branch) -> dict[str, object]:
    node = branch.node
    return {
        "node": node.id,
        "parent": node.parent,
        "namespace": branch.namespace,
        "start": node.start,
        "tokens": node.tokens,
        "references": node.locks,
        "holders": node.holders,
        "pins": node.pins,
        "hits": node.hits,
        "reused": node.reused,
        "priority": node.priority,
        "done": node.demoted,
        "born": node.born,
        "used": node.used,
        "blocks": count_blocks(node.blocks),
        "residence": node.residence,
        "subtree_nodes": branch.nodes,
        "subtree_tokens": branch.tokens,
        "head": list(node.head),
        "text": node.text,
    }
