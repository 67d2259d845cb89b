"""One request's use of a text: which part of its path was used last by it, and the classes that this part falls in.

Knows positions, times and a few facts about a request. Knows no token, no node and no rule of eviction.

Requests use prefixes, so that the last users of a path's tokens follow each other from the newest at its head to the
oldest at its end, and what a use still claims is one interval [start, end): later uses take its head, and what is
forgotten takes its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from radixkv.cache.predictive.hazard_model import ReuseClass

MOST_USES = 4  # earlier uses that are told apart
KINDS = 16  # reasons why turns end that are told apart; what comes later counts as one more


class Traits(NamedTuple):
    """What reuse is learnt by: each field on its own, and the product of what they say."""

    uses: int  # how many earlier uses the tokens had, at most MOST_USES
    fresh: int  # size class of the part of the prompt that nobody had used
    gap: int  # size class of the seconds since the last use of what the prompt continues, 0 if it continues nothing
    output: int  # size class of what was generated
    kind: int  # why the turn ended, as a number
    last: bool  # of the path's last block


class AccessRecord:
    """The claim of one request to the path that it used last."""

    __slots__ = (
        "bounds",
        "bucket",
        "end",
        "fresh",
        "gap",
        "gone_from",
        "kept_to",
        "leaf",
        "runs",
        "start",
        "time",
        "until",
    )

    def __init__(self, time: float, bounds: tuple[int, ...] = (0,) * MOST_USES, fresh: int = 0, gap: int = 0) -> None:
        self.time = time  # when it ended
        self.bounds = bounds  # up to where the path had 1, 2, ... earlier uses
        self.fresh, self.gap = fresh, gap
        self.start = self.end = 0  # what it still claims
        self.kept_to = 0  # up to where plain LRU would hold it
        self.gone_from = 0  # from where on the cache has evicted it
        self.runs: tuple[tuple[int, ReuseClass], ...] = ()  # (where it ends, class), in order; none while it is open
        self.bucket = -1  # of its age; -1 while it is open or of no account any more
        self.until: float | None = None  # when its user said that it returns
        self.leaf: object = None  # the node in the index whose tail it used last

    def forked(self) -> AccessRecord:
        """The use of another sequence that goes on from where this one's is."""
        return AccessRecord(self.time, self.bounds, self.fresh, self.gap)

    def settle(
        self,
        time: float,
        length: int,
        block: int,
        output: int,
        kind: int,
        classed: Callable[[Traits], ReuseClass],
    ) -> None:
        """It ended at `time` with `length` tokens published; all of them are its claim."""
        self.time, self.start = time, 0
        self.end = self.kept_to = self.gone_from = length
        last = max(0, (length - 1) // block * block)
        cuts = sorted({cut for cut in (*self.bounds, last, length) if 0 < cut <= length})
        runs, start = [], 0
        for cut in cuts:
            uses = sum(bound > start for bound in self.bounds)
            runs.append((cut, classed(Traits(uses, self.fresh, self.gap, output, kind, start >= last))))
            start = cut
        self.runs = tuple(runs)

    def gone_within(self, start: int, end: int) -> int:
        """Tokens of [start, end) that the cache has evicted since."""
        return max(0, end - max(start, self.gone_from))

    def split(self, start: int, end: int) -> Iterator[tuple[ReuseClass, int]]:
        """Class and tokens of the runs within what it claims of [start, end)."""
        at, end = max(start, self.start), min(end, self.end)
        for cut, reuse_class in self.runs:
            if at >= end:
                return
            if cut > at:
                yield reuse_class, min(cut, end) - at
                at = cut

    def tail(self, end: int) -> tuple[int, ReuseClass] | None:
        """Where the run that holds token `end` - 1 starts, and its class; None if that is not of this use."""
        start = 0
        for cut, reuse_class in self.runs:
            if end <= cut:
                return start, reuse_class
            start = cut
        return None


def size_class(amount: float, base_log2: int = 1, most: int = 12) -> int:
    """0 for nothing, else 1 + floor of the logarithm to the base 2**base_log2, between 1 and `most`."""
    return 0 if amount <= 0 else max(1, min(most, 1 + int(log2(amount) / base_log2)))


def next_bounds(parts: list[tuple[int, int, AccessRecord]]) -> tuple[int, ...]:
    """The bounds of a use that continues these parts (start, end, last use) of a path, which are deepest first."""
    bounds = [parts[0][1] if parts else 0] + [0] * (MOST_USES - 1)
    for start, end, use in parts:
        for count in range(1, MOST_USES):
            if not bounds[count] and use.bounds[count - 1] > start:
                bounds[count] = min(end, use.bounds[count - 1])
    return tuple(bounds)
