"""Test alerts: the bell, the log in a file, the log on the screen, and thresholds on it."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from radixkv.errors import InvalidInput
from radixkv.telemetry.protocol import Delta
from radixkv.telemetry.records import Changes
from radixkv_monitor.alert_settings import AlertSettings, Thresholds
from radixkv_monitor.alerts import Alerter
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.feed import Status
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.verdict_screen import InfoScreen
from tests.monitor.fake_feed import FakeFeed
from tests.monitor.frames import snapshot, until
from tests.monitor.test_once import written
from tests.monitor.view_host import screen
from tests.telemetry.served import room

QUIET = AlertSettings(after=0.0)
LOUD = AlertSettings(bell=True, after=0.0)


def held(time: float, blocks: int) -> Changes:
    """Changes after which sequences hold this many of 64 blocks."""
    return Changes(time, reset=True, stats={"cache.held_blocks": float(blocks), "running": 1.0})


class Watched:
    """An alerter of a fake feed. `check` lets a second pass; `written` is the output to the terminal."""

    def __init__(self, settings: AlertSettings = LOUD, *, terminal: bool = True) -> None:
        self.feed = FakeFeed(held(1000.0, 1))
        self.written: list[str] = []
        self.reports: list[str] = []
        self.time = 2000.0
        self.alerter = Alerter(
            self.feed,
            settings,
            write_terminal=self.written.append if terminal else None,
            report=self.reports.append,
            clock=lambda: self.time,
            ticks=lambda: self.time - 1990.0,
        )

    def check(self, blocks: int | None = None) -> str:
        """Return the levels of the change, if there is one."""
        self.time += 1.0
        if blocks is not None:
            self.feed.apply(held(self.time - 1000.0, blocks))
        change = self.alerter.check()
        return f"{change.previous} {change.level} {change.time}" if change is not None else ""


def test_a_change_rings() -> None:
    watched = Watched()
    assert watched.check() == "None good 2001.0" and watched.written == [], "a good start is no alert"
    assert watched.check(64) == "good warn 2002.0"
    assert watched.written == ["\a"]
    assert watched.check() == ""
    assert watched.check(1) == "warn good 2004.0", "the end of a problem is a change too"
    assert watched.written == ["\a", "\a"]


def test_a_problem_at_the_start_is_an_alert_once_it_held() -> None:
    watched = Watched(replace(LOUD, after=3.0))
    assert [watched.check(64), watched.check(), watched.check(), watched.check()] == ["", "", "", "None warn 2001.0"]
    assert len(watched.written) == 1


@pytest.mark.parametrize(
    ("settings", "terminal", "number"),
    [(LOUD, True, 1), (LOUD, False, 0), (QUIET, True, 0)],
)
def test_only_the_chosen_ways_are_used(settings: AlertSettings, terminal: bool, number: int) -> None:
    watched = Watched(settings, terminal=terminal)
    watched.check()
    assert watched.check(64) and len(watched.written) == number


def test_thresholds_and_ignored_reasons_decide() -> None:
    lax = Watched(replace(LOUD, thresholds=Thresholds(held=None)))
    lax.check()
    assert lax.check(64) == ""
    deaf = Watched(replace(LOUD, ignore=frozenset({"held"})))
    deaf.check()
    assert deaf.check(64) == "" and deaf.written == []


def test_a_lost_engine_is_bad_and_its_return_is_good() -> None:
    watched = Watched(replace(LOUD, after=2.0))
    watched.check()
    watched.feed.link = Status("stale", 1000.0)
    assert [watched.check(), watched.check(), watched.check()] == ["", "", "good bad 2002.0"]
    assert watched.alerter.log.changes[-1].reasons[0].name == "stale"
    watched.feed.link = Status("live", 1000.0)
    assert [watched.check(), watched.check(), watched.check()] == ["", "", "bad good 2005.0"]


def test_a_file_gets_a_private_line_per_change(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    watched = Watched(replace(QUIET, log=path))
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == ""
    for blocks in (1, 64, 64, 1):
        watched.check(blocks)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["from"], each["to"], each["time"]) for each in lines] == [
        (None, "good", 2001.0),
        ("good", "warn", 2002.0),
        ("warn", "good", 2004.0),
    ]
    assert lines[1]["engine"] == "engine-1" and lines[1]["reasons"][0]["name"] == "held"
    assert lines[1]["sentence"].startswith("100% of the pool is held")


def test_a_wrong_path_is_reported_at_the_start_and_a_full_disk_loses_no_change(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none/a, cannot be written: No such file.*; name another file"):
        Watched(replace(QUIET, log=tmp_path / "none" / "a"))
    watched = Watched(replace(QUIET, log=tmp_path / "a"))
    with room(20):
        for blocks in (1, 64, 1):
            watched.check(blocks)
    assert len(watched.reports) == 1 and f"{tmp_path}/a, cannot be written: No space left" in watched.reports[0]
    watched.check()
    lines = (tmp_path / "a").read_text().splitlines()
    assert [json.loads(line)["to"] for line in lines[1:]] == ["good", "warn", "good"], "the first line is cut"


def test_a_recording_is_logged_at_its_times_without_alerts(tmp_path: Path) -> None:
    crowded = Delta(held(1004.0, 64), ts=1004.0)
    feed = FileFeed(written(tmp_path / "a.rec", snapshot(1000.0, 1), crowded))
    feed.start()
    assert feed.wait_until_loaded(20.0)
    terminal: list[str] = []
    alerter = Alerter(feed, replace(LOUD, after=60.0, log=tmp_path / "log"), write_terminal=terminal.append)
    feed.pause(True)
    for moment, levels in ((1000.0, ["idle"]), (1004.0, ["idle", "warn"]), (1000.0, ["idle"])):
        feed.seek(moment)
        until(lambda at=moment: feed.now == at and feed.latest.time == at)  # type: ignore[misc, union-attr]
        alerter.check()
        assert [each.level for each in alerter.log.changes] == levels, "the last level is that of the screen"
        assert alerter.log.changes[-1].time == alerter.now == moment
    assert terminal == [] and (tmp_path / "log").read_text() == ""
    feed.close()


# ---- on the screen


def shown(feed: FakeFeed, script: Callable[[Pilot[None]], Awaitable[None]], settings: AlertSettings = QUIET) -> None:
    async def run() -> None:
        app = MonitorApp(feed, alerts=settings)
        async with app.run_test(size=(80, 24)) as pilot:
            app.tick()
            await pilot.pause()
            await script(pilot)

    asyncio.run(run())


def app_of(pilot: Pilot[None]) -> MonitorApp:
    assert isinstance(pilot.app, MonitorApp)
    return pilot.app


def text_of(pilot: Pilot[None]) -> str:
    return "\n".join(screen(pilot.app))


def test_the_log_is_shown_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    feed = FakeFeed(held(1000.0, 1))

    async def script(pilot: Pilot[None]) -> None:
        alerter = app_of(pilot).alerter
        alerter.check()
        feed.apply(held(1010.0, 64))
        alerter.check()
        await pilot.press("i")
        assert isinstance(pilot.app.screen, InfoScreen)
        text = text_of(pilot).partition("Changes of the verdict")[2]
        assert text.index("▲ warn") < text.index("100% of the pool is held") < text.index("● good"), "newest first"
        await pilot.press("e", "c")
        await pilot.pause()
        await pilot.press("i")
        assert not isinstance(pilot.app.screen, InfoScreen)

    shown(feed, script)
    (as_json,) = tmp_path.glob("radixkv-verdicts-*.json")
    exported = json.loads(as_json.read_text())
    assert [(each["from"], each["to"], each["reasons"]) for each in exported] == [
        (None, "good", []),
        ("good", "warn", ["held"]),
    ]
    assert all(each["lasted"] >= 0 for each in exported)
    (as_csv,) = tmp_path.glob("radixkv-verdicts-*.csv")
    assert [row["to"] for row in csv.DictReader(as_csv.open())] == ["good", "warn"]


def test_a_frozen_screen_hides_no_alert() -> None:
    feed = FakeFeed(held(1000.0, 1))

    async def script(pilot: Pilot[None]) -> None:
        alerter = app_of(pilot).alerter
        alerter.check()
        await pilot.press("space")
        alerter.check()
        assert len(alerter.log.changes) == 1
        feed.apply(held(1010.0, 64))
        alerter.check()
        assert alerter.log.changes[-1].level == "warn"
        assert "of the pool is held" not in text_of(pilot)

    shown(feed, script)


def test_another_engine_starts_with_a_level_of_its_own() -> None:
    async def script(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        app.alerter.check()
        await app.switch_to(FakeFeed(held(1000.0, 64)))
        app.alerter.check()
        assert [(each.previous, each.level) for each in app.alerter.log.changes] == [(None, "good"), (None, "warn")]

    shown(FakeFeed(held(1000.0, 1)), script)
