"""A frozen view of the tree in Python: its nodes as records, in order, as text and as a picture."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence

from radixkv.cache import PrefixCache
from radixkv.cache.types import Node
from radixkv.telemetry.recorder import TEXT_TOKENS, Decode, node_record, node_text, tokens
from radixkv.telemetry.records import NodeRecord, Residence

ALL: Hashable = ...
"""Stands for all namespaces where one may be named; None is the default namespace."""

_LINES = 40  # of a repr
_SHOWN = 24  # characters of a node's text


class TreeView:
    """The nodes of one moment, roots first and each node before its children. Iterate it, or look a node up by its id.

    >>> cache = PrefixCache(8, 4)
    >>> for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9]):
    ...     with cache.open(text) as sequence:
    ...         _ = sequence.extend(text[sequence.length:])
    ...         sequence.commit()
    >>> tree_view(cache)
    3 nodes, 7 tokens, 3 blocks
    (no namespace)
    └─ [0, 3) 1 2 3: 1 block, 1 hit
       ├─ [3, 6) 4 5 6: 2 blocks
       └─ [3, 4) 9: 1 block
    """

    def __init__(self, nodes: Sequence[NodeRecord]) -> None:
        """Take records in any order. O(n log n)."""
        self._nodes = {node.id: node for node in nodes}
        self._below: dict[int, list[NodeRecord]] = {}
        for node in sorted(nodes, key=lambda node: node.id):  # by age, except for nodes that were split
            self._below.setdefault(node.parent, []).append(node)

    def __len__(self) -> int:
        """The number of nodes, without roots."""
        return len(self._nodes) - len(self.roots)

    def __iter__(self) -> Iterator[NodeRecord]:
        """Iterate over all nodes, roots included, depth first. O(nodes)."""
        return (node for node, _ in self._walk())

    def __getitem__(self, number: int) -> NodeRecord:
        """Return the node with this id. Raises KeyError."""
        return self._nodes[number]

    @property
    def roots(self) -> tuple[NodeRecord, ...]:
        """The root of each namespace."""
        return tuple(self._below.get(0, ()))

    @property
    def tokens(self) -> int:
        """The number of cached tokens, on the device and on the host, each counted once."""
        return sum(node.tokens for node in self._nodes.values())

    @property
    def blocks(self) -> int:
        """The number of blocks of the pool that nodes own, each counted once. O(blocks)."""
        return self._count_blocks("device")

    @property
    def host_blocks(self) -> int:
        """The number of blocks in host memory that nodes own, each counted once. O(blocks)."""
        return self._count_blocks("host")

    def children(self, node: NodeRecord) -> tuple[NodeRecord, ...]:
        """Return the children of a node."""
        return tuple(self._below.get(node.id, ()))

    def path(self, node: NodeRecord) -> tuple[NodeRecord, ...]:
        """Return the nodes below the root down to this one: the prefix that ends at this node. O(depth)."""
        nodes = []
        while node.parent:
            nodes.append(node)
            node = self._nodes[node.parent]
        return tuple(reversed(nodes))

    def to_dot(self) -> str:
        """Draw the tree for Graphviz: held nodes with thick lines, pinned ones with double lines, and nodes on the host
        with dashed lines. O(nodes).
        """
        lines = ["digraph tree {", "  rankdir=LR;", '  node [shape=box, fontname="monospace"];']
        for node in self:
            lines.append(f'  {node.id} [label="{_escaped(_label(node))}"{_line(node)}];')
            if node.parent:
                lines.append(f"  {node.parent} -> {node.id};")
        return "\n".join([*lines, "}"])

    def __str__(self) -> str:
        """Return the whole tree, one line a node. O(nodes)."""
        return "\n".join([self._summary(), *self._lines()])

    def __repr__(self) -> str:
        """Return the text of `str`, limited to 40 lines."""
        lines: list[str] = []
        for line in self._lines():
            if len(lines) == _LINES:
                lines.append(f"... {len(self._nodes) - _LINES} more: str() has them all")
                break
            lines.append(line)
        return "\n".join([self._summary(), *lines])

    def _count_blocks(self, residence: Residence) -> int:
        nodes = (node for node in self._nodes.values() if node.residence == residence)
        return len({block for node in nodes for block in _blocks(node)})

    def _summary(self) -> str:
        counts = [_count(len(self), "node"), _count(self.tokens, "token"), _count(self.blocks, "block")]
        on_host = self.host_blocks
        return ", ".join([*counts, f"{_count(on_host, 'block')} on the host"] if on_host else counts)

    def _lines(self) -> Iterator[str]:
        for node, indent in self._walk():
            yield indent + _label(node)

    def _walk(self) -> Iterator[tuple[NodeRecord, str]]:
        """Each node, with the prefix of its line."""
        stack = [(node, "", "") for node in reversed(self.roots)]
        while stack:
            node, indent, below = stack.pop()
            yield node, indent
            children = self._below.get(node.id, [])
            for each in reversed(children):
                more = each is not children[-1]
                stack.append((each, below + ("├─ " if more else "└─ "), below + ("│  " if more else "   ")))


def tree_view(cache: PrefixCache, namespace: Hashable = ALL, *, decode: Decode | None = None) -> TreeView:
    """Copy the tree of a cache in all tiers, or of one namespace if that is given. O(nodes + blocks).

    Call it on the cache's thread. Nodes have times only while an observer is attached to the cache. With `decode`,
    nodes have text.
    """
    pins, offset, tree = cache.state.pins.by_node(), time.time() - cache.clock(), cache.state.tree
    nodes = tree.residents()
    if namespace is not ALL:
        nodes = _below(tree.find_root(tree.namespaces.find(namespace)), nodes)
    return TreeView([node_record(node, pins[node.id], offset, _said(node, decode)) for node in nodes])


def _below(root: Node | None, nodes: Iterator[Node]) -> Iterator[Node]:
    """Yield the root and its descendants, of nodes that come after their parents."""
    found = {root}
    for node in nodes:
        if node is root or (node.parent is not None and node.parent in found):
            found.add(node)
            yield node


def _said(node: Node, decode: Decode | None) -> str | None:
    return None if decode is None or not node.key else node_text(tokens(node, TEXT_TOKENS), decode)


def _blocks(node: NodeRecord) -> Iterator[int]:
    for first, count in zip(node.blocks[::2], node.blocks[1::2], strict=True):
        yield from range(first, first + count)


def _label(node: NodeRecord) -> str:
    """Describe a node: `[from, to) beginning: blocks, holders, hits`."""
    if not node.parent:
        return "(no namespace)" if node.namespace is None else f"({node.namespace})"
    if node.text is None:
        more = " …" * (node.tokens > len(node.head))
        says = " ".join(map(str, node.head)) + more
    else:
        says = repr(node.text[:_SHOWN]) + " …" * (len(node.text) > _SHOWN)
    facts = [_count(sum(node.blocks[1::2]), "block") + (" on the host" if node.residence == "host" else "")]
    facts += [_count(node.holders - node.pins, "sequence")] if node.holders > node.pins else []
    facts += [_count(node.pins, "pin")] if node.pins else []
    facts += [_count(node.hits, "hit")] if node.hits else []
    facts += [f"priority {node.priority}"] if node.priority else []
    facts += ["first to go"] if node.demoted else []
    return f"[{node.start}, {node.start + node.tokens}) {says}: {', '.join(facts)}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _line(node: NodeRecord) -> str:
    on_host = ", style=dashed" if node.residence == "host" else ""
    pinned = ", peripheries=2" if node.pins else ""
    return on_host + pinned + (", penwidth=2" if node.locks else "")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
