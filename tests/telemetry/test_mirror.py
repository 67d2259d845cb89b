"""A mirror is the sum of all changes; `everything()` makes an equal one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.telemetry.mirror import ENDED_REQUESTS, EVICTIONS, SESSIONS, Mirror
from radixkv.telemetry.records import Changes, SequenceRecord, SessionRecord
from tests.telemetry.wire import CHANGES, eviction, node, request


def mirror_of(*every: Changes) -> Mirror:
    mirror = Mirror()
    for changes in every:
        mirror.apply(changes)
    return mirror


def session(number: int) -> SessionRecord:
    return SessionRecord(number, None, 1, 0, 10, 10, 5, 2, 1.0, 2.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(CHANGES, max_size=4))
def test_a_late_client_gets_the_same_state(every):
    mirror = mirror_of(*every)
    late = mirror_of(Changes(0.0, nodes=(node(1),), stats={"old": 1.0}), mirror.everything())
    assert vars(late) == vars(mirror)
    for name in ("ended", "sessions", "evictions"):  # in the same order, so that the same ones are dropped first
        assert list(getattr(late, name)) == list(getattr(mirror, name))


def test_records_replace_and_leave():
    held = SequenceRecord(3, 1, 0, 1, 20, 16, (5, 1), 1.0)
    mirror = mirror_of(
        Changes(1.0, stats={"steps": 1.0, "waiting": 2.0}, nodes=(node(1), node(2, 1)), sequences=(held,)),
        Changes(2.0, stats={"steps": 2.0}, nodes=(node(1, blocks=(9, 1)),), gone_nodes=(2, 77), gone_sequences=(3,)),
    )
    assert mirror.nodes == {1: node(1, blocks=(9, 1))}
    assert mirror.sequences == {}
    assert (mirror.time, mirror.stats) == (2.0, {"steps": 2.0, "waiting": 2.0})


def test_a_reset_forgets_everything_first():
    mirror = mirror_of(
        Changes(1.0, stats={"a": 1.0}, nodes=(node(1),), requests=(request(1),), evictions=(eviction(1),)),
        Changes(2.0, reset=True, nodes=(node(2),)),
    )
    assert vars(mirror) == vars(mirror_of(Changes(2.0, nodes=(node(2),))))


def test_next_victims_stay_until_others_are_sent_and_are_unknown_after_a_reset_without_them():
    mirror = mirror_of(Changes(1.0, next_victims=(4, 2), what_if={"dropped": 1}), Changes(2.0))
    assert mirror.next_victims == (4, 2) and mirror.what_if == {"dropped": 1}
    mirror.apply(Changes(3.0, next_victims=()))
    assert mirror.next_victims == ()
    mirror.apply(Changes(4.0, reset=True))
    assert mirror.next_victims is None


def test_requests_end_once_and_the_oldest_of_those_are_forgotten():
    many = ENDED_REQUESTS + 5
    mirror = mirror_of(Changes(1.0, requests=tuple(request(at) for at in range(many))))
    assert len(mirror.live) == many  # requests that have not ended are all kept
    mirror.apply(Changes(2.0, requests=tuple(request(at, "finished") for at in range(many))))
    assert not mirror.live
    assert list(mirror.ended) == list(range(5, many))


def test_the_least_lately_used_sessions_are_forgotten():
    mirror = mirror_of(Changes(1.0, sessions=tuple(map(session, range(SESSIONS)))))
    mirror.apply(Changes(2.0, sessions=(session(0), session(SESSIONS))))
    assert 0 in mirror.sessions
    assert 1 not in mirror.sessions
    assert len(mirror.sessions) == SESSIONS


def test_a_late_regret_changes_what_is_remembered_and_brings_nothing_back():
    mirror = mirror_of(Changes(1.0, evictions=tuple(map(eviction, range(EVICTIONS + 2)))))
    mirror.apply(Changes(2.0, evictions=(eviction(0, 3.0), eviction(5, 4.0), eviction(EVICTIONS + 2, 5.0))))
    assert 0 not in mirror.evictions
    assert mirror.evictions[5] == replace(eviction(5), wanted_again=4.0)
    assert mirror.evictions[EVICTIONS + 2].wanted_again == 5.0  # the eviction and its regret in one collection
    assert list(mirror.evictions) == list(range(3, EVICTIONS + 3))
