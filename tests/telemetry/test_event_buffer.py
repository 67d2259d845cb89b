"""The memory of noted events stays bounded, however late they are collected."""

from __future__ import annotations

from itertools import count

from radixkv.cache import PrefixCache
from radixkv.cache.types import Pressure
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
