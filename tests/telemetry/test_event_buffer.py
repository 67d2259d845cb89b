"""The memory of noted events stays bounded, however late they are collected."""

from __future__ import annotations

from itertools import count

from radixkv.cache import PrefixCache
from radixkv.cache.ghosts import Pressure
from radixkv.telemetry.mirror import EVICTIONS
from radixkv.telemetry.recorder import EventBuffer
from tests.cache.verbs import held, prompt, publish


def test_each_open_sequence_is_dated_and_a_closed_one_forgotten() -> None:
    times = count(100.0)
    events = EventBuffer(lambda: next(times))
    cache = PrefixCache(16, 4)
    early = held(cache, prompt(9, 3))
    cache.watch(events)
    first = held(cache, prompt(1, 10))
    twin = first.fork()
    second = held(cache, prompt(2, 5))
    assert events.opened_at == {first.id: 100.0, twin.id: 101.0, second.id: 102.0}
    for sequence in (early, first, second):
        sequence.close()
    cache.check()
    assert events.opened_at == {twin.id: 101.0}


def test_rings_keep_the_newest() -> None:
    events = EventBuffer(lambda: 5.0)
    pressure = Pressure(2, 0)
    for number in range(3 * EVICTIONS):
        events.evicted(number, 1, 2, 3, 4, True, 0.5, 0, pressure)
        events.regretted(number, 3, float(number))
    newest = range(2 * EVICTIONS, 3 * EVICTIONS)
    assert list(events.evictions) == [(5.0, (number, 1, 2, 3, 4, True, 0.5, 0, pressure)) for number in newest]
    assert list(events.regrets) == [(number, float(number)) for number in newest]


def test_what_an_eviction_dropped_and_when_it_was_wanted_again_is_noted() -> None:
    now = [3.0]
    cache = PrefixCache(4, 4, clock=lambda: now[0])
    events = EventBuffer(lambda: now[0] + 1000.0)
    cache.watch(events)
    publish(cache, prompt(1, 16))
    now[0] = 7.0
    publish(cache, prompt(2, 8))
    ((when, eviction),) = events.evictions
    assert when == 1007.0
    assert eviction == (1, eviction[1], 8, 8, 2, False, 4.0, 0, Pressure(2, 0))
    now[0] = 9.5
    held(cache, prompt(1, 16)).close()
    cache.check()
    assert events.regrets[0] == (1, 2.5)
