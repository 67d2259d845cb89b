"""The events of a cache: those of its own followers, and those of a caller's observer.

The tree and the sequences send each event once. Followers receive it in a fixed order: the snapshots of recurrent
state, the change log, the observer. Pool, index and nodes are consistent by then; only `covered` and `leaving`
precede their change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import ClassVar, Protocol

from radixkv.cache.ghosts import Ghost
from radixkv.cache.types import Node, OpenSequence, Pressure, Purpose

_log = logging.getLogger("radixkv.cache.observer")  # the name that the docs give


class Observer(Protocol):
    """Receives events synchronously, after each change, as plain numbers; node ids are never used twice.

    It must not call the cache. An observer that raises is named in the log and receives no further events.
    """

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        """A sequence was opened: `hit` of `asked` tokens were cached; only a "request" counts in the stats."""

    def forked(self, sequence: int, parent: int) -> None:
        """A sequence was forked off another."""

    def closed(self, sequence: int, length: int) -> None:
        """A sequence of `length` committed tokens was closed."""

    def rooted(self, node: int, namespace: Hashable) -> None:
        """A namespace got its root."""

    def uprooted(self, node: int) -> None:
        """A root without children and holders was removed."""

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        """A node was published that covers tokens [start, start + tokens) below `parent`."""

    def grown(self, node: int, tokens: int) -> None:
        """The node's end moved down by `tokens`."""

    def split(self, node: int, upper: int, tokens: int) -> None:
        """The first `tokens` of the node became a new node above it."""

    def merged(self, node: int, upper: int) -> None:
        """The node took over the tokens of `upper`, which is gone."""

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        """The last `tokens` of the node were removed, which freed `blocks`; `gone` if the whole node was removed."""

    def evicted(
        self,
        number: int,
        node: int,
        start: int,
        tokens: int,
        blocks: int,
        gone: bool,
        idle: float,
        hits: int,
        pressure: Pressure,
    ) -> None:
        """As `trimmed`, to make room: `pressure` is the cause, and `number` counts evictions from 1 on.

        The run began at token `start`. Its node was last used `idle` seconds before, and was hit `hits` times.
        """

    def regretted(self, number: int, tokens: int, ago: float) -> None:
        """A "request" asked for `tokens` that eviction `number` had dropped `ago` seconds before."""

    def copied(self, sequence: int, source: int, target: int) -> None:
        """A plan of the sequence copies one block before it writes."""


class TierObserver(Observer, Protocol):
    """Receives the events of a cache with a host tier too. Observers without these methods do not receive them."""

    def offloaded(self, node: int, host_node: int, start: int, tokens: int, blocks: int) -> None:
        """The last `tokens` of a node, from token `start` on, are host-resident after the next step.

        They are the first tokens of `host_node` now, and a step must copy `blocks` of its blocks. A `trimmed` event of
        the node comes first.
        """

    def loaded(self, sequence: int, tokens: int) -> None:
        """A sequence has committed `tokens` that it loaded from the host."""

    def arrived(self, host_node: int, start: int, tokens: int) -> None:
        """A new host node has `tokens` from token `start` on, which were read from a disk."""


class Follower:
    """Is notified of changes by the methods that it overrides; the others cost nothing. It must not call the cache."""

    order: ClassVar[int] = 0  # followers of lower order are notified first

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has the first part of `node`, which keeps its end, its holders and the host nodes after it."""

    def joined(self, node: Node, upper: Node) -> None:
        """`node` has the tokens of both; `upper` is gone."""

    def appended(self, node: Node) -> None:
        """A leaf was published."""

    def grown(self, node: Node, tokens: int) -> None:
        """The end of a leaf moved down by `tokens`."""

    def cut(self, node: Node, tokens: int, blocks: int) -> None:
        """The last `tokens` of a leaf left their last tier, which freed `blocks`."""

    def removed(self, node: Node, blocks: int) -> None:
        """A leaf left the tree and its last tier, which freed `blocks`."""

    def moved(self, node: Node, host: Node, start: int, tokens: int, freed: int, images: int, gone: bool) -> None:
        """`tokens` from `start` on left the device: the tail of `node`, or all of it (`gone`), which freed blocks.

        They are the first tokens of `host` now, and `images` of its blocks are to be written.
        """

    def arrived(self, node: Node) -> None:
        """A host leaf was made of images that arrived from elsewhere."""

    def leaving(self, node: Node, blocks: int) -> None:
        """The last blocks of a leaf, or all, leave the last tier in memory next."""

    def covered(self, host: Node, node: Node, end: int) -> None:
        """The tokens of `host` up to `end` are on the device, on the path to `node`; they leave the host next."""

    def settled(self, node: Node) -> None:
        """A move of text after `node` from the host to the device is complete."""

    def marked(self, node: Node) -> None:
        """Locks, blocks, hits or demotion of a node changed, and no other event says so."""

    def rooted(self, root: Node) -> None:
        """A namespace got its root."""

    def uprooted(self, root: Node) -> None:
        """A root without children and holders was removed."""

    def opened(self, sequence: OpenSequence, path: list[Node]) -> None:
        """A sequence was opened at the end of a path."""

    def forked(self, sequence: OpenSequence, parent: OpenSequence) -> None:
        """A sequence was forked off another."""

    def closed(self, sequence: OpenSequence) -> None:
        """A sequence was closed."""

    def copied(self, sequence: OpenSequence, source: int, target: int) -> None:
        """A plan of the sequence copies one block before it writes."""

    def loaded(self, sequence: OpenSequence, start: int, tokens: int, path: list[Node]) -> None:
        """A sequence has committed a load: it found its text from `start` on, and copied the last `tokens` of it.

        `path` leads to them if they are published, and is empty if not.
        """

    def evicted(
        self, number: int, node: Node, start: int, tokens: int, blocks: int, gone: bool, now: float, pressure: Pressure
    ) -> None:
        """As `cut` or `removed`, which came before, to make room; `number` counts evictions from 1 on."""

    def regretted(self, ghost: Ghost, tokens: int, ago: float) -> None:
        """A request asked for `tokens` of an evicted run."""

    def receivers(self) -> dict[str, Callable[..., None]]:
        """Return the methods to call, by event: those that the class overrides."""
        return {
            name: getattr(self, name) for name in EVENTS if getattr(type(self), name) is not getattr(Follower, name)
        }


EVENTS = tuple(name for name in vars(Follower) if name not in ("order", "receivers") and not name.startswith("_"))


class Events:
    """The methods to call for each event, in the order of the followers: `for call in events.split: call(...)`.

    An event without receivers costs an empty loop. A loop over nodes reads its tuple once, before it begins.
    """

    __slots__ = ("_followers", *EVENTS)

    split: tuple[Callable[[Node, Node], None], ...]
    joined: tuple[Callable[[Node, Node], None], ...]
    appended: tuple[Callable[[Node], None], ...]
    grown: tuple[Callable[[Node, int], None], ...]
    cut: tuple[Callable[[Node, int, int], None], ...]
    removed: tuple[Callable[[Node, int], None], ...]
    moved: tuple[Callable[[Node, Node, int, int, int, int, bool], None], ...]
    arrived: tuple[Callable[[Node], None], ...]
    leaving: tuple[Callable[[Node, int], None], ...]
    covered: tuple[Callable[[Node, Node, int], None], ...]
    settled: tuple[Callable[[Node], None], ...]
    marked: tuple[Callable[[Node], None], ...]
    rooted: tuple[Callable[[Node], None], ...]
    uprooted: tuple[Callable[[Node], None], ...]
    opened: tuple[Callable[[OpenSequence, list[Node]], None], ...]
    forked: tuple[Callable[[OpenSequence, OpenSequence], None], ...]
    closed: tuple[Callable[[OpenSequence], None], ...]
    copied: tuple[Callable[[OpenSequence, int, int], None], ...]
    loaded: tuple[Callable[[OpenSequence, int, int, list[Node]], None], ...]
    evicted: tuple[Callable[[int, Node, int, int, int, bool, float, Pressure], None], ...]
    regretted: tuple[Callable[[Ghost, int, float], None], ...]

    def __init__(self) -> None:
        self._followers: list[Follower] = []
        self._collect()

    def connect(self, follower: Follower) -> None:
        """Notify a follower from now on, in place of another one of its order."""
        self._followers = [each for each in self._followers if each.order != follower.order] + [follower]
        self._followers.sort(key=lambda each: each.order)
        self._collect()

    def disconnect(self, follower: Follower) -> None:
        """Notify a follower no more, if it was connected."""
        self._followers = [each for each in self._followers if each is not follower]
        self._collect()

    def _collect(self) -> None:
        found = [each.receivers() for each in self._followers]
        for name in EVENTS:
            setattr(self, name, tuple(each[name] for each in found if name in each))


def ignore(*facts: object) -> None:
    """Stand in for the methods of events that an observer does not need: the cache does not send these at all."""


_SENT_AS = {"joined": ("merged",), "appended": ("inserted",), "cut": ("trimmed",), "removed": ("trimmed",)}
"""The methods of an observer that an event calls, where their names differ."""


_OF_TIERS = ("offloaded", "loaded", "arrived")


class ObserverFollower(Follower):
    """Passes events on to a caller's observer as plain numbers, until it raises: that is logged, and ends it."""

    order = 2

    def __init__(self, observer: Observer, events: Events) -> None:
        """Connect the observer, in place of an earlier one."""
        self._observer = observer
        self._tier = {name: getattr(observer, name, ignore) for name in _OF_TIERS}  # a TierObserver's
        self._events = events
        events.connect(self)

    def receivers(self) -> dict[str, Callable[..., None]]:
        """Return the methods of the events that the observer does not ignore."""
        found = super().receivers()
        for name in ("loaded", "arrived"):
            if self._tier[name] is ignore:
                del found[name]
        wanted = {name for name in vars(Observer) if getattr(self._observer, name, None) is not ignore}
        sent = {name: _SENT_AS.get(name, (name,)) for name in found if name not in ("moved", "loaded", "arrived")}
        return {name: call for name, call in found.items() if name not in sent or wanted.intersection(sent[name])}

    def _fail(self, event: str) -> None:
        self._events.disconnect(self)
        _log.exception("the cache's observer failed at %r: it receives no more events", event)

    def opened(self, sequence: OpenSequence, path: list[Node]) -> None:
        """Pass on `opened`."""
        try:
            self._observer.opened(
                sequence.id, sequence.namespace, sequence.asked, sequence.cached_length, sequence.purpose
            )
        except Exception:
            self._fail("opened")

    def forked(self, sequence: OpenSequence, parent: OpenSequence) -> None:
        """Pass on `forked`."""
        try:
            self._observer.forked(sequence.id, parent.id)
        except Exception:
            self._fail("forked")

    def closed(self, sequence: OpenSequence) -> None:
        """Pass on `closed`."""
        try:
            self._observer.closed(sequence.id, sequence.length)
        except Exception:
            self._fail("closed")

    def rooted(self, root: Node) -> None:
        """Pass on `rooted`."""
        try:
            assert root.namespace is not None
            self._observer.rooted(root.id, root.namespace.value)
        except Exception:
            self._fail("rooted")

    def uprooted(self, root: Node) -> None:
        """Pass on `uprooted`."""
        try:
            self._observer.uprooted(root.id)
        except Exception:
            self._fail("uprooted")

    def appended(self, node: Node) -> None:
        """Pass on `inserted`."""
        try:
            assert node.parent is not None
            self._observer.inserted(node.id, node.parent.id, node.start, node.end - node.start)
        except Exception:
            self._fail("inserted")

    def grown(self, node: Node, tokens: int) -> None:
        """Pass on `grown`."""
        try:
            self._observer.grown(node.id, tokens)
        except Exception:
            self._fail("grown")

    def split(self, node: Node, upper: Node) -> None:
        """Pass on `split`."""
        try:
            self._observer.split(node.id, upper.id, upper.end - upper.start)
        except Exception:
            self._fail("split")

    def joined(self, node: Node, upper: Node) -> None:
        """Pass on `merged`."""
        try:
            self._observer.merged(node.id, upper.id)
        except Exception:
            self._fail("merged")

    def cut(self, node: Node, tokens: int, blocks: int) -> None:
        """Pass on `trimmed`."""
        try:
            self._observer.trimmed(node.id, tokens, blocks, False)
        except Exception:
            self._fail("trimmed")

    def removed(self, node: Node, blocks: int) -> None:
        """Pass on `trimmed`."""
        try:
            self._observer.trimmed(node.id, node.end - node.start, blocks, True)
        except Exception:
            self._fail("trimmed")

    def regretted(self, ghost: Ghost, tokens: int, ago: float) -> None:
        """Pass on `regretted`."""
        try:
            self._observer.regretted(ghost.eviction, tokens, ago)
        except Exception:
            self._fail("regretted")

    def copied(self, sequence: OpenSequence, source: int, target: int) -> None:
        """Pass on `copied`."""
        try:
            self._observer.copied(sequence.id, source, target)
        except Exception:
            self._fail("copied")

    def moved(self, node: Node, host: Node, start: int, tokens: int, freed: int, images: int, gone: bool) -> None:
        """Pass on `trimmed`, then `offloaded`."""
        try:
            self._observer.trimmed(node.id, tokens, freed, gone)
            self._tier["offloaded"](node.id, host.id, start, tokens, images)
        except Exception:
            self._fail("offloaded")

    def loaded(self, sequence: OpenSequence, start: int, tokens: int, path: list[Node]) -> None:
        """Pass on `loaded`."""
        try:
            self._tier["loaded"](sequence.id, tokens)
        except Exception:
            self._fail("loaded")

    def arrived(self, node: Node) -> None:
        """Pass on `arrived`."""
        try:
            self._tier["arrived"](node.id, node.start, node.end - node.start)
        except Exception:
            self._fail("arrived")

    def evicted(
        self, number: int, node: Node, start: int, tokens: int, blocks: int, gone: bool, now: float, pressure: Pressure
    ) -> None:
        """Pass on `evicted`."""
        idle = max(0.0, now - node.used_at)
        try:
            self._observer.evicted(number, node.id, start, tokens, blocks, gone, idle, node.hits, pressure)
        except Exception:
            self._fail("evicted")
