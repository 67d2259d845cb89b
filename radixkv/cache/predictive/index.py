"""Eviction that learns: the leaf goes that is least worth its room, by how soon text of its kind was wanted again.

Knows leaves, their last uses and the clock. Knows no token and no block. Each use of a text is classed by what an open,
a close and its hint tell; how often each class was wanted at each age, also after it was evicted, makes its hazard. A
leaf's worth changes when its use reaches the next age bucket, which each does at most BUCKETS times, a few hundred uses
at one call: every operation is O(log leaves) amortised, and none waits for all of them. Plain LRU keeps its say: where
two leaves' worths are close, where there is little to gain, and wherever the one that learns did worse than LRU would
have, or risks to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from sortedcontainers import SortedList

from radixkv.cache.eviction import Entry, EvictionIndex
from radixkv.cache.predictive.access_records import KINDS, AccessRecord, Traits, next_bounds, size_class
from radixkv.cache.predictive.hazard_model import BUCKETS, EDGES, HazardModel
from radixkv.cache.predictive.lru_baseline import LruBaseline

MARGIN = 0.7  # another leaf must be worth less than this part of what LRU's choice is worth
MOVES = 256  # uses that come of age at one call
LOOKS = 4  # leaves whose worth is looked at anew for one victim

Parts = list[tuple[int, int, AccessRecord]]  # of a path, deepest first: start, end, last use
Seat = tuple[int, bool, float, int, Entry]


class PredictiveIndex(EvictionIndex):
    """The unlocked leaves by recency, as LRU has them, and by what they are worth."""

    __slots__ = ("_ages", "_block", "_by_worth", "_capacity", "_kinds", "_now", "_unknown", "baseline", "hazard_model")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__("predictive")
        self._block = block_size
        self._capacity = num_blocks
        self._now = 0.0
        self._kinds: dict[str | None, int] = {None: 0}
        self._ages: list[OrderedDict[AccessRecord, None]] = [
            OrderedDict() for _ in range(BUCKETS)
        ]  # by bucket, oldest first
        self._by_worth: SortedList = SortedList()
        self.hazard_model = HazardModel()
        self._unknown = self.hazard_model.classed(Traits(0, 0, 0, 0, 0, False))
        self.baseline = LruBaseline(num_blocks * block_size)

    def __iter__(self) -> Iterator[Entry]:
        """All leaves, those of least worth first."""
        return (worth_key[4] for worth_key in self._by_worth)

    @property
    def uses(self) -> int:
        """Uses that are remembered: at most twice the pool's blocks."""
        return sum(map(len, self._ages))

    # ---- leaves

    def inserted(self, node: Entry) -> None:
        """It became an unlocked leaf."""
        super().inserted(node)
        if node.use is None or not node.use.runs:  # published, but not by whoever closes here
            node.use = use = AccessRecord(self._now)
            use.settle(self._now, node.end, self._block, 0, 0, self.hazard_model.classed)
            use.start = node.start
            self.baseline.takes(use)
            self._enter(use, 0)
        node.use.leaf = node
        self._seat(node, self._worth(node))

    def removed(self, node: Entry) -> None:
        """It is no unlocked leaf any more."""
        super().removed(node)
        self._unseat(node)
        if node.use is not None and node.use.leaf is node:
            node.use.leaf = None

    def victim(self) -> Entry:
        """The leaf that goes next; the index must not be empty."""
        oldest = super().victim()
        if self.baseline.leads:
            node = self._least_recent([key[4] for key in islice(self._order, LOOKS)])
        else:
            node = self._by_worth[0][4]
            for _ in range(LOOKS):
                node = self._by_worth[0][4]
                if node is oldest or self._reseat(node):
                    break
            node = self._worth_less(node, oldest)
        if node is not oldest:
            self._coldest = None
        return node

    def next_victims(self, count: int) -> list[Entry]:
        """Return the next `count` leaves as `victim` would choose them, if nothing else changed meanwhile. O(count)."""
        by_recency, by_worth = (key[4] for key in self._order), (key[4] for key in self._by_worth)
        oldest: list[Entry] = []
        cheapest: list[Entry] = []
        victims: dict[Entry, None] = {}
        for _ in range(min(count, len(self))):
            oldest = _refilled(oldest, by_recency, victims)
            if self.baseline.leads:
                node = self._least_recent(oldest)
            else:
                cheapest = _refilled(cheapest, by_worth, victims)
                first = (cheapest[0].priority, cheapest[0].demoted)
                alike = [each for each in cheapest if (each.priority, each.demoted) == first]
                node = self._worth_less(min(alike, key=self._worth), oldest[0])
            victims[node] = None
        return list(victims)

    def _least_recent(self, oldest: list[Entry]) -> Entry:
        """LRU's choice among the least recent leaves; it passes over leaves that are expected back."""
        first = oldest[0]
        if self.baseline.overdrawn:
            return first
        for node in oldest:
            if (node.priority, node.demoted) != (first.priority, first.demoted):
                break
            if not self._awaited(node):
                return node
        return first

    def _worth_less(self, node: Entry, oldest: Entry) -> Entry:
        """`node` if it is worth clearly less than LRU's choice, else that."""
        return node if node is not oldest and self._worth(node) < MARGIN * self._worth(oldest) else oldest

    def room(self, node: Entry) -> int:
        """Blocks at its tail that are of one worth."""
        use, end = node.use, node.end
        tail = None if use is None else use.tail(end)
        start = node.start if tail is None else max(node.start, tail[0])
        return max(1, -(-end // self._block) - -(-start // self._block))

    def trimmed(self, node: Entry) -> None:
        """Its tail went: what is left may be of another worth."""
        if node.use is not None:
            self.baseline.evicted(node.use, node.start if node.eviction_key is None else node.end)
        if node.eviction_key is not None:
            self._reseat(node)

    # ---- uses

    def opened(
        self, path: Sequence[Entry], ghosts: Parts, asked: int, hit: int, now: float, *, learn: bool
    ) -> AccessRecord:
        """A request was opened at the end of `path` and found evicted parts behind. O(depth)."""
        now = self._advance(now)
        parts = ghosts[::-1]
        parts += [(node.start, node.end, node.use) for node in reversed(path) if node.use]
        if learn:
            known = min(asked, parts[0][1]) if parts else 0
            self.baseline.compare(asked, hit, min(asked, self.baseline.hit(parts, asked)), known)
        gap = 0
        if parts:
            last = parts[0][2]
            gap = 1 + size_class(now - last.time if last.runs else 0.0, 2, 10)
        bounds = next_bounds(parts)
        use = AccessRecord(now, bounds, size_class((asked - bounds[0]) / self._block), gap)
        for _, end, old in parts:
            self._take(old, end, learn)
        for node in path:
            node.use = use
        return use

    def closed(
        self,
        use: AccessRecord,
        path: Sequence[Entry],
        output: int,
        kind: str | None,
        returns_in: float | None,
        now: float,
    ) -> None:
        """A sequence was closed at the end of `path`, which it used last. O(depth)."""
        now = self._advance(now)
        if not path:
            return
        for node in reversed(path):
            old = node.use
            if old is not use:
                if old is not None:
                    self._take(old, node.end, learn=False)
                node.use = use
        use.settle(now, path[-1].end, self._block, size_class(output), self._kind(kind), self.hazard_model.classed)
        use.until = None if returns_in is None else now + returns_in
        self.baseline.takes(use)
        self.hazard_model.used()
        self._enter(use, 0)
        self._bound()

    def forgotten(self, use: AccessRecord | None, start: int) -> None:
        """Nobody can tell any more whether a use's text from `start` on is wanted."""
        if use is not None:
            use.end = max(use.start, min(use.end, start))
            if use.start == use.end:
                self._leave(use)

    def forget(self) -> None:
        """Whatever was used is as good as never used; what was learnt stays."""
        self.baseline.clear()
        for ages in self._ages:
            for use in ages:
                use.bucket, use.end = -1, use.start
            ages.clear()

    def _kind(self, kind: str | None) -> int:
        known = self._kinds
        if kind not in known and len(known) < KINDS:
            known[kind] = len(known)
        return known.get(kind, KINDS)

    def _take(self, old: AccessRecord, end: int, learn: bool) -> None:
        """What a use claims up to `end` was used by another."""
        if end <= old.start:
            return
        if learn and old.bucket >= 0:
            for reuse_class, tokens in old.split(old.start, end):
                self.hazard_model.want(reuse_class, old.bucket, tokens / self._block)
        self.baseline.loses_head(old, end)
        old.start = end
        if old.start >= old.end:
            old.end = old.start
            self._leave(old)

    # ---- ages

    def _advance(self, now: float) -> float:
        """Move the clock, which never goes back; returns its time. Uses go on to the bucket of their age, oldest first.

        At most `MOVES` of them: after an idle hour all of them are due, and nobody should wait for that.
        """
        self._now = now = max(now, self._now)
        moves = MOVES
        for bucket in range(BUCKETS - 2, -1, -1):  # from old to young, so that each bucket stays in the order of age
            ages, born = self._ages[bucket], now - EDGES[bucket + 1]
            while ages and (use := next(iter(ages))).time <= born:
                if not moves:
                    return now
                moves -= 1
                del ages[use]
                self._enter(use, max(bucket + 1, bisect_right(EDGES, now - use.time) - 1), bucket + 1)
        return now

    def _enter(self, use: AccessRecord, bucket: int, first: int | None = None) -> None:
        """Put a use into a bucket, after it went through those from `first` on."""
        if use.start >= use.end:
            use.bucket = -1
            return
        use.bucket = bucket
        self._ages[bucket][use] = None
        passed = (bucket,) if first is None else range(first, bucket + 1)
        at, end, reach = use.start, use.end, self.hazard_model.reach
        for cut, reuse_class in use.runs:  # as `split` does; this is the busiest loop of all
            if cut > at:
                blocks = (min(cut, end) - at) / self._block
                for age in passed:
                    reach(reuse_class, age, blocks)
                at = cut
                if cut >= end:
                    break
        if use.leaf is not None:
            self._reseat(use.leaf)  # type: ignore[arg-type]

    def _leave(self, use: AccessRecord) -> None:
        if use.bucket >= 0:
            del self._ages[use.bucket][use]
            use.bucket = -1

    def _bound(self) -> None:
        """Forget the oldest uses beyond twice as many as the pool has blocks."""
        if self.uses > 2 * self._capacity:
            ages = next(ages for ages in reversed(self._ages) if ages)
            self._leave(next(iter(ages)))

    # ---- worths

    def _awaited(self, node: Entry) -> bool:
        """Whether its user said that it returns, and may still come."""
        return node.use is not None and node.use.until is not None and node.use.until > self._now

    def _worth(self, node: Entry) -> float:
        use = node.use
        assert use is not None
        tail = use.tail(node.end)
        reuse_class = self._unknown if tail is None else tail[1]
        worth = self.hazard_model.worth(reuse_class, use.bucket if use.bucket > 0 else 0)
        if use.until is not None and use.until > self._now:
            return max(worth, 1.0 / (use.until - self._now))
        return worth

    def _seat(self, node: Entry, worth: float) -> None:
        node.worth_key = (node.priority, not node.demoted, worth, node.tick, node)
        self._by_worth.add(node.worth_key)

    def _unseat(self, node: Entry) -> None:
        self._by_worth.remove(node.worth_key)
        node.worth_key = None

    def _reseat(self, node: Entry) -> bool:
        """Look at its worth anew; whether it was the same."""
        assert node.worth_key is not None
        worth = self._worth(node)
        if node.worth_key[2] == worth:
            return True
        self._unseat(node)
        self._seat(node, worth)
        return False


def _refilled(window: list[Entry], rest: Iterator[Entry], taken: Container[Entry]) -> list[Entry]:
    """The first LOOKS leaves of an order that are not taken, of which `window` were seen before."""
    window = [node for node in window if node not in taken]
    fresh = (node for node in rest if node not in taken)
    return window + list(islice(fresh, LOOKS - len(window)))


def new_index(policy: str, num_blocks: int, block_size: int) -> EvictionIndex:
    """The index of a policy by its name, for a pool of that size; UnknownPolicy if there is none."""
    return PredictiveIndex(num_blocks, block_size) if policy == "predictive" else EvictionIndex(policy)
