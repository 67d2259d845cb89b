"""Test alerts: the bell, the screen, and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from radixkv.telemetry.records import Changes
from radixkv_monitor.alert_settings import AlertSettings, Thresholds
from radixkv_monitor.alerts import Alerter
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.dialogs import InfoScreen
from radixkv_monitor.feed import Status
from radixkv_monitor.replay import FileFeed
from tests.monitor.fake_feed import FakeFeed
from tests.monitor.frames import snapshot, until
from tests.monitor.test_once import written
from tests.monitor.view_host import screen

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
        self.time = 2000.0
        self.alerter = Alerter(
            self.feed,
            settings,
            write_terminal=self.written.append if terminal else None,
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
    watched.feed.link = Status("live", 1000.0)
    assert [watched.check(), watched.check(), watched.check()] == ["", "", "bad good 2005.0"]


def test_a_recording_is_no_alert(tmp_path: Path) -> None:
    feed = FileFeed(written(tmp_path / "a.rec", snapshot(1000.0, 64)))
    feed.start()
    assert feed.wait_until_loaded(20.0)
    until(lambda: feed.latest is not None)
    terminal: list[str] = []
    assert Alerter(feed, LOUD, write_terminal=terminal.append).check() is None and terminal == []
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


def test_the_verdict_is_shown_in_full() -> None:
    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("i")
        assert isinstance(pilot.app.screen, InfoScreen)
        assert "100% of the pool is held" in text_of(pilot)
        await pilot.press("i")
        assert not isinstance(pilot.app.screen, InfoScreen)

    shown(FakeFeed(held(1000.0, 64)), script)


def test_a_frozen_screen_hides_no_alert() -> None:
    feed = FakeFeed(held(1000.0, 1))

    async def script(pilot: Pilot[None]) -> None:
        alerter = app_of(pilot).alerter
        alerter.check()
        await pilot.press("space")
        alerter.check()
        feed.apply(held(1010.0, 64))
        change = alerter.check()
        assert change is not None and change.level == "warn"
        assert "of the pool is held" not in text_of(pilot)

    shown(feed, script)


def test_another_engine_starts_with_a_level_of_its_own() -> None:
    async def script(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        changes = [app.alerter.check()]
        await app.switch_to(FakeFeed(held(1000.0, 64)))
        changes.append(app.alerter.check())
        assert [each and (each.previous, each.level) for each in changes] == [(None, "good"), (None, "warn")]

    shown(FakeFeed(held(1000.0, 1)), script)
