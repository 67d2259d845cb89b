"""The radix tree: token runs -> blocks. Match, lock, split, grow, merge, trim, and readings of the result.

A node covers the tokens [start, end) of its path, and may start and end inside a block. For every logical block that it
touches, it names the block that holds the path's tokens up to its end. So where a child starts inside a block, its
first block also holds the parent's last tokens: it is the parent's own last block if the child was appended in place,
else a copy of it. A path's block for a logical block is the deepest node's.

Locks: `direct_holders` counts the sequences and pins that end at a node; `locks` adds one for each locked child. Only
the steps 0 <-> 1 go up to the parent. Nothing here recurses with depth.

`lower` is the residence below the device, a second tier, or None. Every path is device nodes, then host nodes, then
nothing. `Node.children` of a device node has device nodes only, so matching, locks and the eviction index see the
device part alone; the host nodes that follow its end are in `Node.below`. No text is resident in both tiers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Set
from itertools import count
from typing import TypeVar

from radixkv.cache import reuse
from radixkv.cache.block_pool import BlockPool, SharedBlocks
from radixkv.cache.events import Events
from radixkv.cache.ghosts import Ghost, Ghosts
from radixkv.cache.namespaces import Namespace, Namespaces
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import NO_CHILDREN, LeafIndex, Node, Pressure, Residence

Run = TypeVar("Run", bytearray, "array[int]")


class RadixTree:
    """The trees of all namespaces over one pool."""

    def __init__(
        self, pool: BlockPool, index: LeafIndex, ghosts: Ghosts, namespaces: Namespaces, events: Events
    ) -> None:
        self.pool = pool
        self.shared = SharedBlocks(pool, events)
        self.index = index
        self.ghosts = ghosts
        self.namespaces = namespaces
        self.roots: dict[Namespace, Node] = {}
        self.nodes = 0  # of the device, roots not counted
        self.events = events
        self.lower: Residence | None = None  # a second tier connects itself
        self.text_owners: list[Callable[[], Set[int]]] = []  # the namespaces of past and of waiting text, by number
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
        return self.namespace_of(node).value

    def namespace_of(self, node: Node) -> Namespace:
        """The namespace of the tree that a node is in. O(depth)."""
        while node.parent is not None:
            node = node.parent
        assert node.namespace is not None
        return node.namespace

    def walk(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes of a tier, roots included, or `top` and all below it; a node comes before its children."""
        stack = list(self.roots.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def residents(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes, roots included, of all tiers; or `top` and all below it. A node comes before its children."""
        stack = list(self.roots.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.below.values())
            stack.extend(node.children.values())

    def find(self, number: int) -> Node | None:
        """Return the node of an id, in any tier; None if there is none. O(nodes)."""
        return next((each for each in self.residents() if each.id == number), None)

    def followers(self, node: Node) -> int:
        """Count the nodes that follow the end of a node, in any tier."""
        return len(node.children) + len(node.below)

    def beyond(self, node: Node, owner: int, rest: bytes) -> list[tuple[Node | Ghost, int]]:
        """The host nodes along `rest`, which follows the end of `node`, then the ghosts, each with its tokens.

        Without host nodes, the ghosts are those below `owner`.
        """
        at, host = self._host_end(node, rest)
        if host:
            last, matched = host[-1]
            if matched < last.end - last.start:
                return [*host]
            owner = last.ghost_owner
        return [*host, *self.ghosts.follow(owner, node.end + at, rest[at * WIDTH :], faded=True)]

    def after_host(self, node: Node, owner: int, rest: bytes) -> tuple[int, int, bytes] | None:
        """Pass over the host nodes along `rest`, which follows the end of `node`.

        Returns (owner, position, rest) of what follows them, from which ghosts are found; None if a host node has more
        tokens than match.
        """
        at, host = self._host_end(node, rest)
        if not host:
            return owner, node.end, rest
        last, matched = host[-1]
        return None if matched < last.end - last.start else (last.ghost_owner, last.end, rest[at * WIDTH :])

    def _host_end(self, node: Node, rest: bytes) -> tuple[int, list[tuple[Node, int]]]:
        """Return the number of tokens along `rest` that are on the host, and the nodes that have them."""
        host = [] if self.lower is None else self.lower.follow(node, rest, pending=True)
        return sum(tokens for _, tokens in host), host

    # ---- holding

    def find_root(self, namespace: Namespace | None) -> Node | None:
        """The namespace's root, if it has one."""
        return None if namespace is None else self.roots.get(namespace)

    def add_namespace(self, value: Hashable) -> Namespace:
        """Make the namespace of a value that is not known, and forget unused ones at times. Amortised O(1)."""
        if len(self.namespaces) >= self.namespaces.limit:
            used = {root.ghost_owner for root in self.roots.values()} | self.ghosts.owners()
            self.namespaces.keep(used.union(*(owners() for owners in self.text_owners)), len(self.ghosts))
        return self.namespaces.add(value)

    def add_root(self, namespace: Namespace) -> Node:
        """Make the root of a namespace. Hold it at once: `unhold` and `remove` remove an empty root."""
        number = next(self._ids)
        root = Node(number, None, 0, 0, bytearray(), array("i"), namespace.number, NO_CHILDREN, NO_CHILDREN, namespace)
        self.roots[namespace] = root
        self.index.date(root)
        root.born_at = root.used_at
        for call in self.events.rooted:
            call(root)
        return root

    def hold(self, node: Node) -> None:
        """Add a holder: the node's path cannot be evicted. O(nodes that become locked)."""
        node.direct_holders += 1
        child: Node | None = None
        up: Node | None = node
        marked = self.events.marked
        while up is not None:
            up.locks += 1
            if marked:  # an empty loop at each node costs three times as much
                self.mark(up)
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
        marked = self.events.marked
        while up is not None:
            up.locks -= 1
            if marked:  # as in `hold`
                self.mark(up)
            if up.locks:
                return
            if up.parent is None:
                if not up.children and not up.below:
                    self.drop_root(up)
                return
            self.pool.shift(up, idle=True)
            if up.children:
                self.shared.dedupe_tail_block(up)
            else:
                self.index.add(up)
            up = up.parent

    def demote(self, node: Node, start: int = 0, *, following: int = 0, done: bool = False) -> None:
        """Put the tail of a text that ends at `node` at the cold end: the nodes from position `start` on.

        `following` is how many host nodes of this text follow `node`. With `done` it will not be offloaded. It stops
        below a node that is locked, that a request hit, or after which other text follows in any tier.
        O(nodes demoted * log leaves).
        """
        up = node
        while up.parent is not None and not up.locks and self.followers(up) == (1 if up is not node else following):
            if up.start < start or (up is not node and up.hits):
                return
            up.demoted, up.done = True, up.done or done
            self.mark(up)
            if up.eviction_key is not None:
                self.index.remove(up)
                self.index.add(up)
            up = up.parent

    def undo_demote(self, node: Node) -> None:
        """Take the tail that ends at a held node off the cold end. O(nodes demoted)."""
        up: Node | None = node
        while up is not None and up.demoted:
            up.demoted = up.done = False
            up = up.parent

    def mark(self, node: Node) -> None:
        """Send `marked`: locks, blocks, hits or demotion of a node changed."""
        for call in self.events.marked:
            call(node)

    # ---- publishing

    def split(self, node: Node, tokens: int) -> Node:
        """Cut a node after its first `tokens` and return the new upper half.

        The object stays the lower half, so every sequence and pin still ends at the end of a node, and host nodes still
        follow it.
        """
        size = self.pool.block_size
        parent = node.parent
        assert parent is not None
        cut = node.start + tokens
        first = node.start // size
        number, key, blocks = next(self._ids), node.key[: tokens * WIDTH], node.blocks[: -(-cut // size) - first]
        children = {bytes(node.key[tokens * WIDTH : tokens * WIDTH + WIDTH]): node}
        upper = Node(number, parent, node.start, cut, key, blocks, number, children, NO_CHILDREN)
        upper.tick, upper.born = node.tick, node.born  # but no hits: they ended at the lower half, and stay there
        upper.used_at, upper.born_at, upper.policy_data = node.used_at, node.born_at, node.policy_data
        if node.reuse:
            upper.reuse, node.reuse = reuse.split(node.reuse, cut)
        upper.priority, upper.demoted, upper.done = node.priority, node.demoted, node.done
        upper.may_share_any_block = node.may_share_any_block
        upper.locks = 1 if node.locks else 0
        parent.children[bytes(key[:WIDTH])] = upper
        node.parent, node.start = upper, cut
        del node.key[: tokens * WIDTH]
        del node.blocks[: cut // size - first]
        self.shared.transfer_ownership(upper, node, upper)
        if cut % size:
            self.shared.share(upper.blocks[-1], node, idle=not node.locks)
        self.nodes += 1
        for call in self.events.split:
            call(node, upper)
        return upper

    def ending_at(self, node: Node, position: int) -> Node:
        """Return the node that ends at a position of the path to the end of `node`, split off if need be."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if position == node.end else self.split(node, position - node.start)

    def append(self, parent: Node, raw: bytes | bytearray, blocks: array[int]) -> Node:
        """Add a leaf below `parent`, whose holder moves down to it. The caller records the owners of `blocks`."""
        number, start = next(self._ids), parent.end
        owner = self.ghosts.adopt(parent.ghost_owner, start, bytes(raw), number)
        node = Node(
            number, parent, start, start + len(raw) // WIDTH, bytearray(raw), blocks, owner, NO_CHILDREN, NO_CHILDREN
        )
        if not parent.children:
            parent.children = {}
        parent.children[bytes(raw[:WIDTH])] = node
        node.locks = node.direct_holders = 1
        parent.direct_holders -= 1  # its lock is now the child's
        self.index.touch(node)
        node.born, node.born_at = node.tick, node.used_at
        self.nodes += 1
        for call in self.events.appended:
            call(node)
        return node

    def lengthen(self, node: Node, raw: bytes | bytearray) -> None:
        """Move the end of a leaf down within its last block. Amortised O(new tokens)."""
        node.key += raw
        node.end += len(raw) // WIDTH
        if self.events.grown:  # for each token: an empty loop costs three times as much
            for call in self.events.grown:
                call(node, len(raw) // WIDTH)

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

    def merge(self, upper: Node, *, covered: bool = False) -> None:
        """Undo a split that is no longer needed: join a node without direct holders with its only child.

        The hits of both add up, as a split gave all to the lower half; with `covered` the more hits are kept, because
        the host's copy of a text has its hits too.
        """
        if upper.parent is None or upper.direct_holders or len(upper.children) != 1 or upper.below:
            return
        (node,) = upper.children.values()
        block = -1
        if upper.end % self.pool.block_size:
            block = upper.blocks.pop()
        self.shared.transfer_ownership(upper, upper, node)
        if upper.reuse:
            node.reuse = reuse.join(upper.reuse, node.start, node.reuse)
        node.key, node.blocks = joined(upper.key, node.key), joined(upper.blocks, node.blocks)
        node.start, node.parent = upper.start, upper.parent
        node.may_share_any_block |= upper.may_share_any_block
        node.hits = max(node.hits, upper.hits) if covered else node.hits + upper.hits
        node.priority = max(node.priority, upper.priority)
        upper.parent.children[bytes(node.key[:WIDTH])] = node
        self.nodes -= 1
        if block >= 0:
            self.shared.drop_ownership(block, upper)
            self.shared.release(block, idle=not upper.locks)
        for call in self.events.joined:
            call(node, upper)

    def settle_above(self, node: Node) -> None:
        """After a leaf was added: free its parent's last block if it became redundant, and undo a needless split."""
        parent = node.parent
        assert parent is not None
        if node.start % self.pool.block_size and parent.blocks[-1] != node.blocks[0]:
            self.shared.dedupe_tail_block(parent)
        self.merge(parent)

    # ---- eviction

    def evict_tail(self, node: Node, blocks: int, now: float, pressure: Pressure) -> int:
        """Evict up to `blocks` off the tail of an unlocked leaf of its tier, and add a ghost. Returns the tokens."""
        keep, parent = len(node.blocks) - blocks, node.parent
        assert parent is not None
        self.evictions = number = self.evictions + 1
        gone = keep <= 0
        if gone:
            tokens, start = len(node.key) // WIDTH, node.start
            ghost = Ghost(node.key, node.ghost_owner, now, pressure, number, node.policy_data)
            self.ghosts.add(parent.ghost_owner, start, ghost)
            freed = self.remove(node)
        else:
            start, old = (node.start // self.pool.block_size + keep) * self.pool.block_size, node.ghost_owner
            run, freed = self.shorten(node, start)
            tokens = len(run) // WIDTH
            self.ghosts.add(node.ghost_owner, start, Ghost(run, old, now, pressure, number, node.policy_data))
            for cut in self.events.cut:
                cut(node, tokens, freed)
        for call in self.events.evicted:
            call(number, node, start, tokens, freed, gone, now, pressure)
        return tokens

    def discard_tail(self, node: Node, start: int) -> None:
        """Drop the tokens from `start` on, inside an unlocked leaf of its tier, without a ghost."""
        run, freed = self.shorten(node, start)
        for call in self.events.cut:
            call(node, len(run) // WIDTH, freed)

    def shorten(self, node: Node, start: int) -> tuple[bytearray, int]:
        """Drop the tokens from `start` on off an unlocked leaf; returns them, and how many blocks that freed.

        The caller sends the event.
        """
        size = self.pool.block_size
        keep = -(-start // size) - node.start // size
        cut, run = node.blocks[keep:], node.key[(start - node.start) * WIDTH :]
        del node.blocks[keep:]
        del node.key[(start - node.start) * WIDTH :]
        node.end = start
        if node.residence == "host" and self.lower is not None:
            self.lower.give_back(cut)
            freed = len(cut)
        else:
            freed = self._free(node, cut)
        if node.reuse:
            node.reuse, _ = reuse.split(node.reuse, start)
        node.ghost_owner = next(self._ids)
        return run, freed

    def remove(self, node: Node) -> int:
        """Take an unlocked leaf out of the tree, and all host nodes after it. Returns the blocks that this freed.

        O(log leaves + its blocks).
        """
        if node.below and self.lower is not None:
            self.lower.forget_below(node)
        freed = self.detach(node)
        for call in self.events.removed:
            call(node, freed)
        return freed

    def detach(self, node: Node) -> int:
        """Take an unlocked leaf of its tier out of the tree. The caller sends the event. Returns the blocks freed."""
        if node.residence == "host" and self.lower is not None:
            return self.lower.detach(node)
        before = len(self.pool.free)
        self.index.remove(node)
        self._drop(node)
        return len(self.pool.free) - before

    def _drop(self, node: Node) -> None:
        parent, pool = node.parent, self.pool
        assert parent is not None
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
                if not parent.locks and not parent.below:
                    self.drop_root(parent)
            elif not parent.locks:
                self.index.inherit(parent, node)
                self.index.add(parent)
                self.mark(parent)

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

    def drop_root(self, root: Node) -> None:
        """Remove a root that has no children in any tier and no holders."""
        for call in self.events.uprooted:
            call(root)
        assert root.namespace is not None
        del self.roots[root.namespace]

    def next_id(self) -> int:
        """Return a number that no node and no owner of ghosts has had."""
        return next(self._ids)


def joined(head: Run, tail: Run) -> Run:
    """Join both by moving the shorter one: sequences that decode the same text after a long prompt often merge."""
    if len(tail) < len(head):
        head += tail
        return head
    tail[:0] = head
    return tail
