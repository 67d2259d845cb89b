"""Measure the nanoseconds of one mark, and of one event from the cache to a recorder, its guard included.

A loop sends each event 256 times, with ids of its own. Opened and closed events take turns, so that the one undoes the
other. Evictions and regrets are collected after each loop; evictions are also measured with a full ring, the most
expensive case. Times are the CPU time of this thread, less an empty loop. Batches of all events take turns. The result
is the median of each, and the fifth percentile, which is close to the time on a quiet machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from radixkv.cache import PrefixCache
from radixkv.cache.events import guarded
from radixkv.cache.ghosts import Pressure
from radixkv.telemetry.mirror import EVICTIONS
from radixkv.telemetry.recorder import EventBuffer

BATCH = range(256)
PRESSURE = Pressure(1, 0)
Batch = Callable[[], int]


def timed(batch: Callable[[], None], behind: Callable[[], None]) -> Batch:
    """Run the batch and return its CPU time."""

    def run() -> int:
        begun = time.thread_time_ns()
        batch()
        took = time.thread_time_ns() - begun
        behind()
        return took

    return run


def batches() -> dict[str, Batch]:
    """The measured events. The loops are written out: a call for each turn would cost as much as an event."""
    cache = PrefixCache(16, 16)
    heard = EventBuffer(time.time)
    told: Any = guarded(heard, lambda: None)
    unread: Any = guarded(EventBuffer(time.time), lambda: None)
    cache.watch()
    with cache.open([1]) as sequence:
        sequence.extend([1])
        sequence.commit()
    node = next(iter(cache.state.tree.walk()))
    assert cache.state.tree.changed is not None
    mark = cache.state.tree.changed.mark

    def nothing() -> None:
        for _ in BATCH:
            pass

    def marked() -> None:
        for _ in BATCH:
            mark(node)

    def grown() -> None:
        for number in BATCH:
            told.grown(number, 1)

    def opened() -> None:
        for number in BATCH:
            told.opened(number, None, 1, 1, "request")

    def closed() -> None:
        for number in BATCH:
            told.closed(number, 1)

    def evicted() -> None:
        for number in BATCH:
            told.evicted(number, 2, 3, 4, 5, True, 1.0, 0, PRESSURE)

    def evicted_unread() -> None:
        for number in BATCH:
            unread.evicted(number, 2, 3, 4, 5, True, 1.0, 0, PRESSURE)

    def regretted() -> None:
        for number in BATCH:
            told.regretted(number, 2, 3.0)

    every = {
        "nothing": nothing,
        "a node is marked": marked,
        "grown, which it ignores": grown,
        "opened": opened,
        "closed": closed,
        "evicted": evicted,
        "evicted, the ring full": evicted_unread,
        "regretted": regretted,
    }

    def collected() -> None:
        heard.evictions.clear()
        heard.regrets.clear()

    for _ in range(EVICTIONS // len(BATCH)):
        evicted_unread()
    return {name: timed(batch, collected) for name, batch in every.items()}


def nanoseconds(rounds: int) -> dict[str, tuple[float, float]]:
    """Of each event the median and the fifth percentile over the rounds."""
    every = batches()
    took: dict[str, list[int]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, batch in every.items():
            took[name].append(batch())
    of = {name: (statistics.median(each), statistics.quantiles(each, n=20)[0]) for name, each in took.items()}
    empty = of.pop("nothing")
    return {
        name: (round((median - empty[0]) / len(BATCH), 1), round((low - empty[1]) / len(BATCH), 1))
        for name, (median, low) in of.items()
    }
