"""What a cache tells while it works, as raw facts: all that telemetry does on an event is to note it, for later.

Knows the cache's events. Knows no record and nobody who looks; on the cache's thread. What is kept is bounded by the
open sequences and by rings, however long nobody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from radixkv.cache.events import unheard
from radixkv.cache.ghosts import Pressure
from radixkv.cache.types import Purpose
from radixkv.telemetry.mirror import EVICTIONS

Eviction = tuple[int, int, int, int, int, bool, float, int, Pressure]
"""What an observer hears of one: number, node, start, tokens, blocks, gone, idle, hits, pressure."""


class Heard:
    """A cache's observer.

    The ears are functions of their own, which find what they write to in their closure, and no methods: a third of an
    event's cost would be the way to `self` and its attributes. Each does one thing that cannot be put off: the clock is
    read where only now is known when, and everything else stays as it came.
    """

    rooted = uprooted = inserted = grown = split = merged = trimmed = copied = staticmethod(unheard)

    opened: Callable[[int, Hashable, int, int, Purpose], None]
    forked: Callable[[int, int], None]
    closed: Callable[[int, int], Any]
    evicted: Callable[..., None]
    regretted: Callable[[int, int, float], None]

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970."""
        self.since: dict[int, float] = {}
        """When each open sequence was opened, by its id."""
        self.evictions: deque[tuple[float, Eviction]] = deque(maxlen=EVICTIONS)
        """When, and what."""
        self.regrets: deque[tuple[int, float]] = deque(maxlen=EVICTIONS)
        """The number of an eviction, and how many seconds behind it a request wanted what it dropped."""
        since = self.since
        note_eviction, note_regret = self.evictions.append, self.regrets.append

        def opened(sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
            since[sequence] = clock()

        def forked(sequence: int, parent: int) -> None:
            since[sequence] = clock()

        def evicted(*eviction: *Eviction) -> None:
            note_eviction((clock(), eviction))

        def regretted(number: int, tokens: int, ago: float) -> None:
            note_regret((number, ago))

        self.opened, self.forked = opened, forked
        self.closed = since.pop  # forgets the sequence; its length is what `pop` gives for one that it does not know
        self.evicted, self.regretted = evicted, regretted
