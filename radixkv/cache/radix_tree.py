"""The radix tree: token runs -> blocks. Match, lock, split, grow, merge, trim, and readings of the result.

A node covers the tokens [start, end) of its path, and may start and end inside a block. For every logical block that it
touches, it names the block that holds the path's tokens up to its end. So where a child starts inside a block, its
first block also holds the parent's last tokens: it is the parent's own last block if the child was appended in place,
else a copy of it. A path's block for a logical block is the deepest node's.

Locks: `direct_holders` counts the sequences and pins that end at a node; `locks` adds one for each locked child. Only
the steps 0 <-> 1 go up to the parent. Nothing here recurses with depth.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from itertools import count
from random import Random
from typing import TypeVar, cast

import numpy as np

from radixkv.cache import reuse
from radixkv.cache.block_pool import BlockPool, SharedBlocks
from radixkv.cache.events import Observer
from radixkv.cache.ghosts import Ghost, Ghosts, Pressure
from radixkv.cache.namespaces import Namespace, Namespaces
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import NO_CHILDREN, CachedRun, ChangeLog, GhostOwner, LeafIndex, Node

Run = TypeVar("Run", bytearray, "array[int]")


class RadixTree:
    """The trees of all namespaces over one pool."""

    def __init__(self, pool: BlockPool, index: LeafIndex, ghosts: Ghosts) -> None:
        self.pool = pool
        self.shared = SharedBlocks(pool)
        self.index = index
        self.ghosts = ghosts
        self.namespaces = Namespaces()
        self.roots: dict[Namespace, Node] = {}
        self.nodes = 0  # roots not counted
        self.observer: Observer | None = None  # guards at each event: a null object costs 2 to 7% of a request
        self.changed: ChangeLog | None = None
        self.evictions = 0
        self._ids = count(1)

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
        """The block table of the path to the end of `node`; after `above`, from its part-filled last block on."""
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
        """The namespace of the tree that a node is in, as its caller named it. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return cast(Namespace, node.ghost_owner).value

    def walk(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes, roots included, or `top` and all below it; a node comes before its children."""
        stack = list(self.roots.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def residents(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes, roots included, of all tiers; or `top` and all below it. A node comes before its children."""
        return self.walk(top)

    def find(self, number: int) -> Node | None:
        """Return the node of an id, in any tier; None if there is none. O(nodes)."""
        return next((each for each in self.residents() if each.id == number), None)

    def followers(self, node: Node) -> int:
        """Count the nodes that follow the end of a node, in any tier."""
        return len(node.children)

    def is_empty(self, root: Node) -> bool:
        """Whether a root has no children and no holders."""
        return not root.locks and not root.children

    def beyond(self, node: Node, owner: GhostOwner, rest: bytes) -> list[tuple[Node | Ghost, int]]:
        """The records of `rest`, which follows the end of `node`: ghosts below `owner`, each with its tokens."""
        return [*self.ghosts.follow(owner, node.end, rest, faded=True)]

    def idle_blocks(self, path: list[Node], end: int) -> int:
        """Evictable blocks of a path up to token `end` of its last node. O(depth) + O(blocks that forks may share)."""
        if not path or path[-1].locks:
            return 0
        size = self.pool.block_size
        idle = path[bisect_left(path, True, key=lambda node: not node.locks) :] if path[0].locks else path
        first, last = idle[0].start // size, -(-end // size)
        seams = [node for node in idle if node.start % size or node.may_share_any_block]
        if not seams:
            return last - first
        # Where nodes meet inside blocks, or forks share blocks, the path may own several blocks for a logical one.
        logical: set[int] = set()
        blocks: set[int] = set()
        for node in seams:
            at = node.start // size
            touched = node.blocks[: last - at if node.may_share_any_block else 1]
            logical.update(range(at, at + len(touched)))
            blocks.update(touched)
            if node is not idle[0] and node.start % size and node.parent is not None:
                blocks.add(node.parent.blocks[-1])
        return last - first - len(logical) + sum(map(self.pool.is_evictable, blocks))

    def held_length(self, node: Node, raw: bytes | bytearray) -> int:
        """Count the tokens of the path to `node`, then of `raw`, that stay held if one holder releases them.

        O(depth) + O(bytes of `raw`).
        """
        if raw and node.children:
            below, matched = self.match(node, bytes(raw))
            while below is not node and below.parent is not None:
                if below.locks:
                    return min(below.end, node.end + matched // WIDTH)
                below = below.parent
        up = node
        while up.locks == 1 and up.parent is not None:
            up = up.parent
        return up.end

    def random_run(self, held: list[Node], rng: Random) -> CachedRun | None:
        """The run at a random token of a text that ends at a random leaf or held node; None if nothing is cached.

        O(log leaves + held + depth + tokens of the text).
        """
        ends = list(dict.fromkeys(node for node in held if node.parent is not None))
        choice = rng.randrange(len(self.index) + len(ends)) if self.index or ends else -1
        if choice < 0:
            return None
        end = ends[choice] if choice < len(ends) else self.index.at(choice - len(ends))
        path = self.path(end)
        run = bisect_right(path, rng.randrange(end.end), key=lambda node: node.end)
        path = path[: run + 1]
        tokens = np.frombuffer(bytearray().join([node.key for node in path]), np.int32)
        blocks = np.frombuffer(self.joined(path), np.int32)
        return CachedRun(tokens, path[-1].start, self.namespace(path[0]), blocks)

    # ---- holding

    def find_root(self, namespace: Namespace | None) -> Node | None:
        """The namespace's root, if it has one."""
        return None if namespace is None else self.roots.get(namespace)

    def add_namespace(self, value: Hashable) -> Namespace:
        """Make the namespace of a value that is not known, and forget unused ones at times. Amortised O(1)."""
        if len(self.namespaces) >= self.namespaces.limit:
            self.namespaces.keep({*self.roots, *self.ghosts.owners()}, len(self.ghosts))
        return self.namespaces.add(value)

    def add_root(self, namespace: Namespace) -> Node:
        """Make the root of a namespace. Hold it at once: `unhold` and `remove` remove an empty root."""
        root = Node(next(self._ids), None, 0, bytearray(), array("i"), namespace, NO_CHILDREN)
        self.roots[namespace] = root
        self.index.date(root)
        root.born_at = root.used_at
        if self.observer is not None:
            self.observer.rooted(root.id, namespace.value)
        return root

    def hold(self, node: Node) -> None:
        """Add a holder: the node's path cannot be evicted. O(nodes that become locked)."""
        node.direct_holders += 1
        child: Node | None = None
        up: Node | None = node
        changed = self.changed
        while up is not None:
            up.locks += 1
            if changed is not None:
                changed.mark(up)
            if up.locks > 1:
                break
            if up.eviction_key is not None:
                self.index.remove(up)
            self.pool.shift(up, idle=False)
            child, up = up, up.parent
        if up is not None and child is not None and child.start % self.pool.block_size:
            self.shared.dedupe_tail_block(up)

    def unhold(self, node: Node) -> None:
        """Drop a holder. O(nodes that become unlocked)."""
        node.direct_holders -= 1
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
            self.pool.shift(up, idle=True)
            if up.children:
                self.shared.dedupe_tail_block(up)
            else:
                self.index.add(up)
            up = up.parent

    def demote(self, node: Node, start: int = 0) -> None:
        """Put a finished tail at the cold end: from `node` up to `start`, or to a node that is locked, hit or branches.

        O(nodes demoted * log leaves).
        """
        up = node
        while up.parent is not None and not up.locks and len(up.children) == (up is not node):
            if up.start < start or (up is not node and up.hits):
                return
            up.demoted = True
            if self.changed is not None:
                self.changed.mark(up)
            if up.eviction_key is not None:
                self.index.remove(up)
                self.index.add(up)
            up = up.parent

    def undo_demote(self, node: Node) -> None:
        """Take the tail that ends at a held node off the cold end. O(nodes demoted)."""
        up: Node | None = node
        while up is not None and up.demoted:
            up.demoted = False
            up = up.parent

    # ---- publishing

    def split(self, node: Node, tokens: int) -> Node:
        """Cut a node after its first `tokens` and return the new upper half.

        The object stays the lower half, so every sequence and pin still ends at the end of a node.
        """
        size = self.pool.block_size
        parent = cast(Node, node.parent)
        cut = node.start + tokens
        first = node.start // size
        number, key, blocks = next(self._ids), node.key[: tokens * WIDTH], node.blocks[: -(-cut // size) - first]
        children = {bytes(node.key[tokens * WIDTH : tokens * WIDTH + WIDTH]): node}
        upper = Node(number, parent, node.start, key, blocks, number, children)
        upper.tick, upper.born = node.tick, node.born  # but no hits: they ended at the lower half, and stay there
        upper.used_at, upper.born_at, upper.policy_data = node.used_at, node.born_at, node.policy_data
        upper.reuse, node.reuse = reuse.split(node.reuse, cut)
        upper.priority, upper.demoted, upper.may_share_any_block = node.priority, node.demoted, node.may_share_any_block
        upper.locks = 1 if node.locks else 0
        parent.children[bytes(key[:WIDTH])] = upper
        node.parent, node.start = upper, cut
        del node.key[: tokens * WIDTH]
        del node.blocks[: cut // size - first]
        self.shared.transfer_ownership(upper.boundary(), node, upper)
        if cut % size:
            self.shared.share(upper.blocks[-1], node, idle=not node.locks)
        self.nodes += 1
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.mark(upper)
        if self.observer is not None:
            self.observer.split(node.id, upper.id, tokens)
        return upper

    def append(self, parent: Node, raw: bytes | bytearray, blocks: array[int]) -> Node:
        """Add a leaf below `parent`, whose holder moves down to it. The caller records the owners of `blocks`."""
        number, start = next(self._ids), parent.end
        owner = self.ghosts.adopt(parent.ghost_owner, start, bytes(raw), number)
        node = Node(number, parent, start, bytearray(raw), blocks, owner, NO_CHILDREN)
        if not parent.children:
            parent.children = {}
        parent.children[bytes(raw[:WIDTH])] = node
        node.locks = node.direct_holders = 1
        parent.direct_holders -= 1  # its lock is now the child's
        self.index.touch(node)
        node.born, node.born_at = node.tick, node.used_at
        self.nodes += 1
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.mark(parent)
        if self.observer is not None:
            self.observer.inserted(number, parent.id, start, len(raw) // WIDTH)
        return node

    def lengthen(self, node: Node, raw: bytes | bytearray) -> None:
        """Move the end of a leaf down within its last block. Amortised O(new tokens)."""
        node.key += raw
        if self.changed is not None:
            self.changed.mark(node)
        if self.observer is not None:
            self.observer.grown(node.id, len(raw) // WIDTH)

    def grow(self, node: Node, raw: bytes | bytearray, blocks: array[int]) -> None:
        """Move the end of a leaf down in place; `blocks` starts with the one after its last full block.

        Amortised O(new tokens). Only a sole holder of the leaf may grow it: others would no longer end at a node's end.
        """
        old = node.blocks.pop() if node.end % self.pool.block_size else -1
        node.blocks += blocks
        self.lengthen(node, raw)
        if old >= 0 and old != blocks[0]:  # the holder wrote to a copy
            self.shared.drop_ownership(old, node)
            self.shared.release(old)

    def merge(self, upper: Node) -> None:
        """Undo a split that is no longer needed: join a node without direct holders with its only child."""
        if upper.parent is None or upper.direct_holders or len(upper.children) != 1:
            return
        (node,) = upper.children.values()
        block = -1
        if upper.end % self.pool.block_size:
            block = upper.blocks.pop()
        shared = array("i", upper.boundary())
        node.reuse = reuse.join(upper.reuse, node.start, node.reuse)
        node.key, node.blocks = joined(upper.key, node.key), joined(upper.blocks, node.blocks)
        node.start, node.parent = upper.start, upper.parent
        node.may_share_any_block |= upper.may_share_any_block
        node.hits += upper.hits
        node.priority = max(node.priority, upper.priority)
        upper.parent.children[bytes(node.key[:WIDTH])] = node
        self.nodes -= 1
        self.shared.transfer_ownership(shared, upper, node)
        if block >= 0:
            self.shared.drop_ownership(block, upper)
            self.shared.release(block, idle=not upper.locks)
        if self.changed is not None:
            self.changed.mark(node)
            self.changed.gone(upper)
        if self.observer is not None:
            self.observer.merged(node.id, upper.id)

    # ---- eviction

    def trim(self, node: Node, most: int, now: float, pressure: Pressure) -> int:
        """Evict up to `most` blocks off the tail of an unlocked leaf, and add a ghost. Returns the tokens evicted."""
        keep = len(node.blocks) - most
        self.evictions += 1
        if keep <= 0:
            tokens, start, gone = len(node.key) // WIDTH, node.start, True
            ghost = Ghost(node.key, node.ghost_owner, now, pressure, self.evictions, node.policy_data)
            self.ghosts.add(cast(Node, node.parent).ghost_owner, start, ghost)
            freed = self.remove(node)
        else:
            size = self.pool.block_size
            start, gone = (node.start // size + keep) * size, False
            cut, run = node.blocks[keep:], node.key[(start - node.start) * WIDTH :]
            del node.blocks[keep:]
            del node.key[(start - node.start) * WIDTH :]
            freed = self._free(node, cut)
            node.reuse, _ = reuse.split(node.reuse, start)
            old, node.ghost_owner = node.ghost_owner, next(self._ids)
            tokens = len(run) // WIDTH
            self.ghosts.add(node.ghost_owner, start, Ghost(run, old, now, pressure, self.evictions, node.policy_data))
            if self.changed is not None:
                self.changed.mark(node)
            if self.observer is not None:
                self.observer.trimmed(node.id, tokens, freed, False)
        if self.observer is not None:
            idle = max(0.0, now - node.used_at)
            self.observer.evicted(self.evictions, node.id, start, tokens, freed, gone, idle, node.hits, pressure)
        return tokens

    def remove(self, node: Node) -> int:
        """Take an unlocked leaf out of the tree. Returns the blocks that this freed. O(log leaves + its blocks)."""
        pool = self.pool
        before = len(pool.free)
        self.index.remove(node)
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
            self.shared.drop_ownership(first, node)
            deepest_owner = pool.release(first, idle=True)
            deepest_owner = parent if deepest_owner is node else deepest_owner
            if deepest_owner is not None:
                self.shared.dedupe_tail_block(deepest_owner)
        else:
            self._free(node, blocks)
        self.nodes -= 1
        if not parent.children:
            parent.children = NO_CHILDREN
            if parent.parent is None:
                self._drop_if_empty(parent)
            elif not parent.locks:
                self.index.inherit(parent, node)
                self.index.add(parent)
                if self.changed is not None:
                    self.changed.mark(parent)

    def _free(self, node: Node, blocks: array[int]) -> int:
        """Drop an unlocked node's ownership of blocks that only a fork can share. Returns how many this freed."""
        pool = self.pool
        before = len(pool.free)
        if node.may_share_any_block:
            for block in reversed(blocks):
                self.shared.drop_ownership(block, node)
                pool.release(block, idle=True)
        elif blocks:
            pool.give_back_idle(blocks)
        return len(pool.free) - before

    def _drop_if_empty(self, root: Node) -> None:
        if self.is_empty(root):
            if self.changed is not None:
                self.changed.gone(root)
            if self.observer is not None:
                self.observer.uprooted(root.id)
            del self.roots[cast(Namespace, root.ghost_owner)]


def joined(head: Run, tail: Run) -> Run:
    """Join both by moving the shorter one: sequences that decode the same text after a long prompt often merge."""
    if len(tail) < len(head):
        head += tail
        return head
    tail[:0] = head
    return tail
