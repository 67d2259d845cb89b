"""Test that the screen says how old its facts are: a silent engine, a long step, an engine that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from radixkv.telemetry.protocol import Delta, Hello, Snapshot
from radixkv.telemetry.recording import read_recording
from radixkv.telemetry.records import Changes
from radixkv_monitor.feed import Status
from radixkv_monitor.formatting import clock
from radixkv_monitor.live import STOPPED, SocketFeed
from radixkv_monitor.playback import Playback
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.summary import summarise, verdict
from tests.monitor.fake_feed import FACTS, FakeFeed
from tests.monitor.frames import Clock, Engines, delta, send, snapshot, until
from tests.monitor.samples import request

BUSY = {"running": 1.0, "waiting": 1.0}


# ---- an engine that sends nothing


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engines, SocketFeed, Clock]]:
    """Return a feed whose clocks stand still until a test moves them."""
    monkeypatch.setattr("radixkv_monitor.live._POLL", 0.01)
    monkeypatch.setattr("radixkv_monitor.live.SHORTEST_RETRY", 8.0)  # one attempt only
    engines, time = Engines(), Clock()
    feed = SocketFeed("x", engines.connect, seed=1, clock=lambda: 1000.0 + time(), ticks=time)
    yield engines, feed, time
    feed.close()


def test_an_engine_without_news_is_silent_after_three_seconds(silent: tuple[Engines, SocketFeed, Clock]) -> None:
    engines, feed, time = silent
    playback = Playback(feed)
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1000.0, 1))
        feed.start()
        until(lambda: feed.status.link == "live")
        assert playback.link == "● live" and feed.now == 1000.0
        time.time = 5.0
        until(lambda: feed.status.link == "silent")
        assert playback.link == "◐ silent 5 s"
        assert playback.banner == ("No news for 5 s: the engine's process is stopped or very busy", "warn")
        assert feed.now == 1000.0, "no age grows without news"
        shown = playback.state_to_draw()
        assert shown is not None and shown.past
        found = verdict(shown, summarise(shown))
        assert found.level == "warn" and found.sentence.startswith("No news for 5 s; was ")
        assert shown.until == f" before {clock(1000.0)}"
        send(engine, delta(1005.0, 2))
        until(lambda: feed.status.link == "live")
        assert playback.banner == ("", "info") and feed.now == 1005.0
        time.time = 21.0
        until(lambda: feed.status.link == "stale")
        assert feed.status.since == feed.now == 1005.0, "the time of the last news, not of the loss of patience"
        assert "no data for 16 s" in feed.status.sentence


def test_a_connection_without_any_frame_is_no_failed_attempt(silent: tuple[Engines, SocketFeed, Clock]) -> None:
    """The system accepts connections to a stopped process."""
    engines, feed, time = silent
    with engines.serve():
        feed.start()
        until(lambda: setattr(time, "time", time.time + 1.0) or feed.status.silence)
        said = feed.status
        assert said.link == "connecting"
        assert said.sentence == f"connected, but nothing was received for {said.silence:.0f} s: {STOPPED}"


def test_short_pauses_are_live(silent: tuple[Engines, SocketFeed, Clock]) -> None:
    engines, feed, time = silent
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1000.0, 1))
        feed.start()
        until(lambda: feed.status.link == "live")
        for second in (2.9, 5.8, 8.7):
            time.time = second
            frames = feed.traffic.frames
            send(engine, delta(1000.0 + second))
            until(partial(lambda seen: feed.traffic.frames > seen, frames))
            assert feed.status.link == "live"


# ---- a long step


def heartbeat(time: float, ts: float) -> Delta:
    return Delta(Changes(time=time), ts=ts)


def built(*frames: Snapshot | Delta) -> State:
    state = StateBuilder().take(Hello(FACTS), *frames)
    assert state is not None
    return state


def begun(time: float, **stats: float) -> Snapshot:
    return Snapshot(0, 1, Changes(time=time, reset=True, stats=stats), ts=time)


def test_a_state_says_how_long_the_step_has_run() -> None:
    assert built(begun(1000.0, **BUSY)).step_seconds is None
    assert built(begun(1000.0, **BUSY), heartbeat(1000.0, 1003.1)).step_seconds == pytest.approx(3.1)
    assert built(begun(1000.0, **BUSY), heartbeat(1000.0, 1003.1), delta(1003.2)).step_seconds is None


def test_an_idle_engine_has_no_step_however_old_its_newest_change() -> None:
    older = heartbeat(1000.0, 1500.0)  # an engine that sends the time of its newest change
    assert built(begun(1000.0), older).step_seconds is None
    assert built(begun(1000.0, process_cpu_seconds=1.0), heartbeat(1500.0, 1500.0)).step_seconds is None
    attached = Snapshot(0, 1, Changes(time=1000.0, reset=True, stats={"process_cpu_seconds": 1.0}), ts=1500.0)
    assert built(attached).step_seconds is None


def test_the_first_step_of_an_idle_engine_shows_although_its_request_was_not_reported_yet() -> None:
    state = built(begun(1000.0, process_cpu_seconds=1.0), heartbeat(1000.0, 1004.0))
    assert state.step_seconds == 4.0


def test_ages_stop_while_a_step_runs_and_the_banner_says_why() -> None:
    feed = FakeFeed(Changes(time=1000.0, reset=True, stats=BUSY))
    assert feed.state is not None
    feed.state = replace(feed.state, received=1003.1)
    playback = Playback(feed)
    shown = playback.state_to_draw()
    assert shown is not None and shown.now == 1000.0
    assert playback.banner == ("Step running for 3.1 s; state as of its start", "info")
    waiting = request(phase="waiting", submitted=995.0, admitted=None, first_token=None, ended=None)
    assert summarise(replace(shown, live={1: waiting})).longest_wait == 5.0
    feed.state = replace(feed.state, received=1001.5)
    assert playback.state_to_draw() is not None and playback.banner[0] == "", "steps of a second do not flicker"


def test_a_recorded_step_is_played_at_its_length(tmp_path: Path) -> None:
    builder = StateBuilder()
    builder.take(Hello(FACTS), begun(1000.0, **BUSY))
    builder.record(tmp_path / "a.rec")
    builder.take(heartbeat(1000.0, 1001.0), heartbeat(1000.0, 1002.0), heartbeat(1000.0, 1003.0), delta(1003.5))
    builder.stop_recording()
    assert builder.timeline.span == (1000.0, 1003.5)
    past = PastStates(builder)
    steps = [state.step_seconds for when in (1000.5, 1001.0, 1002.9, 1003.5) if (state := past.at(when))]
    assert steps == [None, 1.0, 2.0, None]
    feed = FileFeed(tmp_path / "a.rec", clock=lambda: 0.0)
    feed.start()
    try:
        until(lambda: feed.span == (1000.0, 1003.5))
        feed.seek(1002.9)
        until(lambda: feed.latest is not None and feed.latest.received == 1002.0)
        playback = Playback(feed)
        shown = playback.state_to_draw()
        assert shown is not None and shown.now == 1000.0
        assert "Step running for 2.0 s" in playback.banner[0]
    finally:
        feed.close()


# ---- an engine that has ended


def test_a_dead_engine_is_described_in_the_past_tense() -> None:
    stats = {"prompt_tokens": 100.0, "cached_tokens": 90.0, "running": 1.0}
    recent = request(prompt_tokens=100, cached_tokens=90, admitted=999.0, ended=999.5)
    feed = FakeFeed(Changes(time=1000.0, reset=True, stats=stats, requests=(recent,)))
    feed.link = Status("stale", 1000.0, "the engine was closed")
    shown = Playback(feed).state_to_draw()
    assert shown is not None and shown.past
    said = verdict(shown, summarise(shown)).sentence
    when = clock(1000.0)
    assert said.startswith(f"Not connected since {when}; was running: 90% of 100 prompt tokens")
    assert said.count("the last minute") == said.count(f"the last minute before {when}") == 1


def test_a_recording_of_an_idle_engine_begins_when_it_was_begun(tmp_path: Path) -> None:
    builder = StateBuilder()
    builder.take(Hello(FACTS, ts=5000.0), Snapshot(0, 1, Changes(time=1000.0, reset=True), ts=5000.0))
    builder.record(tmp_path / "a.rec")
    builder.take(heartbeat(1000.0, 5001.0), heartbeat(1000.0, 5002.0))
    builder.stop_recording()
    again = StateBuilder()
    again.take(*read_recording(tmp_path / "a.rec"))
    for each in (builder, again):
        assert each.timeline.span == (5000.0, 5002.0)
        past = PastStates(each).at(5000.5)
        assert past is not None and (past.time, past.now) == (1000.0, 5000.0)


class Remembering(FakeFeed):
    """A feed whose history is its first state."""

    first: State | None = None

    @property
    def span(self) -> tuple[float, float]:
        return 1000.0, self.now

    def at(self, when: float) -> State | None:
        return self.first


def test_the_past_of_a_dead_engine_was_connected() -> None:
    feed = Remembering(Changes(time=1000.0, reset=True, stats={"prompt_tokens": 100.0, "cached_tokens": 90.0}))
    feed.first = feed.state
    feed.apply(Changes(time=1060.0))
    feed.link = Status("stale", 1060.0)
    playback = Playback(feed)
    shown = playback.state_to_draw()
    assert shown is not None and shown.stale
    playback.freeze()
    frozen = playback.state_to_draw()
    assert frozen is not None and frozen.stale and frozen.frozen
    playback.scrub(-60.0)
    scrubbed = playback.state_to_draw()
    assert scrubbed is not None and not scrubbed.stale and scrubbed.now == 1000.0
