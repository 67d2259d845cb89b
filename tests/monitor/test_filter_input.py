"""Keys that follow `/` belong to the filter, at any speed; keys that follow enter or escape belong to the view."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual import events
from textual.app import App
from textual.pilot import Pilot

from radixkv.telemetry.records import Changes
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.views import FilteredView
from tests.monitor.fake_feed import FakeFeed
from tests.monitor.samples import request
from tests.telemetry.wire import node

NAMES = {"/": "slash", "\n": "enter", "\x1b": "escape", ":": "colon", " ": "space"}


def type_at_once(app: App[None], text: str) -> None:
    """Queue all keys before the app sees the first one, as a terminal does with a fast typist."""
    for each in text:
        app.post_message(events.Key(NAMES.get(each, each), each if each.isprintable() else None))


def after(view: str, text: str, folder: Path) -> tuple[str, bool, MonitorApp]:
    """Type a text at once; return the filter's text, whether it has the focus, and the app."""
    requests = tuple(request(number=number, namespace=f"space-{number}") for number in range(1, 9))
    nodes = (node(1), *(node(number, 1) for number in range(2, 9)))
    app = MonitorApp(FakeFeed(Changes(time=1000.0, reset=True, nodes=nodes, requests=requests)), view)
    found: list[tuple[str, bool]] = []

    async def run() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            await settled(pilot)
            app.tick()
            await settled(pilot)
            type_at_once(app, text)
            await settled(pilot)
            shown = app.view
            assert isinstance(shown, FilteredView)
            assert shown.id == view and len(app.screen_stack) == 1
            found.append((shown.filter_line.value, shown.filter_line.has_focus))

    asyncio.run(run())
    return *found[0], app


async def settled(pilot: Pilot[None]) -> None:
    for _ in range(3):
        await pilot.pause()


VIEWS = pytest.mark.parametrize("view", ["tree", pytest.param("sessions", marks=pytest.mark.long)])


@VIEWS
def test_keys_after_the_slash_are_the_filter(view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, focused, app = after(view, "/tre q/m", tmp_path)
    assert (text, focused) == ("tre q/m", True)
    assert app.current_theme.dark and not app.playback.frozen and not list(tmp_path.iterdir())


@VIEWS
def test_keys_after_enter_and_escape_are_the_views(view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, focused, app = after(view, "/a\nt", tmp_path)
    assert (text, focused) == ("a", False) and not app.current_theme.dark
    text, focused, app = after(view, "/a\x1bt", tmp_path)
    assert (text, focused) == ("", False) and not app.current_theme.dark
    text, focused, _ = after(view, "/a\n/b", tmp_path)
    assert (text, focused) == ("b", True)  # the old text was selected


def test_a_view_and_its_filter_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = MonitorApp(FakeFeed(Changes(time=1000.0, reset=True, nodes=(node(1), node(2, 1)))))

    async def run() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            await settled(pilot)
            app.tick()
            await settled(pilot)
            type_at_once(app, "2/tre 5")
            await settled(pilot)
            assert isinstance(app.view, FilteredView) and app.view.id == "tree"
            assert app.view.filter_line.value == "tre 5" and app.current_theme.dark
            await pilot.press("escape", "question_mark", "3")
            assert len(app.screen_stack) == 2 and app.view.id == "tree"

    asyncio.run(run())
