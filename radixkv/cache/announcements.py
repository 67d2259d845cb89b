"""The text of waiting requests: the part of it that is cached is evicted last.

An announcement ends where the cached prefix of its text ends, in any tier. That may be inside a node, because a waiting
request splits nothing. Announcements follow the nodes as these change, and set `Node.announced`, which is a part of the
order of eviction. They are connected to the events only while there are some, so an empty queue costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from radixkv.cache.events import Events, Follower
from radixkv.cache.host.tier import HostTier
from radixkv.cache.namespaces import Namespace
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node


@dataclass(slots=True, eq=False, repr=False)
class Announcement:
    """A request that waits. The first `end` tokens of its text are cached, in any tier, in the nodes of `path`."""

    text: bytes
    space: Namespace
    close: Callable[[], None]  # lets the text be evicted like other text; a second call does nothing
    path: list[Node] = field(default_factory=list)
    end: int = 0


class Announcements(Follower):
    """The open announcements of one cache."""

    order = -1

    def __init__(self, tree: RadixTree, host: HostTier | None, events: Events) -> None:
        self._tree, self._host, self._events = tree, host, events
        self._open: dict[Announcement, None] = {}
        self._reaching: dict[Node, dict[Announcement, None]] = {}  # those that end in a node, or after it
        tree.text_owners.append(lambda: {each.space.number for each in self._open})

    def add(self, text: bytes, space: Namespace) -> Announcement:
        """Open an announcement of a text. Costs a match + O(depth + announcements that end in its nodes)."""
        if not self._open:
            self._events.connect(self)
        made = Announcement(text, space, lambda: self._close(made))
        self._open[made] = None
        self._put([made])
        return made

    def _close(self, announcement: Announcement) -> None:
        if announcement in self._open:
            del self._open[announcement]
            self._put([announcement])
            if not self._open:
                self._events.disconnect(self)

    # ---- places

    def _find(self, text: bytes, space: Namespace) -> tuple[list[Node], int]:
        """Return the nodes of any tier that have the cached prefix of a text, and its length."""
        node, at = self._tree.find_root(space), 0
        if node is None:
            return [], 0
        node, at = self._tree.match(node, text)
        if node.below and at == node.end * WIDTH and self._host is not None:
            for each, tokens in self._host.follow(node, text, at, pending=True):
                node, at = each, at + tokens * WIDTH
        return self._tree.path(node), at // WIDTH

    def _put(self, announcements: Iterable[Announcement]) -> None:
        """Match the texts of announcements again, and record where they end; closed ones end nowhere."""
        changed: dict[Node, None] = {}
        for each in list(announcements):
            before = each.path
            each.path, each.end = self._find(each.text, each.space) if each in self._open else ([], 0)
            for node in before:
                del self._reaching[node][each]
            for node in each.path:
                self._reaching.setdefault(node, {})[each] = None
            changed |= dict.fromkeys([*before, *each.path])
        for node in changed:
            self._update(node)

    def _update(self, node: Node) -> None:
        """Set how far a node is announced, and move it in the order of eviction."""
        if not self._reaching[node]:
            del self._reaching[node]
        node.announced, key = self._announced(node), node.eviction_key
        if key is not None and key[1] != node.standing:
            index = self._tree.index if self._host is None or node.residence == "device" else self._host.index
            index.remove(node)
            index.add(node)

    def _announced(self, node: Node) -> int:
        """Return the end of the last announced block of a node, at most the end of the node; 0 for none."""
        end, size, reaching = node.end, self._tree.pool.block_size, self._reaching.get(node, ())
        if any(each.end >= end for each in reaching):  # most of a shared prefix: seldom looks at more than one
            return end
        return min(end, -(-max((each.end for each in reaching), default=0) // size) * size)

    def _after(self, node: Node) -> Iterable[Announcement]:
        """Return the announcements that reach into a node; for a root, all of its namespace."""
        of_root = (each for each in self._open if each.space is node.namespace)
        return self._reaching.get(node, ()) if node.namespace is None else of_root

    # ---- as nodes change

    def receivers(self) -> dict[str, Callable[..., None]]:
        """Return the methods to call; most changes of a node have one method."""
        changed = dict.fromkeys(("split", "cut", "removed", "moved", "settled"), self._change)
        joined = {"joined": lambda node, upper: self._change(upper)}
        return super().receivers() | changed | joined | {"arrived": self.appended}

    def _change(self, node: Node, *facts: object) -> None:
        self._put(self._after(node))

    def appended(self, node: Node) -> None:
        """Extend announcements into a new leaf of any tier."""
        assert node.parent is not None
        self._extend(self._after(node.parent), node, node.start)

    def grown(self, node: Node, tokens: int) -> None:
        """Extend announcements into the new tokens of a leaf."""
        if node in self._reaching:
            self._extend(self._after(node), node, node.end - tokens)
            self._update(node)

    def _extend(self, announcements: Iterable[Announcement], node: Node, start: int) -> None:
        first = node.key[(start - node.start) * WIDTH :][:WIDTH]
        self._put(each for each in announcements if each.end == start and each.text.startswith(first, start * WIDTH))

    def check(self) -> None:
        """Match all announcements again. AssertionError names the broken invariant. O(nodes + tokens)."""
        reaching: dict[Node, dict[Announcement, None]] = {}
        for each in self._open:
            found = self._find(each.text, each.space)
            assert (each.path, each.end) == found, f"an announcement ends at {each.end}, its cached prefix at {found}"
            for node in each.path:
                reaching.setdefault(node, {})[each] = None
        assert reaching == self._reaching, "the announcements of nodes differ from a recount"
        for node in self._tree.residents():
            announced = self._announced(node)
            assert node.announced == announced, f"node {node.id} is announced to {node.announced}, not to {announced}"
