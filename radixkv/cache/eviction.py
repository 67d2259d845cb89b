"""Which leaf goes next: policies as data behind one small interface.

Knows unlocked leaves and a few numbers on each. Knows no token and no block. The index is a persistent sorted list:
choosing a victim scans nothing and rebuilds nothing; every operation is O(log leaves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from sortedcontainers import SortedList

from radixkv.errors import UnknownPolicy

if TYPE_CHECKING:
    from radixkv.cache.predictive.access_records import AccessRecord


class Entry(Protocol):
    """What a policy may read (and, for recency and hits, write) of a tree node."""

    tick: int  # when it was last touched, on a clock that ticks with each touch
    used_at: float  # the same in seconds, if the index was given a clock
    born: int  # the tick at which it was inserted
    hits: int  # how many opens ended here
    priority: int  # higher stays longer
    demoted: bool  # its user said that it is done
    eviction_key: tuple[int, bool, int, int, Entry] | None  # its key in the index while it is there
    worth_key: (
        tuple[int, bool, float, int, Entry] | None
    )  # its key by worth while it is there, for a policy that learns
    use: AccessRecord | None  # which use of its text was the last, for a policy that learns
    start: int  # the position of its first token

    @property
    def end(self) -> int:
        """The position behind its last token."""


Rank = Callable[[Entry], int]


def _by_recency(node: Entry) -> int:
    return 0


# Lower goes first; equal ranks go by recency.
POLICIES: dict[str, Rank] = {
    "lru": _by_recency,
    "fifo": lambda node: node.born,
    "lfu": lambda node: node.hits,
    # Two segments, as SGLang's: protected after the second hit, least recent first within each.
    "slru": lambda node: int(node.hits >= 2),
    # Recency is its second opinion: see `predictive`.
    "predictive": _by_recency,
}


class EvictionIndex:
    """The unlocked leaves, coldest first, by (priority, demoted first, the policy's rank, recency)."""

    __slots__ = ("_coldest", "_order", "_rank", "_tick", "clock", "policy")

    def __init__(self, policy: str) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise UnknownPolicy(f"eviction={policy!r}: allowed are {', '.join(sorted(POLICIES))}")
        self.policy = policy
        self.clock: Callable[[], float] | None = None  # only for whoever watches: no policy asks
        self._rank: Rank | None = None if POLICIES[policy] is _by_recency else POLICIES[policy]
        self._order: SortedList = SortedList()
        self._tick = 0
        self._coldest: Entry | None = None  # the first of the order, if `victim` was asked since the last insertion

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        """All leaves, next victim first."""
        return (eviction_key[4] for eviction_key in self._order)

    def at(self, eviction_key: int) -> Entry:
        """The leaf that has so many before it in the order. O(log leaves)."""
        node: Entry = self._order[eviction_key][4]
        return node

    def touched(self, node: Entry) -> None:
        """It was used now. The node must not be in the index (it is held, or about to enter)."""
        self._tick += 1
        node.tick = self._tick
        if self.clock is not None:
            node.used_at = self.clock()

    def dated(self, node: Entry) -> None:
        """Note the time of a touch, or of a birth, if there is a clock; no policy asks for it."""
        if self.clock is not None:
            node.used_at = self.clock()

    def inserted(self, node: Entry) -> None:
        """It became an unlocked leaf."""
        rank = 0 if self._rank is None else self._rank(node)
        node.eviction_key = (node.priority, not node.demoted, rank, node.tick, node)
        self._coldest = None
        self._order.add(node.eviction_key)

    def removed(self, node: Entry) -> None:
        """It is no unlocked leaf any more."""
        if node is self._coldest:  # named by `victim` just now: no bisection
            self._coldest = None
            self._order.pop(0)
        else:
            self._order.remove(node.eviction_key)
        node.eviction_key = None

    def inherited(self, parent: Entry, child: Entry) -> None:
        """`child` leaves the tree and `parent` becomes a leaf: what kept the child kept the parent too."""
        if child.tick > parent.tick:
            parent.tick, parent.used_at = child.tick, child.used_at
        parent.hits += child.hits

    def next_victims(self, count: int) -> list[Entry]:
        """Return the next `count` leaves in the order of eviction, fewer if there are fewer. O(count)."""
        return [key[4] for key in islice(self._order, count)]

    def victim(self) -> Entry:
        """The leaf that goes next; the index must not be empty."""
        node: Entry = next(iter(self._order))[4]
        self._coldest = node
        return node
