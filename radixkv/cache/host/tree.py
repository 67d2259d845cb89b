"""The radix tree of a cache with a host tier: eviction from the device offloads, and publishing frees host copies.

Every path is device nodes, then host nodes, then nothing. `Node.children` of a device node has device nodes only, so
matching, locks and the eviction index see the device part alone; the host nodes hang below it in `HostTier.below`. No
text is resident in both tiers.
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
from radixkv.cache.events import TierObserver
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.ghosts import Ghost, Pressure
from radixkv.cache.host.tier import HostNode, HostTier
from radixkv.cache.radix_tree import RadixTree, joined
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import NO_CHILDREN, GhostOwner, Node


class HostRun(NamedTuple):
    """A text whose last tokens, from `start` on, are resident on the host."""

    tokens: npt.NDArray[np.int32]
    start: int
    namespace: object


class HostTree(RadixTree):
    """A radix tree over two tiers; the cache sets `tier` before it uses the tree."""

    tier: HostTier
    index: EvictionIndex
    freed_by_offload = 0  # device blocks

    # ---- reading

    def is_empty(self, root: Node) -> bool:
        """Whether a root has no children in either tier and no holders."""
        return root not in self.tier.below and super().is_empty(root)

    def residents(self, top: Node | None = None) -> Iterator[Node]:
        """All nodes of both tiers; or the device node `top` and all below it. A node comes before its children."""
        yield from self.walk(top)
        if top is None:
            yield from self.tier.nodes()
            return
        for node in self.walk(top):
            yield from self.tier.nodes(node)

    def followers(self, node: Node) -> int:
        """Count the nodes that follow the end of a node, in both tiers."""
        return super().followers(node) + len(self.tier.below.get(node, ()))

    def beyond(self, node: Node, owner: GhostOwner, rest: bytes) -> list[tuple[Node | Ghost, int]]:
        """The host nodes along `rest`, which follows the end of `node`, then the ghosts, each with its tokens."""
        found: list[tuple[Node | Ghost, int]] = [*self.tier.follow(node, rest, pending=True)]
        if not found:
            return super().beyond(node, owner, rest)
        last, matched = cast("tuple[HostNode, int]", found[-1])
        if matched * WIDTH == len(last.key):
            at = (last.end - node.end) * WIDTH
            found += self.ghosts.follow(last.ghost_owner, last.end, rest[at:], faded=True)
        return found

    def random_host_run(self, rng: Random) -> HostRun | None:
        """The text up to the end of a random host node that can be loaded; None if there is none. Reaches every node.

        O(log leaves + depth + tokens of the text), more only while moves are not confirmed.
        """
        leaves = len(self.tier.index)
        first = rng.randrange(leaves) if leaves else 0
        for number in range(first, first + leaves):
            path = self.path(self.tier.index.at(number % leaves))
            top = next(at for at, node in enumerate(path) if node.residence == "host")
            end = top
            while end < len(path) and self.tier.is_resident(cast(HostNode, path[end])):
                end += 1
            if end > top:
                at = rng.randrange(path[top].start, path[end - 1].end)
                run = bisect_right(path, at, key=lambda node: node.end)
                tokens = np.frombuffer(bytearray().join([node.key for node in path[: run + 1]]), np.int32)
                return HostRun(tokens, path[run].start, self.namespace(path[0]))
        return None

    # ---- nodes of both tiers

    def merge(self, upper: Node) -> None:
        """Join a node with its only child if no other text follows it in either tier. The more hits are kept."""
        if upper in self.tier.below or len(upper.children) != 1:
            return
        (child,) = upper.children.values()
        most = max(upper.hits, child.hits)
        super().merge(upper)
        if child.parent is not upper:
            child.hits = most

    def demote(self, node: Node, start: int = 0) -> None:
        """Put a finished tail at the cold end, but no node after which other text is resident on the host."""
        up: Node | None = node
        while up is not None and up not in self.tier.below:
            up = up.parent
        super().demote(node, start if up is None else max(start, up.end))

    def demote_host(self, path: list[HostNode], start: int) -> None:
        """Put a finished text at the cold end that ends at the leaf path[-1] on the host. `path` are its host nodes."""
        leaf = path[-1]
        for node in reversed(path):
            if node.start < start or len(node.children) != (node is not leaf) or (node is not leaf and node.hits):
                return
            self._listed_again(node, demoted=True)
        above = cast(Node, path[0].parent)
        if len(self.tier.below[above]) == 1 and not above.children and not above.hits:
            super().demote(above, start)

    def touch_host(self, path: list[HostNode]) -> None:
        """Make the run that ends at path[-1] the most recently used one, and take the path off the cold end."""
        for node in path:
            if node.demoted:
                self._listed_again(node, demoted=False)
        node = path[-1]
        listed = node.eviction_key is not None
        self.tier.remove_leaf(node)
        self.index.touch(node)
        if listed:
            self.tier.index.add(node)
        self._mark(node)

    def _listed_again(self, node: HostNode, *, demoted: bool) -> None:
        self.tier.remove_leaf(node)
        node.demoted = demoted
        self.tier.add_leaf(node)
        self._mark(node)

    def _mark(self, node: Node) -> None:
        if self.changed is not None:
            self.changed.mark(node)

    # ---- from the device to the host

    def trim(self, node: Node, most: int, now: float, pressure: Pressure) -> int:
        """Offload up to `most` blocks off the tail of an unlocked leaf. Returns the tokens that left the last tier.

        The host makes room by evicting leaves that are colder than `node`. The part that finds no room is evicted, and
        with it all host nodes after it. A node at the cold end is evicted, not offloaded. O(log leaves + tokens), and
        more for evictions.
        """
        tier = self.tier
        cut, lost = min(most, len(node.blocks)), 0
        if node.demoted:
            missing = cut
        else:
            while (missing := cut - self._images_below(node) - len(tier.free)) > 0:
                victim = tier.victim(node)
                if victim is None:
                    break
                lost += self._evict(victim, missing, now, pressure)
        if missing > 0:
            lost += self._evict_below(node, now, pressure)
            missing = cut if node.demoted else cut - len(tier.free)
            if missing > 0:
                lost += super().trim(node, missing, now, pressure)
                cut -= missing
        if cut:
            self._offload(node, cut, pressure)
        return lost

    def _images_below(self, node: Node) -> int:
        """Count the images of the last block that `node` need not write: 1 if its only host child starts inside it."""
        joins = node.end % self.tier.block_size and self._only_child(node) is not None
        return int(joins)

    def _only_child(self, node: Node) -> HostNode | None:
        """The host child that a run can be joined with."""
        children = self.tier.below.get(node)
        if children is None or len(children) > 1:
            return None
        (child,) = children.values()
        return None if child.demoted else child

    def _offload(self, node: Node, cut: int, pressure: Pressure) -> None:
        """Make the last `cut` blocks of an unlocked leaf host-resident; the tier has room for them."""
        tier, size = self.tier, self.pool.block_size
        keep = len(node.blocks) - cut
        start = (node.start // size + keep) * size if keep else node.start
        run, blocks = node.key[(start - node.start) * WIDTH :], node.blocks[keep:]
        tokens, child = len(run) // WIDTH, self._only_child(node)
        if child is not None and node.end % size:
            blocks.pop()  # the child has the image
        images = tier.take(len(blocks))
        tier.moves.update(zip(images, blocks, strict=True))
        host = self._new_host_node(node, start, run, images) if child is None else child
        _, part = reuse.split(node.reuse, start)
        host.reuse = reuse.join(part, node.end, host.reuse)
        if child is not None:
            del tier.below[node]
            tier.remove_leaf(child)
            child.key, child.blocks, child.start = joined(run, child.key), joined(images, child.blocks), start
            child.hits, child.priority = max(child.hits, node.hits), max(child.priority, node.priority)
        if node.tick >= host.tick:
            host.tick, host.used_at = node.tick, node.used_at
        if blocks:
            tier.planned[host] = pressure
        tier.add_leaf(host)
        host.parent = node if keep else node.parent
        tier.below.setdefault(cast(Node, host.parent), {})[bytes(host.key[:WIDTH])] = host
        self._shorten(node, keep, start)
        self._mark(host)
        if self.observer is not None:
            cast(TierObserver, self.observer).offloaded(node.id, host.id, start, tokens, len(blocks))

    def _new_host_node(self, node: Node, start: int, run: bytearray, images: array[int]) -> HostNode:
        """Make the host node of a run at the end of `node`; it takes over the host children."""
        children = cast("dict[bytes, Node]", self.tier.below.pop(node, NO_CHILDREN))
        host = HostNode(next(self._ids), None, start, run, images, node.ghost_owner, children)
        host.hits, host.priority, host.policy_data = node.hits, node.priority, node.policy_data
        host.born, host.born_at = node.born, node.born_at
        for child in children.values():
            child.parent = host
            self._mark(child)
        self.tier.count += 1
        return host

    def _shorten(self, node: Node, keep: int, start: int) -> None:
        """Drop the tokens from `start` on off a leaf, which keeps its first `keep` blocks, without a ghost."""
        free = len(self.pool.free)
        if keep:
            tokens, cut = node.end - start, node.blocks[keep:]
            del node.blocks[keep:]
            del node.key[(start - node.start) * WIDTH :]
            freed = self._free(node, cut)
            node.reuse, _ = reuse.split(node.reuse, start)
            node.ghost_owner = next(self._ids)
            self._mark(node)
            if self.observer is not None:
                self.observer.trimmed(node.id, tokens, freed, False)
        else:
            super().remove(node)
        self.freed_by_offload += len(self.pool.free) - free

    # ---- out of the host

    def drop_failed(self, now: float) -> tuple[int, int]:
        """Evict the drained nodes, whose moves failed, and all host nodes after them. Returns the tokens and blocks."""
        tier = self.tier
        before, lost = tier.evicted_blocks, 0
        while tier.drained:
            node, pressure = next(iter(tier.drained.items()))
            lost += self._evict_all([node, *self.descendants(node)], now, pressure)
        return lost, tier.evicted_blocks - before

    def forget_host(self) -> None:
        """Drop all host nodes, without ghosts. Counts as no eviction."""
        self._forget_all(list(self.tier.nodes()))

    def discard_host(self, node: HostNode, start: int) -> None:
        """Drop the tokens of a host node from `start` on, and all nodes after it, without ghosts."""
        self._forget_all(self.descendants(node))
        if start <= node.start:
            self._forget_all([node])
            return
        size = self.pool.block_size
        keep, tokens = -(-start // size) - node.start // size, node.end - start
        self.index.forget(node.policy_data, start)
        self.tier.give_back(node.blocks[keep:])
        freed = len(node.blocks) - keep
        del node.blocks[keep:]
        del node.key[(start - node.start) * WIDTH :]
        self.tier.note_cancelled(node)
        node.reuse, _ = reuse.split(node.reuse, start)
        node.ghost_owner = next(self._ids)
        self._mark(node)
        if self.observer is not None:
            self.observer.trimmed(node.id, tokens, freed, False)

    def remove(self, node: Node) -> int:
        """Take an unlocked leaf out of the tree, and all host nodes after it. Returns the blocks that this freed."""
        if node.residence == "host":
            return self._remove_host(cast(HostNode, node))
        self._forget_all(list(self.tier.nodes(node)))
        return super().remove(node)

    def _evict(self, node: HostNode, most: int, now: float, pressure: Pressure) -> int:
        """Evict up to `most` blocks off the tail of a host leaf, and add a ghost. Returns the tokens evicted."""
        self.tier.evicted_blocks += min(most, len(node.blocks))
        return super().trim(node, most, now, pressure)

    def _evict_below(self, node: Node, now: float, pressure: Pressure) -> int:
        return self._evict_all(list(self.tier.nodes(node)), now, pressure)

    def _evict_all(self, nodes: list[HostNode], now: float, pressure: Pressure) -> int:
        """Evict whole host nodes; the list has all their children, after them. Returns the tokens."""
        return sum(self._evict(each, len(each.blocks), now, pressure) for each in reversed(nodes))

    def _forget_all(self, nodes: list[HostNode]) -> None:
        for each in reversed(nodes):
            self.index.forget(each.policy_data, each.start)
            self._remove_host(each)

    def descendants(self, node: HostNode) -> list[HostNode]:
        """Return the nodes below a host node, each before its children."""
        return cast("list[HostNode]", list(self.walk(node))[1:])

    def _remove_host(self, node: HostNode) -> int:
        """Take a host leaf out of the tree. Returns its blocks."""
        tier, parent = self.tier, cast(Node, node.parent)
        first = bytes(node.key[:WIDTH])
        self._free_host_node(node)
        if parent.residence == "host":
            del parent.children[first]
            if not parent.children:
                tier.index.inherit(parent, node)
                tier.add_leaf(parent)
                self._mark(parent)
        else:
            del tier.below[parent][first]
            if not tier.below[parent]:
                del tier.below[parent]
                if parent.parent is None:
                    self._drop_if_empty(parent)
        return len(node.blocks)

    def _free_host_node(self, node: HostNode) -> None:
        """Give back the blocks of a host node that left the tree, or is about to."""
        tier = self.tier
        tier.remove_leaf(node)
        tier.planned.pop(node, None)
        tier.drained.pop(node, None)
        tier.give_back(node.blocks)
        tier.count -= 1
        if self.changed is not None:
            self.changed.gone(node)
        if self.observer is not None:
            self.observer.trimmed(node.id, len(node.key) // WIDTH, len(node.blocks), True)

    def _free(self, node: Node, blocks: array[int]) -> int:
        """Drop a node's ownership of blocks. Returns how many this freed."""
        if node.residence == "host":
            self.tier.give_back(blocks)
            return len(blocks)
        return super()._free(node, blocks)

    # ---- publishing

    def settle(self, node: Node, start: int, *, hit: bool) -> None:
        """Drop the host copies of the tokens from `start` on that were published up to the end of `node`.

        `hit` says that a request loaded them. O(depth of the new tokens), and O(their bytes) if they were on the host.
        """
        tier = self.tier
        children = tier.below.get(node)
        if children:
            at = next(iter(children.values())).start
            if at < node.end:  # a held leaf grew in place
                upper = self.split(node, at - node.start)
                upper.ghost_owner, node.ghost_owner = node.ghost_owner, upper.ghost_owner
                del tier.below[node]
                self._hang(children, upper)
                self._overlay(upper, node, hit)
            return
        while node.parent is not None and node.start >= start:
            above = node.parent
            if bytes(node.key[:WIDTH]) in tier.below.get(above, ()):
                self._overlay(above, node, hit)
                return
            node = above

    def _overlay(self, upper: Node, node: Node, hit: bool) -> None:
        """Drop the host tokens after `upper` that its child `node`, a leaf, has. Host nodes after them move to `node`.

        The node is split where other text branches off on the host.
        """
        tier, base, raw = self.tier, node.start, bytes(node.key)
        siblings = tier.below[upper]
        host: HostNode | None = siblings.pop(raw[:WIDTH], None)
        if not siblings:
            del tier.below[upper]
        at = 0
        while host is not None:
            matched = common_prefix(raw, at, host.key)
            at += matched
            node.hits, node.priority = max(node.hits, host.hits + hit), max(node.priority, host.priority)
            position = base + at // WIDTH
            found, _ = reuse.split(host.reuse, position)
            node.reuse = found if host.start == node.start else reuse.join(node.reuse, host.start, found)
            if matched < len(host.key):
                self._cut_head(host, matched)
                self._hang({bytes(host.key[:WIDTH]): host}, self._ending(node, position))
                break
            self._free_host_node(host)
            children = cast("dict[bytes, HostNode]", host.children)
            following = children.pop(raw[at : at + WIDTH], None) if children else None
            if children:
                above = self._ending(node, position)
                above.ghost_owner = host.ghost_owner
                self._hang(children, above)
            elif at == len(raw):
                node.ghost_owner = host.ghost_owner
            if at < len(raw):
                node.ghost_owner = self.ghosts.adopt(host.ghost_owner, position, raw[at:], node.ghost_owner)
            host = following
        self.merge(upper)

    def _ending(self, node: Node, position: int) -> Node:
        """Return the node that ends at `position`: a leaf, or its new upper half."""
        return node if position == node.end else self.split(node, position - node.start)

    def _hang(self, children: dict[bytes, HostNode], above: Node) -> None:
        """Let host nodes follow a device node."""
        self.tier.below[above] = children
        for child in children.values():
            child.parent = above
            self._mark(child)

    def _cut_head(self, node: HostNode, matched: int) -> None:
        """Drop the first `matched` bytes of a host node; an image in which later tokens lie stays whole."""
        tier, size = self.tier, self.pool.block_size
        start = node.start + matched // WIDTH
        _, node.reuse = reuse.split(node.reuse, start)
        whole = start // size - node.start // size
        tier.give_back(node.blocks[:whole])
        del node.blocks[:whole]
        del node.key[:matched]
        node.start = start
        tier.note_cancelled(node)
