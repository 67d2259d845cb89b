"""The host tier: a residence for runs of tokens that leave the device, and their order of eviction.

It makes room and takes the tail of a victim (`make_room`, `take`), finds runs to load (`follow`), and drops the copies
of tokens that are published again on the device (`settle`). Tiers are exclusive: Wong and Wilkes, "My cache or yours?"
(2002). A run can be loaded once its moves are confirmed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from random import Random
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from radixkv.cache import reuse
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.host.blocks import HostBlocks
from radixkv.cache.radix_tree import RadixTree, joined
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import NO_CHILDREN, Node, Pressure


class HostRun(NamedTuple):
    """A text whose last tokens, from `start` on, are resident on the host."""

    tokens: npt.NDArray[np.int32]
    start: int
    namespace: object


class HostTier:
    """The second tier of a tree, over `num_blocks` blocks in host memory."""

    def __init__(self, tree: RadixTree, num_blocks: int, index: EvictionIndex) -> None:
        """Connect to the tree."""
        self.blocks = HostBlocks(num_blocks)
        self.index = index  # resident leaves: by priority, then by recency
        self.planned: dict[Node, Pressure] = {}  # nodes with moves that were not drained, and the cause
        self.drained: dict[Node, Pressure] = {}  # nodes with moves that were drained and are not confirmed
        self.count = 0  # nodes
        self.offloaded_blocks = 0
        self.loaded_tokens = 0
        self.evicted_blocks = 0
        self.freed_on_device = 0  # device blocks that were freed by moves to the host
        self._draining = 0  # moves of the drained batch
        self._tree = tree
        tree.lower = self

    # ---- reading

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Yield all nodes, or those after the end of a device node or root; a node comes before its children. O(nodes).

        Without `top` it visits the device nodes too.
        """
        tops = self._tree.walk() if top is None else [top]
        stack = [node for each in tops for node in each.below.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def is_resident(self, node: Node) -> bool:
        """Whether the moves of a node are confirmed: only then its tokens can be loaded."""
        return node not in self.planned and node not in self.drained

    def follow(self, node: Node, raw: bytes, at: int = 0, *, pending: bool = False) -> list[tuple[Node, int]]:
        """Return the nodes along `raw[at:]` after the end of a device node, each with the tokens of it that match.

        It ends before a node whose moves are not confirmed, unless `pending` asks for these too. O(bytes) + O(nodes).
        """
        found: list[tuple[Node, int]] = []
        children = node.below
        while children:
            child = children.get(raw[at : at + WIDTH])
            if child is None or not (pending or self.is_resident(child)):
                break
            matched = common_prefix(raw, at, child.key)
            found.append((child, matched // WIDTH))
            at += matched
            if matched < len(child.key):
                break
            children = child.children
        return found

    def random_run(self, rng: Random) -> HostRun | None:
        """The text up to the end of a random node that can be loaded; None if there is none. Reaches every node.

        O(log leaves + depth + tokens of the text), more only while moves are not confirmed.
        """
        leaves = len(self.index)
        first = rng.randrange(leaves) if leaves else 0
        for number in range(first, first + leaves):
            path = self._tree.path(self.index.at(number % leaves))
            top = next(at for at, node in enumerate(path) if node.residence == "host")
            end = top
            while end < len(path) and self.is_resident(path[end]):
                end += 1
            if end > top:
                at = rng.randrange(path[top].start, path[end - 1].end)
                run = bisect_right(path, at, key=lambda node: node.end)
                tokens = np.frombuffer(bytearray().join([node.key for node in path[: run + 1]]), np.int32)
                return HostRun(tokens, path[run].start, self._tree.namespace(path[0]))
        return None

    def stats(self) -> dict[str, int]:
        """Return the fields of CacheStats that this tier counts."""
        return {
            "host_blocks": self.blocks.num_blocks,
            "host_free_blocks": len(self.blocks.free),
            "host_nodes": self.count,
            "offloaded_blocks": self.offloaded_blocks,
            "loaded_tokens": self.loaded_tokens,
            "host_evicted_blocks": self.evicted_blocks,
        }

    # ---- from the device to the host

    def evict(self, node: Node, blocks: int, now: float, pressure: Pressure) -> int:
        """Take up to `blocks` off the tail of an unlocked leaf of the device. Returns the tokens that left both tiers.

        The host takes the blocks that it has room for. The rest is the end of the text: it is evicted first.
        O(log leaves + tokens), and more for evictions on the host.
        """
        blocks = min(blocks, len(node.blocks))
        room, lost = self.make_room(node, blocks, now, pressure)
        if blocks > room:
            for call in () if node.done else self._tree.events.leaving:
                call(node, blocks - room)
            lost += self._tree.evict_tail(node, blocks - room, now, pressure)
        if room:
            self.take(node, room, pressure)
        return lost

    def make_room(self, node: Node, blocks: int, now: float, pressure: Pressure) -> tuple[int, int]:
        """Make room for the last `blocks` of an unlocked leaf; returns the blocks that have room, and tokens evicted.

        It evicts host leaves that are colder than the node. Without room for all blocks, all host nodes after the node
        are evicted, since its tail goes. A node that is done finds no room: it is evicted, not offloaded.
        """
        lost, free = 0, self.blocks.free
        if not node.done:
            while (missing := blocks - self._images_below(node) - len(free)) > 0:
                victim = self._victim(node)
                if victim is None:
                    break
                lost += self._evict(victim, self._limit(victim, missing), now, pressure)
            if missing <= 0:
                return blocks, lost
        lost += self._evict_all(list(self.nodes(node)), now, pressure)
        return 0 if node.done else min(blocks, len(free)), lost

    def take(self, node: Node, blocks: int, pressure: Pressure) -> None:
        """Make the last `blocks` of an unlocked leaf host-resident; there is room for them."""
        tree, size = self._tree, self._tree.pool.block_size
        keep = len(node.blocks) - blocks
        start = (node.start // size + keep) * size if keep else node.start
        run, tail, end = node.key[(start - node.start) * WIDTH :], node.blocks[keep:], node.end
        child = self._only_child(node)
        if child is not None and end % size:
            tail.pop()  # the child has the image
        images, moves = self.blocks.reserve(tail), len(tail)
        host = self._new_node(node, start, run, images) if child is None else child
        _, part = reuse.split(node.reuse, start)
        host.reuse = reuse.join(part, end, host.reuse)
        if child is not None:
            node.below = NO_CHILDREN
            self._prepend(child, node, start, run, images)
        if node.tick >= host.tick:
            host.tick, host.used_at = node.tick, node.used_at
        if moves:
            self.planned[host] = pressure
        self._add_leaf(host)
        above = node if keep else cast(Node, node.parent)
        self._hang({bytes(host.key[:WIDTH]): host}, above)
        freed = tree.shorten(node, start)[1] if keep else tree.detach(node)
        self.freed_on_device += freed
        for call in tree.events.moved:
            call(node, host, start, end - start, freed, moves, not keep)

    def _images_below(self, node: Node) -> int:
        """Count the images of the last block that `node` need not write: 1 if its only host child starts inside it."""
        joins = node.end % self._tree.pool.block_size and self._only_child(node) is not None
        return int(joins)

    @staticmethod
    def _only_child(node: Node) -> Node | None:
        """The host child that a run can be joined with."""
        if len(node.below) != 1:
            return None
        (child,) = node.below.values()
        return child if child.demoted == node.demoted else None

    def _new_node(self, node: Node, start: int, run: bytearray, images: array[int]) -> Node:
        """Make the host node of a run at the end of `node`; it takes over the host children."""
        number = self._tree.next_id()
        host = Node(
            number, None, start, node.end, run, images, node.ghost_owner, node.below, NO_CHILDREN, residence="host"
        )
        host.hits, host.priority, host.policy_data = node.hits, node.priority, node.policy_data
        host.born, host.born_at, host.demoted = node.born, node.born_at, node.demoted
        for child in node.below.values():
            child.parent = host
        node.below = NO_CHILDREN
        self.count += 1
        return host

    def _prepend(self, child: Node, node: Node, start: int, run: bytearray, images: array[int]) -> None:
        """Let a host node begin with the tail of the device node above it."""
        self._remove_leaf(child)
        child.key, child.blocks, child.start = joined(run, child.key), joined(images, child.blocks), start
        child.hits, child.priority = max(child.hits, node.hits), max(child.priority, node.priority)

    # ---- moves

    def drain(self, now: float) -> tuple[list[tuple[int, int]], int]:
        """Take the pending moves, (device block, host block), and count the tokens that a failed batch has lost.

        A batch that was not confirmed has failed: its nodes, and all host nodes after them, are evicted.
        """
        lost = 0
        while self.drained:
            node, pressure = next(iter(self.drained.items()))
            lost += self._evict_all(list(self._tree.walk(node)), now, pressure)
        moves = self.blocks.drain()
        self.drained, self.planned = self.planned, {}
        self._draining = len(moves)
        if not moves:
            self.confirm()
        return moves, lost

    def confirm(self) -> None:
        """Make the nodes of the drained batch matchable."""
        nodes, self.drained = self.drained, {}
        self.offloaded_blocks += self._draining
        self._draining = 0
        for node in nodes:
            self._add_leaf(node)

    def _note_cancelled(self, node: Node) -> None:
        """Make a node that has lost blocks resident if no move to it is left. O(its blocks)."""
        if node in self.planned and self.blocks.moves.keys().isdisjoint(node.blocks):
            del self.planned[node]
            self._add_leaf(node)

    # ---- text that arrives from elsewhere: see `arrivals`

    def places(self, path: list[Node]) -> list[tuple[bool, int]]:
        """Return where the image of each full block of a text is: whether it is on the device, and its block there.

        The text is the path from its root. It ends before a node whose moves were drained and are not confirmed.
        """
        size = self._tree.pool.block_size
        found: list[tuple[bool, int]] = []
        for node in path:
            if node in self.drained:
                break
            blocks = node.blocks[: node.end // size - node.start // size]
            if node.residence == "device":
                found += [(True, block) for block in blocks]
            else:
                moves = self.blocks.moves
                found += [(block in moves, moves.get(block, block)) for block in blocks]
        return found

    def lend(self, above: Node | None, most: int, now: float) -> tuple[array[int], int]:
        """Take up to `most` blocks for images that will arrive; returns them, and the tokens evicted for it.

        Other leaves are evicted, but not `above`, which the text continues.
        """
        free, lost = self.blocks.free, 0
        if above is not None and above.residence == "host":
            self.touch([above])  # else others evict it before the text arrives
        while (missing := most - len(free)) > 0:
            listed = (self.index.at(number) for number in range(len(self.index)))
            unread = (leaf for leaf in listed if leaf is not above and not self.blocks.are_read(leaf.blocks))
            if (victim := next(unread, None)) is None:
                break
            lost += self._evict(victim, self._limit(victim, missing), now, Pressure(most, len(free)))
        return self.blocks.lend(min(most, len(free))), lost

    def attach(self, above: Node, raw: bytes, images: array[int]) -> None:
        """Add a resident leaf at the end of a node of either tier."""
        tree, start, number = self._tree, above.end, self._tree.next_id()
        owner = tree.ghosts.adopt(above.ghost_owner, start, raw, number)
        end = start + len(raw) // WIDTH
        host = Node(number, above, start, end, bytearray(raw), images, owner, NO_CHILDREN, NO_CHILDREN)
        host.residence = "host"
        tree.index.touch(host)
        host.born, host.born_at = host.tick, host.used_at
        self.count += 1
        if above.residence == "host":
            self._remove_leaf(above)
            above.children = {**above.children, raw[:WIDTH]: host}
            tree.mark(above)
        else:
            above.below = {**above.below, raw[:WIDTH]: host}
        self._add_leaf(host)
        for call in tree.events.arrived:
            call(host)

    # ---- the order of eviction

    def touch(self, path: list[Node]) -> None:
        """Make the run that ends at path[-1] the most recently used one, and take the path off the cold end."""
        for node in path:
            if node.demoted:
                self._list_again(node, demoted=False)
        node = path[-1]
        listed = node.eviction_key is not None
        self._remove_leaf(node)
        self._tree.index.touch(node)
        if listed:
            self.index.add(node)
        self._tree.mark(node)

    def demote(self, path: list[Node], start: int) -> None:
        """Put a finished text at the cold end that ends at the leaf path[-1]. `path` are its host nodes."""
        leaf = path[-1]
        for node in reversed(path):
            if node.start < start or len(node.children) != (node is not leaf) or (node is not leaf and node.hits):
                return
            self._list_again(node, demoted=True)
        above = cast(Node, path[0].parent)
        if not above.hits:
            self._tree.demote(above, start, following=1)

    def _list_again(self, node: Node, *, demoted: bool) -> None:
        self._remove_leaf(node)
        node.demoted = demoted
        self._add_leaf(node)
        self._tree.mark(node)

    def _add_leaf(self, node: Node) -> None:
        """Make a node evictable if it is a leaf and resident."""
        if not node.children and node.eviction_key is None and self.is_resident(node):
            self.index.add(node)

    def _remove_leaf(self, node: Node) -> None:
        """Take a node out of the order of eviction, if it is there."""
        if node.eviction_key is not None:
            self.index.remove(node)

    def _victim(self, node: Node) -> Node | None:
        """Return the leaf to evict next, so that `node` can be offloaded; None if `node` should be evicted instead.

        A leaf that is being read is passed over. O(log leaves).
        """
        for number in range(len(self.index)):
            leaf = self.index.at(number)
            if not self.blocks.are_read(leaf.blocks):
                colder = (leaf.priority, leaf.standing, leaf.tick) <= (node.priority, node.standing, node.tick)
                return leaf if colder else None
        return None

    def _limit(self, leaf: Node, blocks: int) -> int:
        """Return how many blocks, at most `blocks`, to evict off a leaf before the next one."""
        return leaf.trim_limit(self.index.trim_limit(leaf, blocks), self._tree.pool.block_size)

    # ---- out of the host

    def forget(self) -> None:
        """Drop all nodes, without ghosts. Counts as no eviction."""
        self._forget_all(list(self.nodes()))

    def forget_below(self, node: Node) -> None:
        """Drop all nodes after the end of a device node, without ghosts."""
        self._forget_all(list(self.nodes(node)))

    def discard(self, node: Node, start: int) -> None:
        """Drop the tokens of a node from `start` on, and all nodes after it, without ghosts."""
        tree = self._tree
        keeps = start > node.start
        self._forget_all(list(tree.walk(node))[keeps:])
        if keeps:
            tree.index.forget(node.policy_data, start)
            tree.discard_tail(node, start)
            self._note_cancelled(node)

    def detach(self, node: Node) -> int:
        """Take a leaf out of the tree. Returns its blocks."""
        tree, parent = self._tree, cast(Node, node.parent)
        first = bytes(node.key[:WIDTH])
        self._release(node)
        if parent.residence == "host":
            del parent.children[first]
            if not parent.children:
                self.index.inherit(parent, node)
                self._add_leaf(parent)
                tree.mark(parent)
        else:
            del parent.below[first]
            if not parent.below:
                parent.below = NO_CHILDREN
                if parent.parent is None and not parent.locks and not parent.children:
                    tree.drop_root(parent)
        return len(node.blocks)

    def give_back(self, blocks: array[int]) -> None:
        """Free blocks that have no node any more."""
        self.blocks.give_back(blocks)

    def _evict(self, node: Node, most: int, now: float, pressure: Pressure) -> int:
        """Evict up to `most` blocks off the tail of a leaf, and add a ghost. Returns the tokens evicted."""
        for call in self._tree.events.leaving:
            if self.is_resident(node):
                call(node, min(most, len(node.blocks)))
        self.evicted_blocks += min(most, len(node.blocks))
        return self._tree.evict_tail(node, most, now, pressure)

    def _evict_all(self, nodes: list[Node], now: float, pressure: Pressure) -> int:
        """Evict whole nodes; the list has all their children, after them. Returns the tokens."""
        return sum(self._evict(each, len(each.blocks), now, pressure) for each in reversed(nodes))

    def _forget_all(self, nodes: list[Node]) -> None:
        """Drop whole nodes; the list has all their children, after them."""
        for each in reversed(nodes):
            self._tree.index.forget(each.policy_data, each.start)
            self._tree.remove(each)

    def _release(self, node: Node) -> None:
        """Give back the blocks of a node that left the tree, or is about to."""
        self._remove_leaf(node)
        self.planned.pop(node, None)
        self.drained.pop(node, None)
        self.blocks.give_back(node.blocks)
        self.count -= 1

    # ---- publishing

    def settle(self, node: Node, start: int, *, hit: bool) -> None:
        """Drop the host copies of the tokens from `start` on that were published up to the end of `node`.

        `hit` says that a request loaded them. O(depth of the new tokens), and O(their bytes) if they were on the host.
        """
        if node.below:
            at = next(iter(node.below.values())).start
            if at < node.end:  # a held leaf grew in place
                upper = self._tree.split(node, at - node.start)
                upper.ghost_owner, node.ghost_owner = node.ghost_owner, upper.ghost_owner
                children, node.below = node.below, NO_CHILDREN
                self._hang(children, upper)
                self._cover(upper, node, hit)
            return
        while node.parent is not None and node.start >= start:
            above = node.parent
            if above.below and bytes(node.key[:WIDTH]) in above.below:
                self._cover(above, node, hit)
                return
            node = above

    def _cover(self, upper: Node, node: Node, hit: bool) -> None:
        """Drop the host tokens after `upper` that its child `node`, a leaf, has. Host nodes after them move to `node`.

        The node is split where other text branches off on the host.
        """
        tree, base, raw = self._tree, node.start, bytes(node.key)
        host: Node | None = upper.below.pop(raw[:WIDTH], None)
        if not upper.below:
            upper.below = NO_CHILDREN
        at = 0
        while host is not None:
            matched = common_prefix(raw, at, host.key)
            at += matched
            node.hits, node.priority = max(node.hits, host.hits + hit), max(node.priority, host.priority)
            position = base + at // WIDTH
            found, _ = reuse.split(host.reuse, position)
            node.reuse = found if host.start == node.start else reuse.join(node.reuse, host.start, found)
            for cover in tree.events.covered:
                cover(host, node, position)
            if matched < len(host.key):
                self._cut_head(host, matched)
                self._hang({bytes(host.key[:WIDTH]): host}, tree.ending_at(node, position))
                break
            self._release(host)
            for call in tree.events.removed:
                call(host, len(host.blocks))
            following = host.children.pop(raw[at : at + WIDTH], None) if host.children else None
            if host.children:
                above = tree.ending_at(node, position)
                above.ghost_owner = host.ghost_owner
                self._hang(host.children, above)
            elif at == len(raw):
                node.ghost_owner = host.ghost_owner
            if at < len(raw):
                node.ghost_owner = tree.ghosts.adopt(host.ghost_owner, position, raw[at:], node.ghost_owner)
            host = following
        for settle in tree.events.settled:
            settle(upper)
        tree.merge(upper, covered=True)

    def _hang(self, children: dict[bytes, Node], above: Node) -> None:
        """Let host nodes follow a device node, in addition to those that follow it."""
        above.below = {**above.below, **children}
        for child in children.values():
            child.parent = above
            self._tree.mark(child)

    def _cut_head(self, node: Node, matched: int) -> None:
        """Drop the first `matched` bytes of a node; an image in which later tokens lie stays whole."""
        size = self._tree.pool.block_size
        start = node.start + matched // WIDTH
        _, node.reuse = reuse.split(node.reuse, start)
        whole = start // size - node.start // size
        self.blocks.give_back(node.blocks[:whole])
        del node.blocks[:whole]
        del node.key[:matched]
        node.start = start
        self._note_cancelled(node)
