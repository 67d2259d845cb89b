"""The radix tree of a cache with recurrent state: the snapshots of a node follow it as it changes."""

from __future__ import annotations

from radixkv.cache.ghosts import Pressure
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.recurrent.snapshots import Snapshots
from radixkv.cache.types import Node


class StatefulTree(RadixTree):
    """A radix tree whose nodes have snapshots; the cache sets `snapshots` before it uses the tree."""

    snapshots: Snapshots

    def split(self, node: Node, tokens: int) -> Node:
        """Cut a node, and divide its snapshots."""
        upper = super().split(node, tokens)
        self.snapshots.split(node, upper)
        return upper

    def merge(self, upper: Node) -> None:
        """Join a node with its only child if nothing ends there, and join their snapshots."""
        child = next(iter(upper.children.values()), None)
        super().merge(upper)
        if child is not None and child.parent is not upper:
            self.snapshots.merge(upper, child)

    def trim(self, node: Node, most: int, now: float, pressure: Pressure) -> int:
        """Evict blocks off the tail of a leaf, and free the snapshots in it."""
        tokens = super().trim(node, most, now, pressure)
        self.snapshots.trim(node, node.end)
        return tokens

    def remove(self, node: Node) -> int:
        """Take an unlocked leaf out of the tree, and free its snapshots."""
        freed = super().remove(node)
        self.snapshots.trim(node, node.start)
        return freed
