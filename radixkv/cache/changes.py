"""Which nodes are not what they were when somebody last looked, each named once however often it changed.

Knows nodes and whether they were shown before. Knows no rule of the tree, and not what changed: whoever takes a node
reads it as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.cache.node import Node


class ChangedNodes:
    """Marks of one tree's nodes; a mark is one call of a C function.

    It stays as small as the tree was and is, even if nobody ever takes it: of a node that came and went between two
    looks nothing is kept.
    """

    __slots__ = ("_changed", "_gone", "mark")

    def __init__(self, nodes: Iterable[Node]) -> None:
        """Begin with `nodes`, all there are, none of them shown."""
        self._changed = set(nodes)
        self._gone: list[int] = []
        self.mark: Callable[[Node], None] = self._changed.add
        for node in self._changed:
            node.shown = False

    def __len__(self) -> int:
        """How many nodes there are to look at, or to forget."""
        return len(self._changed) + len(self._gone)

    def gone(self, node: Node) -> None:
        """The node is not in the tree any more."""
        self._changed.discard(node)
        if node.shown:
            self._gone.append(node.id)

    def take(self) -> tuple[list[Node], list[int]]:
        """The nodes that are new or changed, and the ids of those shown before that are gone; and start anew.

        Both by id. O(n log n) in what changed.
        """
        nodes, gone = sorted(self._changed, key=_id), sorted(self._gone)
        self._changed.clear()
        self._gone.clear()
        for node in nodes:
            node.shown = True
        return nodes, gone


def _id(node: Node) -> int:
    return node.id
