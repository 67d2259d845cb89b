"""The rows of the radix tree: branches with sums, in order, flattened as far as they are open and match the filter.

The rows are in the order of a plain walk over the tree. The cost of a change depends on the change and on the depth;
only the flat list is rebuilt, and only if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor.block_map import count_blocks
from radixkv_monitor.tree_branch import (
    NOT_ON_HOST,
    SORTS,
    SUMS,
    TOP,
    Branch,
    add_to_parent,
    descending,
    leaf,
    ordered,
    own_blocks,
)

SLICE = 4096
"""The nodes that `TreeRows.load` adds between two yields: a few milliseconds of work."""
ONLY_CHILD = "↳"
"""The line work of an only child, which is not indented: conversations are deep."""
FEW = 32
"""The most nodes to which the filter is applied one by one, each with a walk to the top of the tree."""
Predicate = Callable[[Branch, str | None], bool]
"""Takes a branch and its namespace, which is passed because only roots have it."""


class TreeRows:
    """The branches in the order of their rows, and the place of each node in them as `index`."""

    def __init__(self, sort: str = "birth") -> None:
        self.rows: list[Branch] = []
        self.index: dict[int, int] = {}
        self.sort = sort
        self.closed: set[int] = set()
        self.branches: dict[int, Branch] = {TOP: Branch(TOP)}
        self._predicate: Predicate | None = None
        self._closed_unfiltered: set[int] = set()
        self._orphans: dict[int, set[int]] = {}  # keyed by the missing parent
        self._cycles: set[int] = (
            set()
        )  # branches whose parent is one of their descendants: possible in a damaged file only
        self._unsorted: dict[int, Branch] = {}  # branches whose children changed or may be out of order
        self._must_flatten = True
        self._last_shown: dict[int, Branch] = {}  # keyed by the parent
        self._trunks: dict[int, Branch] = {}  # of each only child: the nearest ancestor that is none

    # ---- updates

    @property
    def is_empty(self) -> bool:
        """Return whether there are no nodes."""
        return len(self.branches) == 1

    def load(self, nodes: Mapping[int, NodeRecord]) -> Iterator[float]:
        """Replace the whole tree by these nodes; yield the completed share about every SLICE nodes.

        O(nodes), and the sorts. Rows and branches stay as they are until the end.
        """
        top, sort = Branch(TOP), self.sort
        branches, orphans = {TOP: top}, dict[int, set[int]]()
        for place, (number, node) in enumerate(nodes.items()):
            if number != TOP:
                branches[number] = leaf(node)
            if place % SLICE == 0:
                yield 0.2 * place / len(nodes)
        for place, branch in enumerate(branches.values()):
            if branch is not top:
                parent = branches.get(branch.node.parent)
                if parent is None:
                    orphans.setdefault(branch.node.parent, set()).add(branch.number)
                (top if parent is None else parent).adopt(branch)
            if place % SLICE == 0:
                yield 0.2 + 0.2 * place / len(branches)
        order = descending(top)
        for place, branch in enumerate(reversed(order)):
            if branch is not top:
                add_to_parent(branch)
            if branch.children:
                branch.order = ordered(branch, SORTS[sort])
            if place % SLICE == 0:
                yield 0.4 + 0.5 * place / len(order)
        rings = branches.keys() - {branch.number for branch in order} if len(order) < len(branches) else ()
        for number in rings:
            del branches[number]
        self.branches, self._orphans = branches, orphans
        self._loaded(nodes, rings, sort)

    def _loaded(self, nodes: Mapping[int, NodeRecord], rings: Iterable[int], sort: str) -> None:
        """Show the branches that were just loaded, sorted by `sort`; nodes in `rings` are added one by one."""
        self._must_flatten = True
        self.closed &= nodes.keys()
        self._closed_unfiltered &= nodes.keys()
        self._cycles.clear()
        self._unsorted.clear()
        for number in rings:
            self._update_node(nodes[number])
        if self._predicate is not None:
            self.apply_filter()
        if self.sort == sort:
            self._finish_update()
        else:
            self.sort_by(self.sort)

    def update(self, nodes: Mapping[int, NodeRecord], touched: Iterable[int] | None = None) -> bool:
        """Update to these nodes; only touched ids may differ from the last call (None: any may).

        Returns whether rows moved, appeared or disappeared. O(touched x depth), and O(rows) if so.
        """
        if self.is_empty and nodes:
            for _ in self.load(nodes):
                pass
            return True
        if touched is None:
            touched = {number for number in self.branches if number not in nodes and number != TOP}.union(
                number for number, node in nodes.items() if self._differs(number, node)
            )
        ids = [number for number in touched if number != TOP and self._differs(number, nodes.get(number))]
        for number in ids:
            self._unlink_if_moved(number, nodes.get(number))
        for number in ids:
            node = nodes.get(number)
            if node is None:
                self._forget(number)
            else:
                self._update_node(node)
        if self._cycles:
            self._retry_cycles()
        if self._predicate is not None:
            self.apply_filter(ids)  # once all are linked, so that their namespaces are known
        return self._finish_update()

    def _retry_cycles(self) -> None:
        rings, self._cycles = self._cycles & self.branches.keys(), set()
        for number in rings:
            branch = self.branches[number]
            self._unlink(branch)
            self._link(branch)

    def _differs(self, number: int, node: NodeRecord | None) -> bool:
        branch = self.branches.get(number)
        return (None if branch is None else branch.record) is not node

    def _unlink_if_moved(self, number: int, node: NodeRecord | None) -> None:
        branch = self.branches.get(number)
        if branch is not None and (node is None or branch.node.parent != node.parent):
            self._unlink(branch)

    def _unlink(self, branch: Branch) -> None:
        """Detach a branch, with its descendants, from its parent."""
        parent, branch.parent = branch.parent, None
        if parent is None:
            return
        del parent.children[branch.node.id]
        self._mark_unsorted(parent)
        self._add(parent, -branch.nodes, -branch.tokens, -branch.blocks, -branch.matching)
        self._add_host(parent, -branch.host_nodes, -branch.host_blocks)
        self._lower(parent, branch.newest)

    def _forget(self, number: int) -> None:
        branch = self.branches.pop(number, None)
        self.closed.discard(number)
        self._closed_unfiltered.discard(number)
        self._unsorted.pop(number, None)
        if branch is None:
            return
        self._orphans.get(branch.node.parent, set()).discard(number)
        for child in list(branch.children):  # a change of their own may follow
            orphan = branch.children.pop(child)
            orphan.parent = None
            self._link(orphan)

    def _update_node(self, node: NodeRecord) -> None:
        """Add a node, or update it."""
        branch = self.branches.get(node.id)
        if branch is None:
            branch = self.branches[node.id] = Branch(node.id)
            branch.nodes = 1
        old, branch.record = branch.record, node
        tokens, is_new_match = (0, self._predicate is None) if old is None else (old.tokens, False)
        if old is None or (old.blocks, old.residence) != (node.blocks, node.residence):
            for each in (branch, *branch.children.values()):
                self._recount(each)
        branch.is_match |= is_new_match
        self._add(branch, 0, node.tokens - tokens, 0, int(is_new_match))
        if node.used >= branch.newest:
            self._raise(branch, node.used)
        elif old is not None and old.used == branch.newest:
            self._lower(branch, old.used)
        if branch.parent is None:
            self._link(branch)
        if branch.parent is not None and self.sort not in SUMS:
            self._mark_unsorted(branch.parent)
        for number in self._orphans.pop(node.id, ()):
            orphan = self.branches.get(number)
            if orphan is not None:
                self._unlink(orphan)
                self._link(orphan)

    def _link(self, branch: Branch) -> None:
        """Attach a branch to its parent; to the top if the parent is unknown or one of its descendants."""
        node = branch.node
        parent = self.branches.get(node.parent)
        if parent is None:
            self._orphans.setdefault(node.parent, set()).add(node.id)
            parent = self.branches[TOP]
        elif parent is branch or branch in parent.up():
            self._cycles.add(node.id)
            parent = self.branches[TOP]
        parent.adopt(branch)
        self._mark_unsorted(parent)
        self._must_flatten = True  # it may have become a root in the same place
        self._add(parent, branch.nodes, branch.tokens, branch.blocks, branch.matching)
        self._add_host(parent, branch.host_nodes, branch.host_blocks)
        self._raise(parent, branch.newest)
        self._recount(branch)

    # ---- sums

    def _recount(self, branch: Branch) -> None:
        """Count the branch's own blocks after a change of its record or parent. O(its runs + depth)."""
        before, branch.own_blocks = branch.own_blocks, own_blocks(branch)
        self._add(branch, 0, 0, branch.own_blocks - before, 0)
        node = branch.node
        if node.residence == "host" or branch.own_host is not NOT_ON_HOST:
            nodes, blocks = branch.own_host
            branch.own_host = (1, count_blocks(node.blocks)) if node.residence == "host" else NOT_ON_HOST
            self._add_host(branch, branch.own_host[0] - nodes, branch.own_host[1] - blocks)

    def _add_host(self, branch: Branch, nodes: int, blocks: int) -> None:
        """Add host nodes and their blocks to a branch and to all its ancestors."""
        if nodes or blocks:
            for each in (branch, *branch.up()):
                each.host_nodes += nodes
                each.host_blocks += blocks

    def _add(self, branch: Branch, nodes: int, tokens: int, blocks: int, matching: int) -> None:
        """Add to a branch and to all its ancestors."""
        if not (nodes or tokens or blocks or matching):
            return
        by_size = bool(tokens) and self.sort == "subtree"
        up: Branch | None = branch
        while up is not None:
            was, up.matching = up.matching, up.matching + matching
            up.nodes += nodes
            up.tokens += tokens
            up.blocks += blocks
            shows_or_hides = (was > 0) != (up.matching > 0)
            if up.parent is not None and (by_size or shows_or_hides):
                self._mark_unsorted(up.parent)
                self._must_flatten |= shows_or_hides
            up = up.parent

    def _raise(self, branch: Branch, used: float) -> None:
        up: Branch | None = branch
        while up is not None and up.newest < used:
            up.newest = used
            if up.parent is not None and self.sort == "recency":
                self._mark_unsorted(up.parent)
            up = up.parent

    def _lower(self, branch: Branch, used: float) -> None:
        """Recompute `newest` after a node that was used at this time left or changed."""
        up: Branch | None = branch
        while up is not None and up.newest == used:
            own = up.record.used if up.record is not None else 0.0
            up.newest = max((child.newest for child in up.children.values()), default=own)
            up.newest = max(up.newest, own)
            if up.newest == used:
                return
            if up.parent is not None and self.sort == "recency":
                self._mark_unsorted(up.parent)
            up = up.parent

    # ---- order

    def _mark_unsorted(self, branch: Branch) -> None:
        self._unsorted[branch.number] = branch

    def _finish_update(self) -> bool:
        """Sort branches that may be out of order, and rebuild the rows if anything moved. Returns whether it did."""
        key = SORTS[self.sort]
        for branch in self._unsorted.values():
            order = ordered(branch, key)
            if order != branch.order:
                branch.order = order
                self._must_flatten = True
        self._unsorted.clear()
        if not self._must_flatten:
            return False
        self._flatten()
        self._must_flatten = False
        return True

    def _flatten(self) -> None:
        """Rebuild the rows, from top to bottom. O(rows)."""
        rows: list[Branch] = []
        self._last_shown.clear()
        self._trunks.clear()
        stack = self._shown(self.branches[TOP])[::-1]
        closed = self.closed
        while stack:
            branch = stack.pop()
            rows.append(branch)
            if branch.order and not (closed and branch.number in closed) and (shown := self._shown(branch)):
                if len(shown) == 1 and not branch.is_root:
                    self._trunks[shown[0].number] = self._trunks.get(branch.number, branch)
                self._last_shown[branch.number] = shown[-1]
                stack += reversed(shown)
        self.rows = rows
        self.index = dict(zip([branch.number for branch in rows], range(len(rows)), strict=True))

    def _shown(self, branch: Branch) -> list[Branch]:
        order = branch.order or []
        return order if self._predicate is None else [child for child in order if child.matching]

    def lead(self, branch: Branch, most: int | None = None) -> str:
        """Return the line work that joins a shown row to its neighbours; of more than `most` cells, only the end.

        An only child continues its parent's line, and has a sign for that. O(forks above the row).
        """
        parts = [ONLY_CHILD] if branch.number in self._trunks else []
        child = self._trunks.get(branch.number, branch)
        while (parent := child.parent) is not None and parent.record is not None:
            is_last = child is self._last_shown[parent.number]
            if child is branch:
                parts.append("╰─" if is_last else "├─")
            else:
                parts.append("  " if is_last else "│ ")
            if most is not None and 2 * len(parts) > most:
                break
            child = self._trunks.get(parent.number, parent)
        return "".join(reversed(parts))

    # ---- sorting, filtering, opening

    def sort_by(self, sort: str) -> None:
        """Sort by one of SORTS. O(nodes)."""
        self.sort = sort
        self._unsorted = dict(self.branches)
        self._finish_update()

    def filter(self, matching: Predicate | None) -> None:
        """Show only matching nodes and their ancestors, all open; None shows all, open as before. O(nodes)."""
        if matching is not None and self._predicate is None:
            self._closed_unfiltered = self.closed
        self.closed = set() if matching is not None else self._closed_unfiltered
        self._predicate = matching
        self.apply_filter()
        self._must_flatten = True
        self._finish_update()

    def apply_filter(self, numbers: Collection[int] | None = None) -> None:
        """Apply the filter again to these nodes, or to all; the next `update` shows the result.

        O(nodes); for at most FEW numbers O(numbers x depth).
        """
        if numbers is None or len(numbers) > FEW:
            self._apply_filter_to_all()
            return
        for number in numbers:
            branch = self.branches.get(number)
            if branch is not None and branch.record is not None:
                before, branch.is_match = branch.is_match, self._matches(branch, branch.namespace)
                self._add(branch, 0, 0, 0, branch.is_match - before)

    def _apply_filter_to_all(self) -> None:
        top, *order = descending(self.branches[TOP])
        namespaces: dict[int, str | None] = {}
        were_shown = [branch.matching > 0 for branch in order]
        for branch in order:
            namespace = branch.node.namespace if branch.parent is top else namespaces[branch.node.parent]
            namespaces[branch.number] = namespace
            branch.is_match = self._matches(branch, namespace)
        for branch in (top, *order):
            branch.matching = int(branch.is_match)
        for branch in reversed(order):
            assert branch.parent is not None
            branch.parent.matching += branch.matching
        self._must_flatten |= were_shown != [branch.matching > 0 for branch in order]

    def _matches(self, branch: Branch, namespace: str | None) -> bool:
        return self._predicate is None or self._predicate(branch, namespace)

    @property
    def matching(self) -> int:
        """The number of nodes that match the filter, also inside closed ones; all nodes without a filter."""
        return self.branches[TOP].matching

    @property
    def is_filtered(self) -> bool:
        """Return whether there is a filter."""
        return self._predicate is not None

    def open(self, numbers: Iterable[int], is_open: bool = True) -> None:
        """Open or close these nodes. O(rows)."""
        if is_open:
            self.closed.difference_update(numbers)
        else:
            self.closed.update(number for number in numbers if number in self.branches and number != TOP)
        self._must_flatten = True
        self._finish_update()

    def open_to(self, number: int) -> bool:
        """Open all ancestors of this node. Returns False if there is no such node, or if the filter hides it."""
        branch = self.branches.get(number)
        if branch is None or branch.record is None or not branch.matching:
            return False
        above = {up.record.id for up in branch.up() if up.record is not None}
        if not self.closed.isdisjoint(above):
            self.open(above)
        return number in self.index

    def most_recent(self) -> Branch | None:
        """Return the end of the path that was used last: from the top, always the child of the latest use. O(depth x
        children).
        """
        branch = self.branches[TOP]
        while branch.children:
            shown = [child for child in branch.children.values() if child.matching]
            if not shown or (branch.record is not None and branch.record.used >= branch.newest):
                break
            branch = max(shown, key=lambda child: (child.newest, child.node.id))
        return branch if branch.record is not None else None

    def next_match(self, place: int, step: int) -> int | None:
        """Return the next row after this one that matches the filter, in steps of 1 or -1 and round the end."""
        count = len(self.rows)
        for away in range(1, count + 1):
            at = (place + step * away) % count
            if self.rows[at].is_match:
                return at
        return None
