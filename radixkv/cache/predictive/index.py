"""The eviction index that learns: it evicts the leaf of least worth, by how soon similar text was used again.

The facts that `open`, `close` and hints give put each access in reuse classes. The hazard model of these classes counts
reuses at each age, also after an eviction. A leaf's worth changes when its access reaches the next age bucket. Each
access does that at most BUCKETS times, and one call moves at most a few hundred of them: every operation is
O(log leaves) amortised. Plain LRU decides where two leaves' worths are close, where there is little to gain, and where
the learner has lost too much against LRU or may do so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from itertools import islice, pairwise
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.predictive.access_records import KINDS, AccessRecord, Part, next_bounds, size_class
from radixkv.cache.predictive.hazard_model import BUCKETS, EDGES, HazardModel, Traits
from radixkv.cache.predictive.lru_baseline import LruBaseline
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Hint, Node

MARGIN = 0.7  # another leaf must be worth less than this part of the worth of LRU's choice
MOVES = 256  # access records that change their age bucket at one call
LOOKS = 4  # leaves whose worth is computed again for one victim


class PredictiveIndex(EvictionIndex):
    """The unlocked leaves by recency, as plain LRU has them, and by worth. A node's policy_data is its last access."""

    __slots__ = (
        "_ages",
        "_block",
        "_by_worth",
        "_capacity",
        "_kinds",
        "_now",
        "_time",
        "_unknown",
        "baseline",
        "hazard_model",
    )

    remembers_faded = True

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._block = block_size
        self._capacity = num_blocks
        self._time = clock
        self._now = 0.0
        self._kinds: dict[str | None, int] = {None: 0}
        self._ages: list[OrderedDict[AccessRecord, None]] = [OrderedDict() for _ in range(BUCKETS)]  # oldest first
        self._by_worth: SortedList = SortedList()  # of WorthKey
        self.hazard_model = HazardModel()
        self._unknown = self.hazard_model.classed(Traits(0, 0, 0, 0, 0, False))
        self.baseline = LruBaseline(num_blocks * block_size)

    @property
    def records(self) -> int:
        """Access records that are kept: at most twice the pool's blocks."""
        return sum(map(len, self._ages))

    # ---- leaves

    def add(self, node: Node) -> None:
        """Insert a node that became an unlocked leaf."""
        super().add(node)
        record: AccessRecord | None = node.policy_data
        # Published by an access that did not end here, or not yet: a cut sequence may have gone on elsewhere.
        if record is None or not record.runs or record.leaf is not None:
            node.policy_data = record = AccessRecord(self._now)
            record.settle(self._now, node.end, self._block, 0, 0, self.hazard_model.classed)
            record.start = node.start
            self.baseline.insert(record)
            self._enter(record, 0)
            self._limit_records()
        record.leaf = node
        self._insert(node, record, self._worth(node))

    def remove(self, node: Node) -> None:
        """Remove a node that is no longer an unlocked leaf."""
        super().remove(node)
        record: AccessRecord = node.policy_data
        self._by_worth.remove(record.worth_key)
        record.leaf = record.worth_key = None

    def victim(self) -> Node:
        """Return the leaf to evict next; the index must not be empty."""
        oldest = super().victim()
        if self.baseline.leads:
            node = self._least_recent([key[4] for key in islice(self._order, LOOKS)])
        else:
            node = oldest
            for _ in range(LOOKS):
                node = self._by_worth[0][4]
                if node is oldest or self._update_worth(node.policy_data):
                    break
            node = self._worth_less(node, oldest)
        if node is not oldest:
            self._coldest = None
        return node

    def next_victims(self, count: int) -> list[Node]:
        """Return the next `count` leaves as `victim` would choose them, if nothing else changed meanwhile. O(count)."""
        by_recency, by_worth = (key[4] for key in self._order), (key[4] for key in self._by_worth)
        oldest: list[Node] = []
        cheapest: list[Node] = []
        victims: dict[Node, None] = {}
        for _ in range(min(count, len(self))):
            oldest = _refilled(oldest, by_recency, victims)
            if self.baseline.leads:
                node = self._least_recent(oldest)
            else:
                cheapest = _refilled(cheapest, by_worth, victims)
                first = (cheapest[0].priority, cheapest[0].standing)
                alike = [each for each in cheapest if (each.priority, each.standing) == first]
                node = self._worth_less(min(alike, key=self._worth), oldest[0])
            victims[node] = None
        return list(victims)

    def _least_recent(self, oldest: list[Node]) -> Node:
        """LRU's choice among the least recent leaves; it passes over leaves that are expected back."""
        first = oldest[0]
        if self.baseline.overdrawn:
            return first
        for node in oldest:
            if (node.priority, node.standing) != (first.priority, first.standing):
                break
            if not self._is_expected(node.policy_data):
                return node
        return first

    def _worth_less(self, node: Node, oldest: Node) -> Node:
        """`node` if it is worth clearly less than LRU's choice, else that."""
        return node if node is not oldest and self._worth(node) < MARGIN * self._worth(oldest) else oldest

    # ---- hooks

    def open(self, tree: RadixTree, node: Node, ghost_owner: int, rest: bytes, counts: bool) -> AccessRecord:
        """Begin an access, and take the claims of earlier ones along its path. O(depth + ghosts)."""
        now = self._advance()
        path, hit = tree.path(node), node.end
        asked, at = hit + len(rest) // WIDTH, hit
        parts: list[Part] = []
        for record_holder, tokens in tree.beyond(node, ghost_owner, rest) if rest else ():
            if record_holder.policy_data is not None:
                parts.append((at, at + tokens, record_holder.policy_data))
            at += tokens
        parts.reverse()
        parts += [(each.start, each.end, each.policy_data) for each in reversed(path) if each.policy_data]
        if counts:
            known = min(asked, parts[0][1]) if parts else 0
            self.baseline.compare(asked, hit, min(asked, self.baseline.hit(parts, asked)), known)
        gap = 0
        if parts:
            last = parts[0][2]
            gap = 1 + size_class(now - last.time if last.runs else 0.0, 2, 10)
        bounds = next_bounds(parts)
        record = AccessRecord(now, bounds, size_class((asked - bounds[0]) / self._block), gap)
        for _, end, old in parts:
            self._take(old, end, counts)
        for each in path:
            each.policy_data = record
        return record

    def close(self, tree: RadixTree, node: Node, policy_data: AccessRecord, generated: int, hint: Hint | None) -> None:
        """End an access: it claims its path, and enters the youngest age. O(depth)."""
        now, record = self._advance(), policy_data
        for each in reversed(tree.path(node)):
            old = each.policy_data
            if old is not record:
                if old is not None:
                    self._take(old, each.end, counts=False)
                each.policy_data = record
        output, kind, returns_in = max(0, generated), None, None
        if hint is not None:
            kind, returns_in = hint.kind, hint.returns_in
            output = output if hint.output_length is None else hint.output_length
        classed = self.hazard_model.classed
        record.settle(now, node.end, self._block, size_class(output), self._kind(kind), classed)
        record.until = None if returns_in is None else now + returns_in
        self.baseline.insert(record)
        self.hazard_model.ended()
        self._enter(record, 0)
        self._limit_records()

    def fork(self, policy_data: AccessRecord | None) -> AccessRecord | None:
        """Return the record of a fork; an audit has none."""
        return None if policy_data is None else policy_data.forked()

    def trim_limit(self, node: Node, blocks: int) -> int:
        """Limit a trim to the blocks at the node's tail that are of one reuse class."""
        end = node.end
        tail = node.policy_data.tail(end)
        start = node.start if tail is None else max(node.start, tail[0])
        return min(blocks, max(1, -(-end // self._block) - -(-start // self._block)))

    def trim(self, node: Node) -> None:
        """Count the evicted tokens as at risk; the rest of the node may have another worth."""
        record: AccessRecord = node.policy_data
        if node.eviction_key is None:
            self.baseline.evicted(record, node.start)
        else:
            self.baseline.evicted(record, node.end)
            self._update_worth(record)

    def forget(self, policy_data: AccessRecord | None, start: int) -> None:
        """Cut a claim at `start`: a later use of the text would go unnoticed."""
        if policy_data is not None:
            policy_data.end = max(policy_data.start, min(policy_data.end, start))
            if policy_data.start == policy_data.end:
                self._leave(policy_data)

    def clear(self) -> None:
        """Forget all accesses; the hazards that were learnt stay."""
        self.baseline.clear()
        for ages in self._ages:
            for record in ages:
                record.bucket, record.end = -1, record.start
            ages.clear()

    def _kind(self, kind: str | None) -> int:
        known = self._kinds
        if kind not in known and len(known) < KINDS:
            known[kind] = len(known)
        return known.get(kind, KINDS)

    def _take(self, old: AccessRecord, end: int, counts: bool) -> None:
        """Another access used the claim of `old` up to `end`."""
        if end <= old.start:
            return
        if counts and old.bucket >= 0:
            for reuse_class, tokens in old.split(old.start, end):
                self.hazard_model.reuse(reuse_class, old.bucket, tokens / self._block)
        self.baseline.drop_head(old, end)
        old.start = end
        if old.start >= old.end:
            old.end = old.start
            self._leave(old)

    # ---- ages

    def _advance(self) -> float:
        """Read the clock, which never goes back here, and move records to the bucket of their age, oldest first.

        At most MOVES records move: after an idle hour all are due, and no call should wait for that. Returns the time.
        """
        self._now = now = max(self._time(), self._now)
        moves = MOVES
        for bucket in range(BUCKETS - 2, -1, -1):  # from old to young, so that each bucket stays in the order of age
            ages, born = self._ages[bucket], now - EDGES[bucket + 1]
            while ages and (record := next(iter(ages))).time <= born:
                if not moves:
                    return now
                moves -= 1
                del ages[record]
                self._enter(record, max(bucket + 1, bisect_right(EDGES, now - record.time) - 1), bucket + 1)
        return now

    def _enter(self, record: AccessRecord, bucket: int, first: int | None = None) -> None:
        """Put a record into a bucket, and count it in each bucket that it passed from `first` on."""
        if record.start >= record.end:
            record.bucket = -1
            return
        record.bucket = bucket
        self._ages[bucket][record] = None
        passed = (bucket,) if first is None else range(first, bucket + 1)
        at, end, reach = record.start, record.end, self.hazard_model.reach
        for cut, reuse_class in record.runs:  # as `split` does, but without a generator: this is the busiest loop
            if cut > at:
                blocks = (min(cut, end) - at) / self._block
                for age in passed:
                    reach(reuse_class, age, blocks)
                at = cut
                if cut >= end:
                    break
        if record.leaf is not None:
            self._update_worth(record)

    def _limit_records(self) -> None:
        """After one was added, forget the age of the oldest record if there are too many."""
        if self.records > 2 * self._capacity:
            oldest = next(ages for ages in reversed(self._ages) if ages)
            self._leave(next(iter(oldest)))

    def _leave(self, record: AccessRecord) -> None:
        if record.bucket >= 0:
            del self._ages[record.bucket][record]
            record.bucket = -1

    # ---- worths

    def _is_expected(self, record: AccessRecord) -> bool:
        """Whether the session was announced to return, and its time is not over."""
        return record.until is not None and record.until > self._now

    def _worth(self, node: Node) -> float:
        record: AccessRecord = node.policy_data
        tail = record.tail(node.end)
        reuse_class = self._unknown if tail is None else tail[1]
        worth = self.hazard_model.worth(reuse_class, record.bucket if record.bucket > 0 else 0)
        if record.until is not None and record.until > self._now:
            return max(worth, 1.0 / (record.until - self._now))
        return worth

    def _insert(self, node: Node, record: AccessRecord, worth: float) -> None:
        record.worth_key = (node.priority, node.standing, worth, node.tick, node)
        self._by_worth.add(record.worth_key)

    def _update_worth(self, record: AccessRecord) -> bool:
        """Compute the worth of a record's leaf again; return whether it was the same."""
        node, key = record.leaf, record.worth_key
        assert node is not None and key is not None
        worth = self._worth(node)
        if key[2] == worth:
            return True
        self._by_worth.remove(key)
        self._insert(node, record, worth)
        return False

    def check(self, nodes: list[Node]) -> None:
        """Recount the index, the records and the baseline. AssertionError names the broken invariant."""
        super().check(nodes)
        leaves = [key[4] for key in self._by_worth]
        assert len(leaves) == len(self._order) and {id(key[4]) for key in self._order} == set(map(id, leaves)), (
            f"{len(self._order)} leaves, {len(leaves)} are listed by worth"
        )
        assert all(one < two for one, two in pairwise(self._by_worth)), "leaves are not listed in order of worth"
        for key in self._by_worth:
            node = key[4]
            record: Any = node.policy_data
            assert record.leaf is node and record.worth_key is key, f"node {node.id}: its key by worth is stale"
            assert (key[0], key[1], key[3]) == (node.priority, node.standing, node.tick), (
                f"node {node.id}: its priority or recency by worth is stale"
            )
            assert record.runs, f"node {node.id}: no access is known for this leaf"
        for bucket, ages in enumerate(self._ages):
            times = [record.time for record in ages]
            assert times == sorted(times), f"age bucket {bucket} is not in the order of age"
            for record in ages:
                assert record.bucket == bucket and record.runs, f"a record of bucket {record.bucket} is in {bucket}"
                assert record.start <= record.end, f"a record claims {record.start} to {record.end}"
        assert self.records <= 2 * self._capacity, f"{self.records} records for {self._capacity} blocks"
        self.baseline.check()


def _refilled(window: list[Node], rest: Iterator[Node], taken: Container[Node]) -> list[Node]:
    """The first LOOKS leaves of an order that are not taken: `window` as far as it goes, then `rest`."""
    window = [node for node in window if node not in taken]
    fresh = (node for node in rest if node not in taken)
    return window + list(islice(fresh, LOOKS - len(window)))
