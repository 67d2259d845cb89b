"""The radix tree: token runs -> blocks. Match, lock, split, grow, merge, trim.

Knows tokens (as int32 bytes), blocks and locks. Knows no sequence and no plan.

A node covers the tokens [start, end) of its path, may start and end inside a block, and names a block for every logical
block that it touches: the block that holds the path's tokens up to its end. So where a child starts inside a block,
its first block also holds the parent's last tokens; it is the parent's own last block if the child was appended in
place, else a copy of it. A path's block for a logical block is the deepest node's.

Locks: `holders` counts who holds a node itself (sequences, pins); `locks` adds one for each locked child. Only the
steps 0 <-> 1 go up to the parent. Nothing here recurses with depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import TypeVar, cast

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import ChangedNodes
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.ghosts import Ghost, Ghosts, Owner, Pressure, common_prefix
from radixkv.cache.node import NO_CHILDREN, Node
from radixkv.cache.observer import Observer
from radixkv.cache.shared_blocks import SharedBlocks
from radixkv.cache.tokens import WIDTH

Run = TypeVar("Run", bytearray, "array[int]")


class RadixTree:
    """All namespaces' trees over one pool."""

    def __init__(self, pool: BlockPool, index: EvictionIndex, ghosts: Ghosts) -> None:
        self.pool = pool
        self.shared = SharedBlocks(pool)
        self.index = index
        self.ghosts = ghosts
        self.roots: dict[Hashable, Node] = {}
        self.nodes = 0
        self.observer: Observer | None = None
        self.changed: ChangedNodes | None = None
        self.evictions = 0
        self._ids = 0

    # ---- reading

    def match(self, root: Node, raw: bytes) -> tuple[Node, int]:
        """Deepest node that `raw` reaches below `root`, maybe only in part, and the bytes that match.

        O(bytes) by memcmp + O(depth).
        """
        node, at, size = root, 0, len(raw)
        while at < size:
            child = node.children.get(raw[at : at + WIDTH])
            if child is None:
                break
            key = child.key
            if raw.startswith(key, at):
                at += len(key)
                node = child
            else:
                return child, at + common_prefix(raw, at, key)
        return node, at

    def path(self, node: Node, above: Node | None = None) -> list[Node]:
        """The nodes from below the root, or below `above`, to `node`."""
        nodes = []
        up = node
        while up.parent is not None and up is not above:
            nodes.append(up)
            up = up.parent
        nodes.reverse()
        return nodes

    def table(self, node: Node, above: Node | None = None) -> array[int]:
        """The block table of the path to the end of `node`; behind `above`, from its part-filled last block on."""
        return self.joined(self.path(node, above))

    def joined(self, path: list[Node]) -> array[int]:
        """The block table of consecutive nodes."""
        size = self.pool.block_size
        table = array("i")
        for each in path:
            if each.start % size and table:
                table.pop()
            table += each.blocks
        return table

    def namespace(self, node: Node) -> Hashable:
        """Whose tree a node is in. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return cast(tuple[str, Hashable], node.mark)[1]

    def walk(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes, roots included, or `top` and all below it; a node comes before its children."""
        stack = list(self.roots.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ---- holding

    def root(self, namespace: Hashable) -> Node:
        """The namespace's root, for somebody who holds it at once; `unhold` and `remove` remove it when it is empty."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(self._next_id(), None, 0, bytearray(), array("i"))
            root.mark = root_mark(namespace)
            self.index.dated(root)
            root.born_at = root.used_at
            if self.observer is not None:
                self.observer.rooted(root.id, namespace)
        return root

    def hold(self, node: Node) -> None:
        """One more holder: the node's path cannot be evicted. O(nodes that become locked)."""
        node.holders += 1
        child: Node | None = None
        up: Node | None = node
        changed = self.changed
        while up is not None:
            up.locks += 1
            if changed is not None:
                changed.mark(up)
            if up.locks > 1:
                break
            if up.place is not None:
                self.index.removed(up)
            self.pool.shift(up.blocks, up.mixed, idle=False)
            child, up = up, up.parent
        if up is not None and child is not None and child.start % self.pool.block_size:
            self.shared.repoint(up)

    def want(self, node: Node) -> None:
        """Who has just come to hold a finished tail wants it: it is not first to go any more. O(nodes demoted)."""
        up: Node | None = node
        while up is not None and up.demoted:
            up.demoted = False
            up = up.parent

    def unhold(self, node: Node) -> None:
        """One holder less."""
        node.holders -= 1
        up: Node | None = node
        changed = self.changed
        while up is not None:
            up.locks -= 1
            if changed is not None:
                changed.mark(up)
            if up.locks:
                return
            if up.parent is None:
                self._drop_if_empty(up)
                return
            self.pool.shift(up.blocks, up.mixed, idle=True)
            if up.children:
                self.shared.repoint(up)
            else:
                self.index.inserted(up)
            up = up.parent

    def split(self, node: Node, tokens: int) -> Node:
        """Cut a node after its first `tokens` and return the new upper half.

        The object stays the lower half, so holders' ends stay node ends.
        """
        size = self.pool.block_size
        parent = cast(Node, node.parent)
        cut = node.start + tokens
        first = node.start // size
        upper = Node(
            self._next_id(), parent, node.start, node.key[: tokens * WIDTH], node.blocks[: -(-cut // size) - first]
        )
        upper.children = {bytes(node.key[tokens * WIDTH : tokens * WIDTH + WIDTH]): node}
        upper.tick, upper.born = node.tick, node.born  # but no hits: they ended below, and come back when one is left
        upper.used_at, upper.born_at, upper.use = node.used_at, node.born_at, node.use
        upper.priority, upper.demoted, upper.mixed = node.priority, node.demoted, node.mixed
        upper.locks = 1 if node.locks else 0
        parent.children[bytes(upper.key[:WIDTH])] = upper
        node.parent, node.start = upper, cut
        del node.key[: tokens * WIDTH]
        del node.blocks[: cut // size - first]
        self.shared.retip(upper.boundary(), node, upper)
        if cut % size:
            self.shared.share(upper.blocks[-1], node, idle=not node.locks)
        self.nodes += 1
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.mark(upper)
        if self.observer is not None:
            self.observer.split(node.id, upper.id, tokens)
        return upper

    # ---- publishing

    def append(self, parent: Node, raw: bytes | bytearray, blocks: array[int]) -> Node:
        """A new leaf below `parent`, whose holder moves down to it; the caller sees to the blocks' owners."""
        node = Node(self._next_id(), parent, parent.end, bytearray(raw), blocks)
        node.mark = self.ghosts.adopt(parent.mark, node.start, bytes(raw), node.mark)
        if not parent.children:
            parent.children = {}
        parent.children[bytes(raw[:WIDTH])] = node
        node.locks = node.holders = 1
        parent.holders -= 1  # its lock is now the child's
        self.index.touched(node)
        node.born, node.born_at = node.tick, node.used_at
        self.nodes += 1
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.mark(parent)
        if self.observer is not None:
            self.observer.inserted(node.id, parent.id, node.start, len(raw) // WIDTH)
        return node

    def lengthen(self, node: Node, raw: bytes | bytearray) -> None:
        """Move the end of a leaf down within its last block. Amortised O(new tokens)."""
        node.key += raw
        if self.changed is not None:
            self.changed.mark(node)
        if self.observer is not None:
            self.observer.grown(node.id, len(raw) // WIDTH)

    def grow(self, node: Node, raw: bytes | bytearray, blocks: array[int]) -> None:
        """Move the end of a leaf down in place; `blocks` starts with the one behind its last full block.

        Amortised O(new tokens). Only its one sole holder may: nobody else's end is the node's end.
        """
        old = node.blocks.pop() if node.end % self.pool.block_size else -1
        node.blocks += blocks
        self.lengthen(node, raw)
        if old >= 0 and old != blocks[0]:  # the holder wrote behind a copy
            self.shared.lower_tip(old, node)
            self.shared.release(old)

    def merge(self, upper: Node) -> None:
        """Undo a split that nobody needs: a node that no one holds itself and its only child become one."""
        if upper.parent is None or upper.holders or len(upper.children) != 1:
            return
        (node,) = upper.children.values()
        block = -1
        if upper.end % self.pool.block_size:
            block = upper.blocks.pop()
        shared = array("i", upper.boundary())
        node.key, node.blocks = _joined(upper.key, node.key), _joined(upper.blocks, node.blocks)
        node.start, node.parent = upper.start, upper.parent
        node.mixed |= upper.mixed
        node.hits += upper.hits
        node.priority = max(node.priority, upper.priority)
        upper.parent.children[bytes(node.key[:WIDTH])] = node
        self.nodes -= 1
        self.shared.retip(shared, upper, node)
        if block >= 0:
            self.shared.lower_tip(block, upper)
            self.shared.release(block, idle=not upper.locks)
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.gone(upper)
        if self.observer is not None:
            self.observer.merged(node.id, upper.id)

    # ---- eviction

    def trim(self, node: Node, want: int, now: float, pressure: Pressure) -> int:
        """Evict up to `want` blocks off the tail of an unlocked leaf, and remember them. Returns the tokens dropped."""
        keep = len(node.blocks) - want
        if keep <= 0:
            return self._evict(node, now, pressure)
        size = self.pool.block_size
        end = (node.start // size + keep) * size
        cut, run = node.blocks[keep:], node.key[(end - node.start) * WIDTH :]
        del node.blocks[keep:]
        del node.key[(end - node.start) * WIDTH :]
        freed = self._free(node, cut)
        old, node.mark = node.mark, self._next_id()
        tokens = len(run) // WIDTH
        self.evictions += 1
        self.ghosts.add(node.mark, end, Ghost(run, old, now, pressure, self.evictions, node.use))
        if self.changed is not None:
            self.changed.mark(node)
        if self.observer is not None:
            self.observer.trimmed(node.id, tokens, freed, False)
            self._tell_evicted(node, end, tokens, freed, False, now, pressure)
        return tokens

    def _evict(self, node: Node, now: float, pressure: Pressure) -> int:
        """Remove a whole leaf, and remember it. Returns its tokens."""
        tokens = len(node.key) // WIDTH
        self.evictions += 1
        ghost = Ghost(node.key, node.mark, now, pressure, self.evictions, node.use)
        self.ghosts.add(cast(Node, node.parent).mark, node.start, ghost)
        freed = self.remove(node)
        if self.observer is not None:
            self._tell_evicted(node, node.start, tokens, freed, True, now, pressure)
        return tokens

    def _tell_evicted(
        self, node: Node, start: int, tokens: int, freed: int, gone: bool, now: float, pressure: Pressure
    ) -> None:
        if self.observer is not None:
            idle = max(0.0, now - node.used_at)
            self.observer.evicted(self.evictions, node.id, start, tokens, freed, gone, idle, node.hits, pressure)

    def remove(self, node: Node) -> int:
        """Take an unlocked leaf out of the tree. Returns the blocks that this freed. O(log leaves + its blocks)."""
        pool = self.pool
        before = len(pool.free)
        self.index.removed(node)
        self._drop(node)
        freed = len(pool.free) - before
        if self.changed is not None:
            self.changed.gone(node)
        if self.observer is not None:
            self.observer.trimmed(node.id, len(node.key) // WIDTH, freed, True)
        return freed

    def _drop(self, node: Node) -> None:
        parent = cast(Node, node.parent)
        pool = self.pool
        del parent.children[bytes(node.key[:WIDTH])]
        blocks = node.blocks
        first = blocks[0]
        if node.start % pool.block_size and first in pool.shared:
            self._free(node, blocks[1:])
            self.shared.lower_tip(first, node)
            tip = pool.release(first, idle=True)
            tip = parent if tip is node else tip
            if tip is not None:
                self.shared.repoint(tip)
        else:
            self._free(node, blocks)
        self.nodes -= 1
        if not parent.children:
            parent.children = NO_CHILDREN
            if parent.parent is None:
                self._drop_if_empty(parent)
            elif not parent.locks:
                self.index.inherited(parent, node)
                self.index.inserted(parent)
                if self.changed is not None:
                    self.changed.mark(parent)

    def _free(self, node: Node, blocks: array[int]) -> int:
        """An unlocked node lets go of blocks that only a fork can share."""
        pool = self.pool
        before = len(pool.free)
        if node.mixed:
            for block in reversed(blocks):
                self.shared.lower_tip(block, node)
                pool.release(block, idle=True)
        elif blocks:
            pool.evictable -= len(blocks)
            pool.give_back(blocks)
        return len(pool.free) - before

    def _drop_if_empty(self, root: Node) -> None:
        if not root.locks and not root.children:
            if self.changed is not None:
                self.changed.gone(root)
            if self.observer is not None:
                self.observer.uprooted(root.id)
            del self.roots[self.namespace(root)]

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids


def _joined(head: Run, tail: Run) -> Run:
    """Both in one, by moving the shorter: two who decode the same behind a long prompt merge with every token."""
    if len(tail) < len(head):
        head += tail
        return head
    tail[:0] = head
    return tail


def root_mark(namespace: Hashable) -> Owner:
    """What owns the ghosts that hang at a namespace's root: the same when the root is made anew."""
    return ("root", namespace)
