"""Access records: which part of its path each access used last, and the reuse classes of that part.

An access is one request's use of a text, from `open` to `close`. Requests use prefixes, so the last users of a path are
ordered: the newest at its head, the oldest at its end. Each record claims one interval [start, end). Later accesses
take its head, and forgetting takes its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2

from radixkv.cache.predictive.hazard_model import ReuseClass, Traits
from radixkv.cache.types import Node

MOST_USES = 4  # the number of earlier accesses is counted up to this
KINDS = 16  # reasons for the end of a turn that are kept apart; later ones count as one more

WorthKey = tuple[int, int, float, int, Node]  # of a leaf: priority, standing, worth, tick; then the leaf itself


class AccessRecord:
    """The claim of one access to the part of its path that no later access used."""

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
        "worth_key",
    )

    def __init__(self, time: float, bounds: tuple[int, ...] = (0,) * MOST_USES, fresh: int = 0, gap: int = 0) -> None:
        self.time = time  # when the access ended
        self.bounds = bounds  # the ends of the path's parts that had 1, 2, ... earlier accesses
        self.fresh, self.gap = fresh, gap
        self.start = self.end = 0  # its claim
        self.kept_to = 0  # the part of the claim that plain LRU would hold ends here
        self.gone_from = 0  # the part of the claim that was evicted starts here
        self.runs: tuple[tuple[int, ReuseClass], ...] = ()  # (end, class), in order; empty until the access ends
        self.bucket = -1  # of its age; -1 until the access ends, and after its claim has become empty
        self.until: float | None = None  # when the session is expected back
        self.leaf: Node | None = None  # the leaf in the index at whose end the claim ends
        self.worth_key: WorthKey | None = None  # that leaf's key in the order of worth

    def forked(self) -> AccessRecord:
        """Return the record of another sequence that continues this one's text."""
        return AccessRecord(self.time, self.bounds, self.fresh, self.gap)

    def settle(
        self, time: float, length: int, block: int, output: int, kind: int, classed: Callable[[Traits], ReuseClass]
    ) -> None:
        """Claim all `length` published tokens: the access ended at `time`."""
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
        """Tokens of [start, end) that were evicted since the access."""
        return max(0, end - max(start, self.gone_from))

    def split(self, start: int, end: int) -> Iterator[tuple[ReuseClass, int]]:
        """Class and tokens of the runs within the claimed part of [start, end)."""
        at, end = max(start, self.start), min(end, self.end)
        for cut, reuse_class in self.runs:
            if at >= end:
                return
            if cut > at:
                yield reuse_class, min(cut, end) - at
                at = cut

    def tail(self, end: int) -> tuple[int, ReuseClass] | None:
        """Start and class of the run that holds token `end` - 1; None if the access did not reach that token."""
        start = 0
        for cut, reuse_class in self.runs:
            if end <= cut:
                return start, reuse_class
            start = cut
        return None


Part = tuple[int, int, AccessRecord]  # of a path: start, end, last access


def size_class(amount: float, base_log2: int = 1, most: int = 12) -> int:
    """0 for nothing, else 1 + floor of the logarithm to the base 2**base_log2, between 1 and `most`."""
    return 0 if amount <= 0 else max(1, min(most, 1 + int(log2(amount) / base_log2)))


def next_bounds(parts: list[Part]) -> tuple[int, ...]:
    """The bounds of an access that continues these parts of a path, which are deepest first."""
    bounds = [parts[0][1] if parts else 0] + [0] * (MOST_USES - 1)
    for start, end, record in parts:
        for count in range(1, MOST_USES):
            if not bounds[count] and record.bounds[count - 1] > start:
                bounds[count] = min(end, record.bounds[count - 1])
    return tuple(bounds)
