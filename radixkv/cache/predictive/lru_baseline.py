"""What plain LRU would have hit, and who decides: LRU, unless it misses much and whoever learns risks little.

Knows uses and positions. Knows no node and no token.

As each use takes a prefix, block-wise leaf LRU holds exactly the tokens used last, a path's tail before its head: the
newest uses, and of the oldest among them the head. So it is followed without its tree, in O(1) amortised a use.
"""

from __future__ import annotations

from collections import OrderedDict

from radixkv.cache.predictive.access_records import AccessRecord

HEADROOM = 0.025  # of the tokens asked for, what LRU must miss and ghosts remember: below that there is nothing to gain
SLACK = 0.0003  # of the tokens asked for, what may be lost against LRU at any time
ALLOWANCE = 0.003  # of the pool's tokens, the same from the first use on: or who begins to learn could lose nothing
AT_RISK = 0.03  # of what LRU would hold and is evicted, what is taken for lost before anybody asks for it
MEMORY = 64.0  # pools' worth of tokens asked for, after which what was gained or lost counts 1/e


class LruBaseline:
    """Plain LRU of so many tokens, in outline."""

    __slots__ = ("_asked", "_behind", "_capacity", "_gone", "_held", "_missed", "_uses")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[AccessRecord, None] = OrderedDict()  # those of which LRU holds some, oldest first
        self._held = 0  # tokens
        self._gone = 0  # of these, the tokens that the cache has evicted
        self._asked = 0.0  # lately, as the next two
        self._missed = 0.0  # by LRU, of what is remembered
        self._behind = 0.0  # what LRU hit and whoever learns did not, less the other way round

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def leads(self) -> bool:
        """Whether LRU decides: it misses next to nothing, or more was risked than may be lost."""
        return self._missed < HEADROOM * self._asked or self.overdrawn

    @property
    def overdrawn(self) -> bool:
        """Whether what was lost against LRU lately, and part of what still may be, is more than is allowed."""
        return self._behind + AT_RISK * self._gone > SLACK * self._asked + ALLOWANCE * self._capacity

    def clear(self) -> None:
        """Forget what it holds."""
        self._uses.clear()
        self._held = self._gone = 0

    def hit(self, parts: list[tuple[int, int, AccessRecord]], length: int) -> int:
        """Tokens that LRU would hit of a path whose parts (start, end, last use) are deepest first. O(parts)."""
        for start, end, use in reversed(parts):
            kept = use.kept_to if use.runs else length
            if kept < end:
                return max(start, kept)
        return parts[0][1] if parts else 0

    def compare(self, asked: int, hit: int, lru_hit: int, known: int) -> None:
        """Of the tokens asked for, a request hit some, would have hit some under LRU, and some are remembered."""
        fade = max(0.0, 1.0 - asked / (MEMORY * self._capacity))
        self._asked = self._asked * fade + asked
        self._missed = self._missed * fade + known - lru_hit
        self._behind = self._behind * fade + lru_hit - hit

    def takes(self, use: AccessRecord) -> None:
        """A use has settled: what it claims is held, and the oldest goes that does not fit any more."""
        if use.kept_to > use.start:
            self._uses[use] = None
            self._held += use.kept_to - use.start
        while self._held > self._capacity:
            oldest = next(iter(self._uses))
            self._keeps(oldest, oldest.start, max(oldest.start, oldest.kept_to - (self._held - self._capacity)))

    def loses_head(self, use: AccessRecord, start: int) -> None:
        """Another use is about to take the claim up to `start`."""
        if use in self._uses:
            self._keeps(use, min(start, use.kept_to), use.kept_to)

    def evicted(self, use: AccessRecord, start: int) -> None:
        """The cache evicted the claim from `start` on, whatever LRU does."""
        if start < use.gone_from:
            before = use.gone_within(use.start, use.kept_to)
            use.gone_from = start
            if use in self._uses:
                self._gone += use.gone_within(use.start, use.kept_to) - before

    def _keeps(self, use: AccessRecord, start: int, end: int) -> None:
        """LRU holds no more of a use than [start, end); its claim starts there, or is about to."""
        self._held -= (use.kept_to - use.start) - (end - start)
        self._gone -= use.gone_within(use.start, use.kept_to) - use.gone_within(start, end)
        use.kept_to = end
        if start == end:
            del self._uses[use]
