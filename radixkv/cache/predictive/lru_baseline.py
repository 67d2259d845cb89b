"""The LRU baseline: the hits that plain LRU would have had, and the rule that decides between it and the learner.

LRU decides where it misses little, and where the learner risks too much. As each access uses a prefix, block-wise leaf
LRU holds exactly the most recently used tokens: the claims of the newest accesses, and the head of one older claim. So
it is followed without its tree, in O(1) amortised per access.
"""

from __future__ import annotations

from collections import OrderedDict

from radixkv.cache.predictive.access_records import AccessRecord, Part

HEADROOM = 0.025  # of the tokens asked for: where LRU misses fewer that are remembered, there is nothing to gain
SLACK = 0.0003  # of the tokens asked for: hits that may be lost against LRU at any time
ALLOWANCE = 0.05  # of the pool's tokens: the same in total, so that learning can begin
CREDIT = 0.002  # of the tokens asked for: limit of the allowance, for short traces in large pools
START = 0.003  # of the pool's tokens: least allowance, from the first access on
AT_RISK = 0.03  # of the tokens that LRU would hold and the cache has evicted: counted as lost before they are asked for
MEMORY = 64.0  # pools' worth of tokens asked for, after which a gain or loss counts 1/e


class LruBaseline:
    """Plain LRU over a pool of `capacity` tokens, in outline."""

    __slots__ = ("_asked", "_behind", "_capacity", "_gone", "_held", "_missed", "_records")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[AccessRecord, None] = OrderedDict()  # with tokens that LRU holds, oldest first
        self._held = 0  # tokens
        self._gone = 0  # held tokens that the cache has evicted
        self._asked = 0.0  # a decaying total, as the next two
        self._missed = 0.0  # by LRU, of the remembered tokens
        self._behind = 0.0  # hits of LRU less hits of the learner

    def __len__(self) -> int:
        return len(self._records)

    @property
    def leads(self) -> bool:
        """Whether LRU decides: it misses next to nothing, or the learner has risked too much."""
        return self._missed < HEADROOM * self._asked or self.overdrawn

    @property
    def overdrawn(self) -> bool:
        """Whether recent losses against LRU, and part of the possible ones, exceed the allowance."""
        allowance = max(START * self._capacity, min(ALLOWANCE * self._capacity, CREDIT * self._asked))
        return self._behind + AT_RISK * self._gone > SLACK * self._asked + allowance

    def clear(self) -> None:
        """Forget which tokens LRU holds."""
        self._records.clear()
        self._held = self._gone = 0

    def hit(self, parts: list[Part], length: int) -> int:
        """Tokens that LRU would hit of a path with these parts, which are deepest first. O(parts)."""
        for start, end, record in reversed(parts):
            kept = record.kept_to if record.runs else length
            if kept < end:
                return max(start, kept)
        return parts[0][1] if parts else 0

    def compare(self, asked: int, hit: int, lru_hit: int, known: int) -> None:
        """Count a request's tokens: asked for, hit by the learner, hit by LRU, and remembered."""
        fade = max(0.0, 1.0 - asked / (MEMORY * self._capacity))
        self._asked = self._asked * fade + asked
        self._missed = self._missed * fade + known - lru_hit
        self._behind = self._behind * fade + lru_hit - hit

    def insert(self, record: AccessRecord) -> None:
        """Hold the claim of an access that ended; drop the oldest tokens that no longer fit."""
        if record.kept_to > record.start:
            self._records[record] = None
            self._held += record.kept_to - record.start
        while self._held > self._capacity:
            oldest = next(iter(self._records))
            self._keep(oldest, oldest.start, max(oldest.start, oldest.kept_to - (self._held - self._capacity)))

    def drop_head(self, record: AccessRecord, start: int) -> None:
        """Another access is about to take the claim up to `start`."""
        if record in self._records:
            self._keep(record, min(start, record.kept_to), record.kept_to)

    def evicted(self, record: AccessRecord, start: int) -> None:
        """The cache evicted the claim from `start` on."""
        if start < record.gone_from:
            before = record.gone_within(record.start, record.kept_to)
            record.gone_from = start
            if record in self._records:
                self._gone += record.gone_within(record.start, record.kept_to) - before

    def check(self) -> None:
        """Recount the books. AssertionError names the broken invariant."""
        held = sum(record.kept_to - record.start for record in self._records)
        assert self._held == held, f"the LRU baseline holds {self._held} tokens, recounted {held}"
        gone = sum(record.gone_within(record.start, record.kept_to) for record in self._records)
        assert self._gone == gone, f"{self._gone} tokens of the LRU baseline are evicted, recounted {gone}"
        assert 0 <= held <= self._capacity, f"the LRU baseline holds {held} tokens of {self._capacity}"
        assert all(record.kept_to > record.start for record in self._records), "the LRU baseline has an empty record"

    def _keep(self, record: AccessRecord, start: int, end: int) -> None:
        """Reduce the held part of a claim to [start, end); the claim starts there, or is about to."""
        self._held -= (record.kept_to - record.start) - (end - start)
        self._gone -= record.gone_within(record.start, record.kept_to) - record.gone_within(start, end)
        record.kept_to = end
        if start == end:
            del self._records[record]
