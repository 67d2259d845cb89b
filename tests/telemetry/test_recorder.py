"""The recorder over the real cache: its collections add up to a full walk of the cache."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache import POLICIES, PrefixCache
from radixkv.telemetry.mirror import ENDED_REQUESTS, EVICTIONS, SESSIONS, Mirror
from radixkv.telemetry.recorder import Recorder, runs
from radixkv.telemetry.records import NEXT_VICTIMS, RequestRecord, SessionRecord
from tests.cache.fuzz.machine import Machine
from tests.cache.fuzz.options import draw
from tests.cache.verbs import held, prompt, publish
from tests.selection import mostly_long
from tests.telemetry.expected import OFFSET, assert_matches_cache, expand, watched


@pytest.mark.parametrize("seed", mostly_long(range(40), *range(12)))
def test_collections_add_up_to_a_walk_of_the_cache(seed: int) -> None:
    """All verbs of the cache, with a collection after each step, or after every second or third."""
    rng = random.Random(seed)
    options = draw(rng, watched=False, states=False, host=seed % 4 == 3)
    machine, mirror, evicted = Machine(options, seed), Mirror(), 0
    world = machine.world
    for number in range(rng.choice((0, 20))):  # observe a cache that is already in use
        machine.step(number)
    before = world.cache.stats().evicted_tokens
    recorder = Recorder(clock=lambda: world.now + OFFSET)
    recorder.attach(world.cache)
    pause = rng.randint(1, 3)
    for number in range(20, 120):
        machine.step(number)
        if number % pause == 0:
            evicted += collected(recorder, mirror, world.cache)
            assert evicted == world.cache.stats().evicted_tokens - before


def collected(recorder: Recorder, mirror: Mirror, cache: PrefixCache) -> int:
    """Collect into the mirror and compare it with the cache; return the number of newly evicted tokens."""
    before, pending = dict(mirror.evictions), recorder.pending
    changes = recorder.collect()
    assert pending or not (changes.nodes or changes.gone_nodes or changes.evictions)
    assert not recorder.pending
    mirror.apply(changes)
    assert_matches_cache(mirror, cache, OFFSET)
    again = recorder.collect()
    assert not (again.nodes or again.gone_nodes or again.sequences or again.gone_sequences or again.evictions)
    return sum(record.tokens for record in changes.evictions if record.number not in before)


def test_the_first_time_tells_everything_and_says_so() -> None:
    cache = PrefixCache(16, 4)
    publish(cache, prompt(1, 10), "a")
    recorder = Recorder()
    recorder.attach(cache)
    first, second = recorder.collect(), recorder.collect()
    assert first.reset and not second.reset
    assert [(record.parent, record.tokens, record.namespace) for record in first.nodes] == [(0, 0, "a"), (1, 10, None)]
    assert not second.nodes


def test_an_eviction_says_what_went_why_and_whether_it_was_wanted_again() -> None:
    cache, recorder, mirror, now = watched(4)
    publish(cache, prompt(1, 16))
    publish(cache, prompt(1, 16))
    now[0] = 7.0
    publish(cache, prompt(2, 6))
    now[0] = 8.0
    mirror.apply(recorder.collect())
    (record,) = mirror.evictions.values()
    assert (record.start, record.tokens, record.blocks, record.gone) == (8, 8, 2, False)
    assert (record.idle_s, record.hits, record.time) == (7.0, 1, OFFSET + 7)
    assert record.pressure == "to make room for 2 blocks when 0 were free"
    assert record.wanted_again is None
    now[0] = 20.0
    cache.open(prompt(1, 12), purpose="resume").close()
    assert not recorder.collect().evictions, "only a request regrets"
    cache.open(prompt(1, 12)).close()
    now[0] = 21.0
    cache.open(prompt(1, 16)).close()  # the rest of it; only the first time counts
    mirror.apply(recorder.collect())
    (again,) = mirror.evictions.values()
    assert (again.number, again.wanted_again) == (record.number, OFFSET + 20)


@pytest.mark.parametrize("policy", POLICIES)
def test_next_victims_are_evicted_in_the_order_that_was_sent(policy: str) -> None:
    cache, recorder, mirror = PrefixCache(200, 4, policy), Recorder(), Mirror()
    recorder.attach(cache)
    for number in [*range(40), 3, 9, 9, 5]:
        publish(cache, prompt(number, 8))
    mirror.apply(recorder.collect())
    order = mirror.next_victims
    assert order is not None and len(order) == NEXT_VICTIMS and set(order) <= set(mirror.nodes)
    publish(cache, prompt(99, 4 * (cache.free_blocks + 6)))
    mirror.apply(recorder.collect())
    evicted = dict.fromkeys(record.node for record in mirror.evictions.values())
    assert list(evicted) == list(order[:3])


def test_next_victims_are_sent_only_when_they_change() -> None:
    cache, recorder, *_ = watched()
    assert recorder.collect().next_victims == ()
    publish(cache, prompt(1, 10))
    changes = recorder.collect()
    assert changes.next_victims == (changes.nodes[-1].id,)
    held(cache, prompt(2, 4))
    assert recorder.collect().next_victims is None
    held(cache, prompt(1, 10))
    assert recorder.collect().next_victims == ()
    recorder.attach(cache)
    assert recorder.collect().next_victims == (), "a reset sends everything"


def test_a_sequence_says_whose_it_is_and_since_when() -> None:
    cache, recorder, mirror, now = watched()
    now[0] = 3.0
    first = held(cache, prompt(1, 10))
    now[0] = 4.0
    twin = first.fork()
    first.extend([1, 2, 3])
    now[0] = 5.0
    mirror.apply(recorder.collect({}, {first.id: (17, 0), twin.id: (17, 1)}))
    records = [mirror.sequences[sequence.id] for sequence in (first, twin)]
    assert [(record.request, record.index, record.opened - OFFSET) for record in records] == [
        (17, 0, 3.0),
        (17, 1, 4.0),
    ]
    assert expand(records[0].blocks) == first.block_table.tolist()[3:] and not records[1].blocks
    first.close()
    changes = recorder.collect()
    assert changes.gone_sequences == (first.id,)
    assert [record.request for record in changes.sequences] == [None]


def test_uncollected_records_take_no_room() -> None:
    """A thousand requests in a small pool: memory is bounded by the tree and by ring buffers."""
    cache, recorder, mirror, _ = watched(8)
    mirror.apply(recorder.collect())
    for number in range(2000):
        publish(cache, prompt(number, 9), "abc"[number % 3])
        recorder.request(_request(number, "waiting"))
        recorder.request(_request(number, "finished"))
        recorder.session(SessionRecord(number, None, 1, 0, 1, 1, 0, 1, 0.0, 0.0))
    assert cache.stats().evicted_tokens > 9 * 1500
    assert len(recorder._tracker) <= 3 + 8
    changes = recorder.collect()
    assert len(changes.evictions) == EVICTIONS and len(changes.requests) == ENDED_REQUESTS
    assert len(changes.sessions) == SESSIONS and not changes.gone_nodes
    assert [record.number for record in changes.requests] == list(range(2000 - ENDED_REQUESTS, 2000))
    assert len(recorder._events.opened_at) == 0
    mirror.apply(changes)
    assert_matches_cache(mirror, cache, OFFSET)


def test_a_request_shown_as_live_is_shown_as_ended() -> None:
    _, recorder, mirror, _ = watched()
    recorder.request(_request(1, "decode"))
    mirror.apply(recorder.collect())
    recorder.request(_request(1, "decode"))
    assert not recorder.pending and not recorder.collect().requests, "nothing new of it"
    recorder.request(_request(1, "finished"))
    for number in range(2, 2 + 2 * ENDED_REQUESTS):
        recorder.request(_request(number, "finished"))
    mirror.apply(recorder.collect())
    assert not mirror.live


def test_text_is_told_only_where_it_is_asked_for_and_only_its_beginning() -> None:
    calls: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        calls.append(ids)
        if 13 in ids:
            raise ValueError("no such token")
        return "\n".join(map(str, ids))

    cache, recorder, mirror, _ = watched(100, decode=decode)
    publish(cache, list(range(100, 300)))
    publish(cache, [13])
    mirror.apply(recorder.collect())
    long, bad = [next(r for r in mirror.nodes.values() if r.head[:1] == (first,)) for first in (100, 13)]
    assert long.text is not None and long.text.startswith("100\\n101") and len(long.text) <= 120
    assert bad.text == "<ValueError>"
    before = len(calls)
    publish(cache, list(range(100, 320)))
    mirror.apply(recorder.collect())
    assert len(calls) == before, "it has only grown"
    publish(cache, [*range(100, 110), 5])
    mirror.apply(recorder.collect())
    assert sorted(r.text for r in mirror.nodes.values() if r.tokens in (10, 190) and r.text)[0].endswith("109")
    assert max(map(len, calls)) == 40
    assert all(record.text is None for record in watched()[1].collect().nodes)


def test_a_recorder_that_fails_harms_no_cache(caplog: pytest.LogCaptureFixture) -> None:
    broken = False

    def clock() -> float:
        if broken:
            raise OSError("what time it is, nobody knows")
        return OFFSET

    cache, recorder, mirror = PrefixCache(4, 4), Recorder(clock), Mirror()
    recorder.attach(cache)
    broken = True
    publish(cache, prompt(1, 16))
    publish(cache, prompt(2, 16))
    cache.check()
    assert len(caplog.records) == 1
    broken = False
    mirror.apply(recorder.collect())
    assert sum(record.tokens for record in mirror.nodes.values()) == 16, "what is marked is told all the same"


def test_a_namespace_is_named_but_never_asked() -> None:
    class Tenant:
        def __str__(self) -> str:
            raise AssertionError("nobody is to ask")

        __repr__ = __str__

    cache, recorder, mirror, _ = watched(100)
    for namespace in (None, "a" * 100, 5, ("salt", 7, Tenant()), Tenant()):
        publish(cache, prompt(1, 4), namespace)
    mirror.apply(recorder.collect())
    names = [record.namespace for record in mirror.nodes.values() if not record.parent]
    assert names == [None, "a" * 64, "5", "(salt, 7, Tenant)", "Tenant"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=40))
def test_runs_are_the_blocks_again_in_as_few_runs_as_there_are(pieces: list[tuple[int, int]]) -> None:
    blocks = [block for first, count in pieces for block in range(first, first + count)]
    found = runs(array("i", blocks))
    assert expand(found) == blocks
    assert len(found) == 2 * sum(at == 0 or blocks[at] != blocks[at - 1] + 1 for at in range(len(blocks)))


def _request(number: int, phase: Any) -> RequestRecord:
    return RequestRecord(number, phase, None, None, 0, 1, 9, 9, 0, 0, 0, 0, 0, False, 0.0)
