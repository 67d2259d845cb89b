"""What plain LRU would have hit, and whether whoever learns does worse: then LRU decides until it has made up for it.

Knows uses and positions. Knows no node and no token.

As each use takes a prefix, block-wise leaf LRU holds exactly the tokens used last, a path's tail before its head: the
newest uses, and of the oldest among them the head. So it is followed without its tree, in O(1) amortised a use.
"""

from __future__ import annotations

from collections import OrderedDict

from radixkv.cache.use import Use

SLACK = 0.0005  # of the tokens asked for, what may be lost against LRU at any time
ALLOWANCE = 0.003  # of the pool's tokens, the same from the first use on: or who begins to learn could lose nothing
MEMORY = 64.0  # pools' worth of tokens asked for, after which what was gained or lost counts 1/e


class LruShadow:
    """Plain LRU of so many tokens, in outline."""

    __slots__ = ("_asked", "_behind", "_capacity", "_held", "_uses")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[Use, None] = OrderedDict()  # those of which LRU holds some, oldest first
        self._held = 0
        self._asked = 0.0
        self._behind = 0.0

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def leads(self) -> bool:
        """Whether plain LRU did better lately, by more than the slack."""
        return self._behind > SLACK * self._asked + ALLOWANCE * self._capacity

    def clear(self) -> None:
        """Forget what it holds."""
        self._uses.clear()
        self._held = 0

    def hit(self, parts: list[tuple[int, int, Use]], length: int) -> int:
        """Tokens that LRU would hit of a path whose parts (start, end, last use) are deepest first. O(parts)."""
        for start, end, use in reversed(parts):
            kept = use.kept_to if use.runs else length
            if kept < end:
                return max(start, kept)
        return parts[0][1] if parts else 0

    def compare(self, asked: int, hit: int, lru_hit: int) -> None:
        """A request hit so many of the tokens asked for, and would have hit so many under LRU."""
        fade = max(0.0, 1.0 - asked / (MEMORY * self._capacity))
        self._asked = self._asked * fade + asked
        self._behind = self._behind * fade + lru_hit - hit

    def takes(self, use: Use) -> None:
        """A use has settled: what it claims is held, and the oldest goes that does not fit any more."""
        if use.kept_to > use.start:
            self._uses[use] = None
            self._held += use.kept_to - use.start
        while self._held > self._capacity:
            oldest = next(iter(self._uses))
            over, has = self._held - self._capacity, oldest.kept_to - oldest.start
            gone = min(over, has)
            oldest.kept_to -= gone
            self._held -= gone
            if gone == has:
                del self._uses[oldest]

    def loses_head(self, use: Use, start: int) -> None:
        """Another use is about to take the claim up to `start`."""
        if use in self._uses:
            self._held -= min(start, use.kept_to) - use.start
            if start >= use.kept_to:
                del self._uses[use]
