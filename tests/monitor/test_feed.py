"""Test feeds: an engine that restarts, invalid data, the past, and whole and damaged recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.telemetry.discovery import connect
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import CRASHED, Bye, Gap, Hello, Snapshot, encode, snapshot_frames
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.recording import MAGIC, read_recording
from radixkv.telemetry.records import Changes
from radixkv_monitor.live import SocketFeed
from radixkv_monitor.playback import Playback
from radixkv_monitor.print_once import first_state
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.summary import summarise, verdict
from radixkv_monitor.timeline import Timeline
from tests.monitor.fake_feed import FACTS
from tests.monitor.frames import OTHER, Clock, Engines, delta, send, snapshot, until
from tests.telemetry.served import room, serving

# ---- frames in, states out


def test_nothing_is_shown_before_the_last_page() -> None:
    mirror = Mirror()
    mirror.apply(snapshot(1.0, 1, 2).changes)
    whole = next(iter(snapshot_frames(mirror, 0, 1.0)))
    first = replace(whole, pages=2, changes=replace(whole.changes, nodes=whole.changes.nodes[:1]))
    second = Snapshot(1, 2, Changes(time=1.0, nodes=whole.changes.nodes[1:]))
    builder = StateBuilder()
    assert builder.take(Hello(FACTS), first) is None
    state = builder.take(second, delta(2.0, 3))
    assert state is not None
    assert set(state.nodes) == {1, 2, 3}, "a delta in the same breath counts"


def test_deltas_without_a_snapshot_count_for_nothing() -> None:
    builder = StateBuilder()
    assert builder.take(delta(1.0, 1)) is None
    assert builder.take(Hello(FACTS), delta(1.0, 1)) is None
    assert builder.take(Snapshot(1, 2, Changes(1.0))) is None, "a recording may begin between pages"
    state = builder.take(snapshot(2.0, 7))
    assert state is not None and set(state.nodes) == {7}
    assert builder.take(Gap(3), delta(3.0, 8)) is None, "between a gap and its snapshot nothing is known"
    assert builder.dropped == 3


STEPS = st.lists(
    st.tuples(st.floats(0.05, 40), st.sets(st.integers(1, 9), max_size=4), st.sets(st.integers(1, 9), max_size=2)),
    min_size=1,
    max_size=60,
)


def lived(steps: list[tuple[float, set[int], set[int]]], timeline: Timeline) -> tuple[StateBuilder, list[State]]:
    builder, now = StateBuilder(timeline), 1000.0
    states = [builder.take(Hello(FACTS), snapshot(now, 1, 2, 3))]
    for pause, changed, gone in steps:
        now += pause
        states.append(builder.take(delta(now, *changed, gone=tuple(gone - changed))))
    assert all(states)
    return builder, [state for state in states if state is not None]


@given(STEPS, st.lists(st.integers(0, 60), min_size=1, max_size=10))
def test_the_past_is_what_was_the_present(steps: list[tuple[float, set[int], set[int]]], visits: list[int]) -> None:
    timeline = Timeline(inf, inf)
    builder, states = lived(steps, timeline)
    past = PastStates(builder)
    for visit in visits:
        there = states[min(visit, len(states) - 1)]
        again = past.at(there.time)
        assert again is not None
        assert (again.time, again.nodes, again.stats) == (there.time, there.nodes, there.stats)
        between = past.at(there.time + 0.001)
        assert between is not None and between.nodes == there.nodes
        assert all(sample.time <= there.time for sample in again.history)


def test_a_timeline_keeps_to_its_bytes() -> None:
    timeline = Timeline(inf, 50_000)
    builder = StateBuilder(timeline)
    builder.take(Hello(FACTS), snapshot(0.0, *range(300)))
    for tick in range(1, 400):
        builder.take(delta(tick / 10, *range(tick % 7, 200)))
        assert timeline.bytes < 50_000 + 2 * 80_000, "the newest segment stays, however large it is"
    assert builder.latest is not None
    found = PastStates(builder).at(builder.latest.time)
    assert found is not None and found.nodes == builder.latest.nodes
    times = [segment.times[0] for segment in timeline._segments]
    assert all(one <= other for one, other in pairwise(times))


def test_a_recording_reads_back_as_what_was_seen(tmp_path: Path) -> None:
    builder = StateBuilder()
    with pytest.raises(ValueError, match="nothing to record yet"):
        builder.record(tmp_path / "early.rec")
    builder.take(Hello(FACTS), snapshot(1.0, 1), delta(2.0, 2))
    builder.record(tmp_path / "a.rec")
    builder.take(delta(3.0, 3, gone=(1,)))
    builder.stop_recording()
    builder.take(delta(4.0, 4))
    assert builder.recording is not None and not builder.recording.running and builder.recording.trouble is None
    again = StateBuilder()
    state = again.take(*read_recording(tmp_path / "a.rec"))
    assert state is not None
    assert (state.time, set(state.nodes), state.facts) == (3.0, {2, 3}, FACTS)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    builder = StateBuilder()
    builder.take(Hello(FACTS), snapshot(1.0, 1))
    builder.record(tmp_path / "a.rec")
    with room((tmp_path / "a.rec").stat().st_size + 10):
        state = builder.take(delta(2.0, 2))
    assert state is not None and set(state.nodes) == {1, 2}
    assert builder.recording is not None
    assert builder.recording.trouble == "recording stopped: File too large"
    assert not builder.recording.running


# ---- an engine at a socket


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr("radixkv_monitor.live.SHORTEST_RETRY", 0.01)
    monkeypatch.setattr("radixkv_monitor.live.LONGEST_RETRY", 0.05)
    return Engines()


@pytest.fixture
def feed(engines: Engines) -> Iterator[SocketFeed]:
    made = SocketFeed("x", engines.connect, seed=1)
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_an_engine_that_is_not_there_yet_is_waited_for(engines: Engines, feed: SocketFeed) -> None:
    feed.start()
    until(lambda: engines.attempts >= 3)
    assert feed.status.link == "connecting"
    assert "no engine answers" in feed.status.sentence and "next attempt in" in feed.status.sentence
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1.0, 1), delta(2.0, 2))
        until(lambda: feed.status.link == "live" and feed.latest and feed.latest.time == 2.0)
        assert feed.latest is not None and set(feed.latest.nodes) == {1, 2}
        assert feed.traffic.frames == 3 and feed.traffic.bytes > 100


def test_a_lost_engine_is_stale_and_a_restarted_one_is_told(engines: Engines, feed: SocketFeed) -> None:
    with engines.serve() as first:
        send(first, Hello(FACTS), snapshot(1.0, 1), Bye("the engine was closed"))
        feed.start()
        until(lambda: feed.latest)
    until(lambda: feed.status.link == "stale")
    assert "the engine was closed" in feed.status.sentence
    assert feed.latest is not None and set(feed.latest.nodes) == {1}, "the last state stays"
    since = feed.status.since
    until(lambda: engines.attempts > 4)
    assert feed.status.since == since, "stale since the connection broke, not since the last attempt"
    assert "the engine was closed; no engine answers" in feed.status.sentence, "its last word stays"
    line = feed.latest.line
    with engines.serve() as second:
        send(second, Hello(OTHER), snapshot(5.0, 9))
        until(lambda: feed.status.link == "live")
        assert feed.status.sentence == "the engine was restarted"
        assert set(feed.latest.nodes) == {9} and feed.latest.facts == OTHER and feed.latest.line != line
        assert feed.latest.baseline is not None and feed.latest.baseline.engine == OTHER.engine


def test_a_feed_knows_which_engine_of_a_process_answers() -> None:
    with serving() as (first, engine):
        second = Publisher(FACTS, engine.collect, engine.pending)
        second.start()
        assert first.path is not None and second.path is not None and first.path.stem != second.path.stem
        for path in (first.path, second.path):
            feed = SocketFeed("x", partial(connect, path))
            feed.start()
            until(lambda feed=feed: feed.latest)
            assert feed.peer == path.stem
            feed.close()
        second.close()


def test_a_restart_is_told_however_its_frames_arrive_and_not_for_ever(
    engines: Engines, feed: SocketFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines.serve() as first:
        send(first, Hello(FACTS), snapshot(1.0, 1))
        feed.start()
        until(lambda: feed.latest)
    until(lambda: feed.status.link == "stale")
    with engines.serve() as second:
        send(second, Hello(OTHER))
        until(lambda: feed.traffic.frames == 3)
        send(second, snapshot(5.0, 9))
        until(lambda: feed.status.link == "live")
        assert feed.status.sentence == "the engine was restarted"
        monkeypatch.setattr("radixkv_monitor.live.RESTART_NOTICE", 0.0)
        send(second, delta(6.0, 9))
        until(lambda: feed.status.sentence == "")
        assert feed.status.link == "live"


def test_the_same_engine_again_is_no_restart(engines: Engines, feed: SocketFeed) -> None:
    with engines.serve() as first:
        send(first, Hello(FACTS), snapshot(1.0, 1))
        feed.start()
        until(lambda: feed.latest)
    until(lambda: feed.status.link == "stale")
    with engines.serve() as second:
        send(second, Hello(FACTS), snapshot(5.0, 9))
        until(lambda: feed.status.link == "live")
        assert feed.status.sentence == ""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        encode(Hello(FACTS))[:-9] + b"x" * 40,
    ],
)
def test_garbage_costs_the_connection_and_no_more(engines: Engines, feed: SocketFeed, garbage: bytes) -> None:
    with engines.serve() as first:
        send(first, Hello(FACTS), snapshot(1.0, 1))
        feed.start()
        until(lambda: feed.latest)
        first.sendall(garbage + b"\x00" * 64)
        until(lambda: feed.status.link == "stale")
    with engines.serve() as second:
        send(second, Hello(FACTS), snapshot(2.0, 2))
        until(lambda: feed.status.link == "live")
        assert feed.latest is not None and set(feed.latest.nodes) == {2}


def test_a_feed_that_breaks_says_so(engines: Engines, feed: SocketFeed) -> None:
    engines.waiting.append(RuntimeError("a bug"))
    feed.start()
    until(lambda: feed.status.link == "ended")
    assert feed.status.sentence == "reading stopped: RuntimeError: a bug"


def test_a_silent_engine_counts_as_gone(engines: Engines, feed: SocketFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv_monitor.live.SILENCE_TIMEOUT", 0.0)
    monkeypatch.setattr("radixkv_monitor.live.SHORTEST_RETRY", 8.0)  # no attempt whose failure would be shown instead
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1.0, 1))
        feed.start()
        until(lambda: feed.status.link == "stale")
        assert "no data" in feed.status.sentence


# ---- recordings


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    builder = StateBuilder()
    builder.take(Hello(FACTS), snapshot(1000.0, 1))
    path = tmp_path / "a.rec"
    builder.record(path)
    for tick in range(1, 101):
        builder.take(delta(1000.0 + tick, tick % 9 + 1))
    builder.stop_recording()
    return path


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 40, 100])
def test_a_damaged_recording_shows_all_before_the_damage(recording: Path, cut: int) -> None:
    frames = list(read_recording(recording))[: cut + 2]
    recording.write_bytes(MAGIC + b"".join(map(encode, frames)) + b"\xff" * 100 + b"nonsense" * 1000)
    feed = FileFeed(recording)
    feed.start()
    until(lambda: feed.seek(2000.0) or feed.status.link == "ended")
    assert "is damaged after byte" in feed.status.sentence and Playback(feed).banner[1] == "warn"
    assert feed.span == (1000.0, 1000.0 + cut)
    assert feed.latest is not None and feed.latest.time == 1000.0 + cut
    feed.close()


@pytest.fixture
def player(recording: Path) -> Iterator[tuple[FileFeed, Clock]]:
    clock = Clock()
    feed = FileFeed(recording, clock=clock)
    feed.start()
    until(lambda: feed.span == (1000.0, 1100.0) and feed.latest)
    yield feed, clock
    feed.close()


def shows(feed: FileFeed, time: float) -> None:
    until(lambda: feed.latest is not None and feed.latest.time == time)


def test_a_recording_plays_at_its_speed(player: tuple[FileFeed, Clock]) -> None:
    feed, clock = player
    shows(feed, 1000.0)
    clock.time = 10.5
    shows(feed, 1010.0)
    assert feed.now == 1010.5
    assert [feed.faster() for _ in range(2)] == [2.0, 5.0]
    clock.time = 12.5
    shows(feed, 1020.0)
    assert feed.faster(-9) == 0.25 and feed.faster(99) == 60.0


def test_a_recording_pauses_and_is_sought(player: tuple[FileFeed, Clock]) -> None:
    feed, clock = player
    feed.pause()
    clock.time = 50.0
    feed.seek(1042.0)
    shows(feed, 1042.0)
    clock.time = 70.0
    assert feed.now == 1042.0
    feed.seek(0.0)
    shows(feed, 1000.0)
    feed.seek(9999.0)
    shows(feed, 1100.0)
    until(lambda: feed.status.link == "ended")
    assert feed.latest is not None and feed.latest.history[0].time == 1000.0
    feed.pause(True)
    shows(feed, 1000.0)


@pytest.mark.parametrize(
    ("reason", "level", "opening"),
    [
        ("the engine's thread stopped: ValueError('boom')", "bad", "The engine's thread stopped: ValueError('boom'); "),
        ("the engine was closed", "idle", "Ended (the engine was closed): "),
    ],
)
def test_the_end_of_a_recording_says_how_the_engine_ended(
    recording: Path, reason: str, level: str, opening: str
) -> None:
    with recording.open("ab") as file:
        file.write(encode(Bye(reason, seq=99, ts=1100.0)))
    assert reason.startswith(CRASHED) == (level == "bad")
    state = first_state(FileFeed(recording), 20.0)
    said = verdict(state, summarise(state))
    assert said.level == level and said.sentence.startswith(opening)
    feed = FileFeed(recording)
    feed.start()
    try:
        until(lambda: feed.builder.end_reason)
        feed.seek(1050.0)
        until(lambda: feed.latest and 1049.0 < feed.latest.time < 1060.0)
        assert feed.latest is not None and feed.latest.end_reason == ""  # it had not crashed yet
    finally:
        feed.close()


@pytest.mark.parametrize("content", [b"", b"no recording at all", b"RADIXKV-TELEMETRY 1\n"])
def test_what_is_no_recording_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(content)
    feed = FileFeed(path)
    feed.start()
    until(lambda: feed.status.link == "ended")
    assert feed.status.sentence and feed.latest is None
    feed.close()
