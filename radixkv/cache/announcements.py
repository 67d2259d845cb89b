"""The text of waiting requests: the part of it that is cached is evicted last.

An announcement ends where the cached prefix of its text ends, in any tier. That may be inside a node, because a waiting
request splits nothing. Announcements follow the nodes as these change, and set `Node.announced`, which is a part of the
order of eviction. They are connected to the events only while there are some, so an empty queue costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from radixkv.cache.events import Events, Follower
from radixkv.cache.host.tier import HostTier
from radixkv.cache.namespaces import Namespace
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import Node

Place = Node | Namespace
"""Where an announcement ends: a node; the namespace if nothing is cached, as the root comes and goes."""


@dataclass(slots=True, eq=False)
class Announcement:
    """A request that waits. The first `end` tokens of its text are cached, in any tier."""

    text: bytes
    place: Place
    announcements: Announcements
    end: int = 0

    def close(self) -> None:
        """Let the text be evicted as others are. Later calls do nothing. O(depth)."""
        self.announcements.remove(self)


class Announcements(Follower):
    """The open announcements of one cache."""

    order = -1

    def __init__(self, tree: RadixTree, host: HostTier | None, events: Events) -> None:
        self._tree, self._host, self._events = tree, host, events
        self._spaces: dict[Announcement, Namespace] = {}  # of all that are open
        self._ending: dict[Place, list[Announcement]] = {}
        self._reaching: dict[Node, int] = {}  # announcements that end in a node, or after it
        self._unsettled: list[Announcement] = []  # end nowhere while their text moves to the device
        tree.text_owners.append(lambda: {space.number for space in self._spaces.values()})

    def __len__(self) -> int:
        return len(self._spaces)

    def add(self, text: bytes, space: Namespace) -> Announcement:
        """Open an announcement of a text. Costs a match + O(depth)."""
        if not self._spaces:
            self._events.connect(self)
        made = Announcement(text, space, self)
        self._spaces[made] = space
        self._settle(made)
        return made

    def remove(self, announcement: Announcement) -> None:
        """Close an announcement, if it is open. O(depth)."""
        if self._spaces.pop(announcement, None) is not None:
            self._take_off(announcement)
            if not self._spaces:
                self._events.disconnect(self)

    # ---- places

    def _find(self, text: bytes, space: Namespace) -> tuple[Place, int]:
        """Return the node in which the cached prefix of a text ends, in any tier, and its length."""
        root = self._tree.find_root(space)
        if root is None:
            return space, 0
        node, at = self._tree.match(root, text)
        if node.below and at == node.end * WIDTH and self._host is not None:
            for each, tokens in self._host.follow(node, text, at, pending=True):
                node, at = each, at + tokens * WIDTH
        return _place(node), at // WIDTH

    def _settle(self, announcement: Announcement) -> None:
        """Put an announcement where the cached prefix of its text ends."""
        place, announcement.end = self._find(announcement.text, self._spaces[announcement])
        self._file(place, [announcement])
        self._count(place, 1)

    def _take_off(self, announcement: Announcement) -> None:
        place = announcement.place
        here = self._ending[place]
        here.remove(announcement)
        if not here:
            del self._ending[place]
        self._count(place, -1)

    def _file(self, place: Place, announcements: Iterable[Announcement]) -> None:
        """Let announcements end at a place, in addition to others."""
        for each in announcements:
            each.place = place
            self._ending.setdefault(place, []).append(each)

    def _count(self, place: Place, by: int) -> None:
        """Count an announcement on the path to its place. O(depth)."""
        while isinstance(place, Node) and place.parent is not None:
            self._reach(place, self._reaching.get(place, 0) + by)
            place = place.parent

    def _reach(self, node: Node, count: int) -> None:
        """Let `count` announcements end in a node or after it, and update its place in the order of eviction."""
        if count:
            self._reaching[node] = count
        else:
            self._reaching.pop(node, None)
        node.announced = self._announced(node, count)
        key = node.eviction_key
        if key is not None and key[1] != node.standing:
            index = self._host.index if node.residence == "host" and self._host is not None else self._tree.index
            index.remove(node)
            index.add(node)

    def _announced(self, node: Node, count: int) -> int:
        """Return the end of the last block of a node that has announced tokens; at most the end of the node."""
        here, size = self._ending.get(node, ()), self._tree.pool.block_size
        end = node.end
        return end if count > len(here) else min(end, -(-max((each.end for each in here), default=0) // size) * size)

    def _extend(self, node: Node, start: int) -> None:
        """Let announcements that ended at `start` go on into the tokens that a leaf has from there."""
        place = _place(node) if start > node.start else _place(node.parent)
        new = node.key[(start - node.start) * WIDTH :]
        for each in list(self._ending.get(place, ())):
            matched = common_prefix(each.text, start * WIDTH, new) // WIDTH if each.end == start else 0
            if matched:
                self._take_off(each)
                each.end += matched
                self._file(node, [each])
                self._count(node, 1)

    # ---- as nodes change

    def split(self, node: Node, upper: Node) -> None:
        """Move the announcements that end in the upper half."""
        if node in self._reaching:
            count, found = self._reaching[node], self._ending.pop(node, [])
            self._file(upper, [each for each in found if each.end <= upper.end])
            self._file(node, [each for each in found if each.end > upper.end])
            self._reach(upper, count)
            self._reach(node, count - len(self._ending.get(upper, ())))

    def joined(self, node: Node, upper: Node) -> None:
        """Move the announcements that ended in `upper`."""
        if upper in self._reaching:
            self._file(node, self._ending.pop(upper, []))
            self._reach(node, self._reaching.pop(upper))

    def appended(self, node: Node) -> None:
        """Let announcements go on into a new leaf."""
        self._extend(node, node.start)

    def arrived(self, node: Node) -> None:
        """Let announcements go on into a new host leaf."""
        self._extend(node, node.start)

    def grown(self, node: Node, tokens: int) -> None:
        """Let announcements go on into the new tokens."""
        if node in self._reaching:
            for child in node.below.values():
                self._unsettle(child)
            self._extend(node, node.end - tokens)
            self._reach(node, self._reaching.get(node, 0))

    def cut(self, node: Node, tokens: int, blocks: int) -> None:
        """Let announcements end with the node."""
        if node in self._reaching:
            for each in self._ending[node]:
                each.end = min(each.end, node.end)
            self._reach(node, self._reaching[node])

    def removed(self, node: Node, blocks: int) -> None:
        """Let announcements end with the parent of the node."""
        if self._reaching.pop(node, 0):
            found = self._ending.pop(node)
            for each in found:
                each.end = node.start
            self._file(_place(node.parent), found)

    def moved(self, node: Node, host: Node, start: int, tokens: int, freed: int, images: int, gone: bool) -> None:
        """Let announcements that ended after `start` end in the host node."""
        count, found = self._reaching.pop(node, 0), self._ending.pop(node, [])
        if count:
            self._file(host, [each for each in found if each.end > start])
            self._file(node, [each for each in found if each.end <= start])
            self._reach(host, count - len(self._ending.get(node, ())))
            self._reach(node, 0 if gone else count)

    def covered(self, host: Node, node: Node, end: int) -> None:
        """Take the announcements off that reach into a host node, until its text is settled."""
        self._unsettle(host)

    def settled(self, node: Node) -> None:
        """Put these announcements where their text is now."""
        unsettled, self._unsettled = self._unsettled, []
        for each in unsettled:
            self._settle(each)

    def _unsettle(self, host: Node) -> None:
        """Take off all announcements that end in a host node or after it."""
        nodes = self._tree.walk(host) if host in self._reaching else ()
        for each in [each for node in nodes for each in self._ending.get(node, ())]:
            self._take_off(each)
            self._unsettled.append(each)

    # ---- tests

    def check(self) -> None:
        """Recount all places and counts. AssertionError names the broken invariant. O(nodes + tokens)."""
        assert not self._unsettled, "an announcement ends nowhere"
        ending: dict[Place, set[Announcement]] = {}
        reaching: Counter[Node] = Counter()
        for each, space in self._spaces.items():
            found = self._find(each.text, space)
            assert (each.place, each.end) == found, f"an announcement ends at {each.end}, its cached prefix at {found}"
            ending.setdefault(each.place, set()).add(each)
            reaching.update(self._path(each.place))
        assert ending == {place: set(here) for place, here in self._ending.items()}, "announcements end elsewhere"
        assert reaching == self._reaching, "announcements reach into other nodes than recounted"
        for node in self._tree.residents():
            announced = self._announced(node, reaching[node])
            assert node.announced == announced, f"node {node.id} is announced to {node.announced}, not to {announced}"

    def _path(self, place: Place) -> Iterator[Node]:
        return iter(self._tree.path(place) if isinstance(place, Node) else ())


def _place(node: Node | None) -> Place:
    """Return where an announcement is filed that ends at the end of a node or root."""
    assert node is not None
    return node if node.namespace is None else node.namespace
