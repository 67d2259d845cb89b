"""The requests at the door, and in which order they may come in.

Knows arrivals, priorities, and how long a cached prefix each one has. Knows no blocks and no steps.

A higher priority always goes first. Within a priority, who was preempted goes first, as its caller has already seen a
part of the answer; then comes the order: arrival, or the longest cached prefix. The latter (SGLang's "lpm") lets a
stream of hits starve a cold request for as long as it lasts; so a request that `max_overtakes` later ones have passed
goes before all that nobody passed so often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice, takewhile

from sortedcontainers import SortedKeyList

from radixkv.engine.limits import Limits
from radixkv.engine.request import Request

LOOKED_AT = 128  # requests of one priority, by arrival, whose cached prefix is looked up for "longest-prefix"


class Waiting:
    """Requests by rank; O(log n) to add and remove. Who is parked (see `coalescing`) waits, too, but is not asked."""

    def __init__(self, limits: Limits, cached: Callable[[Request], int]) -> None:
        """Start empty; `cached` tells how many tokens of a request are cached now."""
        self._ready: SortedKeyList = SortedKeyList(key=_rank)
        self._parked: SortedKeyList = SortedKeyList(key=_rank)
        self._by_prefix = limits.order == "longest-prefix"
        self._max_overtakes = limits.max_overtakes
        self._cached = cached
        self._lengths: dict[Request, int] = {}  # cached tokens, as looked up in this step

    def __len__(self) -> int:
        return len(self._ready) + len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        """By priority, then by arrival."""
        return merge(self._ready, self._parked, key=_rank)

    def __contains__(self, request: Request) -> bool:
        return request in self._ready or request in self._parked

    def add(self, request: Request) -> None:
        """Let a request wait, in the place of its arrival."""
        self._ready.add(request)

    def remove(self, request: Request) -> None:
        """Take it out: it ended, or comes in."""
        (self._ready if request in self._ready else self._parked).remove(request)

    def park(self, request: Request) -> None:
        """Ask a request no more until it is released."""
        self._ready.remove(request)
        self._parked.add(request)

    def release(self, over: Callable[[Iterable[Request]], list[Request]]) -> None:
        """Before anybody comes in: those of the parked ones whose wait is `over` may come in again. O(parked)."""
        self._lengths.clear()
        for request in over(self._parked):
            self._parked.remove(request)
            self._ready.add(request)

    def ranked(self) -> Iterator[Request]:
        """Who may come in, best first. Good until something changes."""
        if not self._by_prefix or len(self._ready) < 2:
            return iter(self._ready)
        first = self._ready[0].priority
        highest = takewhile(lambda request: request.priority == first, islice(self._ready, LOOKED_AT))
        best = sorted(highest, key=self._by_length)
        return chain(best, islice(self._ready, len(best), None))

    def overtaken_by(self, request: Request) -> None:
        """`request` came in: of those that came before it, whoever could have run instead was overtaken."""
        if not self._by_prefix or request.preemptions:
            return
        for other in islice(self._ready, self._ready.bisect_key_left(request.rank)):
            if other.priority == request.priority and not other.outlet.lagging:
                other.overtaken += 1

    def _by_length(self, request: Request) -> tuple[bool, bool, int, int]:
        aged = request.overtaken >= self._max_overtakes
        return not request.preemptions, not aged, 0 if aged else -self._length(request), request.number

    def _length(self, request: Request) -> int:
        length = self._lengths.get(request)
        if length is None:
            length = self._lengths[request] = self._cached(request)
        return length


def _rank(request: Request) -> tuple[int, bool, int]:
    return request.rank
