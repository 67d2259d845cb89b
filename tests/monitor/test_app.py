"""Test the app around the views: its keys, both sizes, and its notices."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher

from radixkv.telemetry.protocol import Delta, Frame, Hello, Snapshot
from radixkv.telemetry.recording import read_recording
from radixkv.telemetry.records import Changes, NodeRecord
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.dialogs import ExportScreen
from radixkv_monitor.feed import Status, ThreadFeed
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state_builder import StateBuilder
from radixkv_monitor.summary import summarise, verdict
from radixkv_monitor.views import VIEWS, BlockSelected, NodeSelected, RequestSelected
from tests.monitor.fake_feed import FACTS
from tests.monitor.view_host import screen
from tests.selection import mostly_long

SIZES = pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)], ids=["80x24", "160x48"]
)


def delta(time: float, *nodes: int) -> Delta:
    made = tuple(NodeRecord(n, 0, 0, 16, (n, 1), 0, 0, 0, 0, 0, False, time, time) for n in nodes)
    stats = {"prompt_tokens": 100.0 * (time - 999), "cached_tokens": 90.0 * (time - 999), "cache.cached_blocks": 8.0}
    return Delta(Changes(time=time, stats=stats, nodes=made), ts=time)


class HandFeed(ThreadFeed):
    """A feed without a thread; the test passes its frames."""

    def __init__(self) -> None:
        super().__init__("by hand", clock=lambda: 1100.0)
        self._status = Status("live", 1000.0)
        self.closed = False
        first = delta(1000.0, 1)
        self.hand(Hello(FACTS), Snapshot(0, 1, replace(first.changes, reset=True), ts=1000.0))
        for second in range(1, 91):
            self.hand(delta(1000.0 + second, second % 5 + 1))

    def hand(self, *frames: Frame) -> None:
        self.builder.take(*frames)

    def lose(self, sentence: str = "the engine was closed; next attempt in 2.0 s") -> None:
        self._status = Status("stale", 1095.0, sentence)

    def _run(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        super().close()


Steps = Callable[[MonitorApp, HandFeed, "Pilot[None]"], Awaitable[None]]


def played(steps: Steps, size: tuple[int, int] = (80, 24), **options: object) -> MonitorApp:
    """Run the app and the steps, then quit."""
    feed = HandFeed()
    app = MonitorApp(feed, **options)  # type: ignore[arg-type]

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            app.tick()
            await steps(app, feed, pilot)

    asyncio.run(run())
    assert feed.closed
    return app


def banner(app: MonitorApp) -> str:
    return str(app._banner.content) if app._banner.display else ""


@SIZES
def test_every_view_is_behind_its_key(size: tuple[int, int]) -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        switcher = app.query_one(ContentSwitcher)
        for number, entry in [*enumerate(VIEWS, 1), (1, VIEWS[0])]:
            await pilot.press(str(number))
            assert switcher.current == entry.name
            assert app.view is not None and app.view.id == entry.name
            assert app.view.size.height >= size[1] - 3, "a line above, one below, at most one banner"
            app.view.export().to_json()
        assert len(switcher.children) == len(VIEWS), "made once, kept"

    played(steps, size)


@SIZES
def test_space_freezes_while_reading_goes_on(size: tuple[int, int]) -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        await pilot.press("space")
        feed.hand(delta(1099.0, 7))
        app.tick()
        assert app.shown is not None and app.shown.frozen and app.shown.time == 1090.0
        assert "reading goes on" in banner(app)
        assert app.playback.link == "‖ frozen"
        await pilot.press("space")
        assert app.shown.time == 1099.0 and not app.shown.frozen and banner(app) == ""

    played(steps, size)


@pytest.mark.long
def test_the_past_step_by_step_and_back_to_the_present() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        def time() -> float:
            assert app.shown is not None
            return app.shown.time

        await pilot.press("left_square_bracket")
        assert time() == 1085.0 and app.shown is not None and app.shown.frozen and app.shown.now == 1085.0
        await pilot.press("left_square_bracket", "left_square_bracket", "right_square_bracket")
        assert time() == 1080.0
        await pilot.press("left_curly_bracket")
        assert time() == 1020.0
        await pilot.press("left_curly_bracket")
        assert time() == 1000.0, "the oldest that is remembered"
        await pilot.press("right_curly_bracket")
        assert time() == 1060.0
        feed.hand(delta(1091.0, 3))
        await pilot.press("right_curly_bracket")
        assert time() == 1091.0 and not app.shown.frozen

    played(steps)


def test_a_baseline_and_back() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        assert app.shown is not None and app.shown.baseline is not None and app.shown.baseline.time == 1000.0
        await pilot.press("b")
        assert app.shown.baseline.time == 1090.0
        feed.hand(delta(1095.0, 3))
        app.tick()
        assert app.shown.baseline.time == 1090.0
        await pilot.press("b")
        assert app.shown.baseline.time == 1000.0

    played(steps)


def test_record_writes_what_comes_until_it_is_pressed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        assert "● recording to radixkv-recording-" in banner(app)
        feed.hand(delta(1096.0, 40))
        await pilot.press("r")
        app.tick()
        assert banner(app) == ""
        feed.hand(delta(1097.0, 41))

    played(steps)
    (path,) = tmp_path.glob("*.rec")
    state = StateBuilder().take(*read_recording(path))
    assert state is not None and state.time == 1096.0 and set(state.nodes) == {1, 2, 3, 4, 5, 40}


@pytest.mark.parametrize("key", mostly_long(["j", "c", "s"], "j"))
def test_export(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        await pilot.press("e")
        assert isinstance(app.screen, ExportScreen)
        await pilot.press(key)
        await pilot.pause(0.1)
        assert len(app.screen_stack) == 1
        await pilot.press("e", "escape")
        assert len(app.screen_stack) == 1

    played(steps)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    if key == "j":
        assert json.loads(text)[0]["value"].startswith("Running: 90% of 5,000 prompt tokens")
    elif key == "c":
        assert text.splitlines()[0] == "name,value"
    else:
        assert text.startswith("<svg") and "Running" in text


def test_an_export_to_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("radixkv.private_files.os.fsync", full)

    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        for key in "cs":
            await pilot.press("e", key)
            await pilot.pause(0.1)
        messages = list(app._notifications)
        assert [said.severity for said in messages] == ["error", "error"]
        for said, kind in zip(messages, ("csv", "svg"), strict=True):
            assert f".{kind}: No space left on device" in said.message

    played(steps)
    assert list(tmp_path.iterdir()) == []


def test_saving_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        app.action_save()

    played(steps)
    (path,) = tmp_path.glob("radixkv-past-*.rec")
    times = [frame.changes.time for frame in read_recording(path) if isinstance(frame, Snapshot | Delta)]
    assert times[0] == 1000.0 and times[-1] == 1090.0


def test_a_lost_engine_is_told_and_greyed() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        feed.lose()
        app.tick()
        await pilot.pause()
        assert "Not connected since" in banner(app) and "next attempt" in banner(app)
        assert app._banner.has_class("-bad") and app.screen.has_class("-stale")
        assert app.playback.link == "✗ stale"
        assert app.shown is not None and app.shown.stale and app.shown.now == 1095.0
        feed._status = Status("live", 1096.0, "the engine was restarted")
        app.tick()
        assert banner(app) == "the engine was restarted" and not app.screen.has_class("-stale")

    played(steps)


def test_views_hear_of_each_others_selections() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        assert app.view is not None
        app.view.post_message(NodeSelected(3))
        app.view.post_message(RequestSelected(12))
        await pilot.pause()
        assert (app.selection.node, app.selection.request, app.selection.block) == (3, 12, None)
        assert app.view.id == "overview"
        app.view.post_message(BlockSelected(5, show=True))
        await pilot.pause()
        assert app.selection.block == 5 and app.view.id == "pool"
        app.view.post_message(NodeSelected(2, show=True))
        await pilot.pause()
        assert app.view.id == "tree"

    played(steps)


def test_a_click_on_a_tab_shows_its_view() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        await pilot.click("#tabs", offset=(41, 0))
        assert app.view is not None and app.view.id == "evictions"

    played(steps)


@pytest.mark.parametrize("width", mostly_long([40, 60, 80, 200], 60))
def test_the_tabs_leave_room_for_the_condition_of_the_source(width: int) -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(width, 24)
        await pilot.press("7")
        for _ in range(3):
            await pilot.pause()
        line = screen(app)[0]
        assert "7 Latency" in line or "7Latency" in line
        assert line.endswith(app.playback.link), "the condition is not cut"
        if width >= 80:
            assert all(entry.title in line for entry in VIEWS)

    played(steps)


def test_the_palette_knows_the_views() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        assert {"Theme", "Tree", "Freeze", "Record", "Save the past", "Export", "Baseline"} <= commands.keys()
        assert list(commands)[:2] == ["Overview", "Tree"]
        assert commands.keys().isdisjoint({"Keys", "Maximize", "Minimize", "Screenshot"})
        commands["Evictions"].callback()
        await pilot.pause()
        assert app.view is not None and app.view.id == "evictions"
        await pilot.press("ctrl+p")
        await pilot.pause()
        assert len(app.screen_stack) == 2
        app.tick()

    played(steps)


def test_copy_writes_the_selected_item_to_the_clipboard() -> None:
    async def steps(app: MonitorApp, feed: HandFeed, pilot: Pilot[None]) -> None:
        app.tick()
        await pilot.press("y")
        assert app.shown is not None
        assert app.clipboard.splitlines()[0] == verdict(app.shown, summarise(app.shown)).sentence
        await pilot.press("Y")
        assert json.loads(app.clipboard)[0]["name"] == "verdict"
        await pilot.press("2", "down")
        await pilot.pause()
        await pilot.press("y")
        assert app.clipboard.startswith("Namespace default") and "last used" in app.clipboard
        await pilot.press("Y")
        assert json.loads(app.clipboard)["node"] == app.view.lines.cursor.node.id
        await pilot.press("3", "right")
        await pilot.pause()
        await pilot.press("Y")
        assert json.loads(app.clipboard)["block"] == app.view.block > 0

    played(steps)


def test_a_recording_pauses_goes_faster_and_is_sought(tmp_path: Path) -> None:
    hand = HandFeed()
    hand.save(tmp_path / "a.rec")
    feed = FileFeed(tmp_path / "a.rec", clock=lambda: 0.0)
    app = MonitorApp(feed)

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            for _ in range(200):
                await pilot.pause(0.02)
                if feed.span == (1000.0, 1090.0) and feed.status.link == "replay":
                    break
            app.tick()
            assert app.playback.link == "▶ replay 1x" and banner(app).startswith("0:00 of 1:30")
            await pilot.press("greater_than_sign", "space")
            assert app.playback.link == "‖ replay 2x"
            await pilot.press("right_square_bracket", "right_curly_bracket", "left_square_bracket")
            assert feed.now == 1060.0
            await pilot.pause(0.3)
            assert app.shown is not None and app.shown.time == 1060.0 and banner(app).startswith("1:00 of 1:30")
            await pilot.press("less_than_sign", "less_than_sign")
            assert app.playback.link == "‖ replay 0.5x"

    asyncio.run(run())
