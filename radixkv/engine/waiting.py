"""The requests at the door, and in which order they may come in.

Knows arrivals, priorities, and how long a cached prefix each one has. Knows no blocks and no steps.

A higher priority always goes first. Within a priority, who was preempted goes first, as its caller has already seen a
part of the answer; then comes the order: arrival, or the longest cached prefix. The latter (SGLang's "lpm") lets a
stream of hits starve a cold request for as long as it lasts; so a request that `max_overtakes` later ones have passed
goes before all that nobody passed so often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, takewhile

from sortedcontainers import SortedKeyList

from radixkv.engine.limits import Limits
from radixkv.engine.request import Request

LOOKED_AT = 128  # requests of one priority, by arrival, whose cached prefix is looked up for "longest-prefix"


class Waiting:
    """Requests by rank; O(log n) to add and remove."""

    def __init__(self, limits: Limits, cached: Callable[[Request], int]) -> None:
        """Start empty; `cached` tells how many tokens of a request are cached now."""
        self._by_arrival: SortedKeyList = SortedKeyList(key=lambda request: request.rank)
        self._by_prefix = limits.order == "longest-prefix"
        self._max_overtakes = limits.max_overtakes
        self._cached = cached

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        """By priority, then by arrival."""
        return iter(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return request in self._by_arrival

    def add(self, request: Request) -> None:
        """Let a request wait, in the place of its arrival."""
        self._by_arrival.add(request)

    def remove(self, request: Request) -> None:
        """Take it out: it ended, or comes in."""
        self._by_arrival.remove(request)

    def ranked(self) -> Iterator[Request]:
        """Who may come in, best first. Good until something changes."""
        if not self._by_prefix or len(self) < 2:
            return iter(self._by_arrival)
        first = self._by_arrival[0].priority
        highest = takewhile(lambda request: request.priority == first, islice(self._by_arrival, LOOKED_AT))
        best = sorted(highest, key=self._by_length)
        return chain(best, islice(self._by_arrival, len(best), None))

    def overtaken_by(self, request: Request, waits: Callable[[Request], bool]) -> None:
        """`request` came in: of those that came before it, whoever could have run instead was overtaken.

        `waits` tells who stays for a neighbour. It is asked now: who ranks low is not looked at when it stops waiting.
        """
        if not self._by_prefix or request.preemptions:
            return
        for other in islice(self._by_arrival, self._by_arrival.bisect_key_left(request.rank)):
            if other.priority == request.priority and not (other.outlet.lagging or waits(other)):
                other.overtaken += 1

    def _by_length(self, request: Request) -> tuple[bool, bool, int, int]:
        aged = request.overtaken >= self._max_overtakes
        return not request.preemptions, not aged, 0 if aged else -self._cached(request), request.number
