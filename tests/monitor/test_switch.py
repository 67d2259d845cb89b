"""Test the list of running engines, and that the app changes its source without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher

from radixkv.telemetry.client_set import ClientLimits
from radixkv.telemetry.discovery import FoundEngine, engines
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.recording import read_recording
from radixkv_monitor import engine_picker
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.engine_picker import EngineList, EnginePicker, EngineScreen
from radixkv_monitor.feed_factory import feed_of_found
from radixkv_monitor.live import SocketFeed
from tests.monitor.fake_feed import FACTS
from tests.monitor.view_host import screen
from tests.telemetry.served import Engine, many, runtime_folder


def found(number: int, model: str = "tiny") -> FoundEngine:
    return FoundEngine(f"e{number}", number, None, 1000.0 + number, model, "0.1.0", "cpu", f"/nowhere/{number}.sock")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[FoundEngine]:
    """Return the engines that a list finds; a test may change them."""
    there: list[FoundEngine] = []
    monkeypatch.setattr(engine_picker, "engines", lambda: list(there))
    monkeypatch.setattr(engine_picker, "INTERVAL", 0.05)
    return there


Script = Callable[["Pilot[FoundEngine]", EngineList], Awaitable[None]]


def picked(there: list[FoundEngine], script: Script) -> FoundEngine | None:
    """Run the picker and the script; return its answer."""
    app = EnginePicker(there)

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await script(pilot, app.query_one(EngineList))

    asyncio.run(run())
    return app.return_value


def lines(shown: EngineList) -> list[str]:
    return [str(option.prompt).partition("  up")[0] for option in shown.options]


@pytest.mark.parametrize(("keys", "pid"), [("enter", 7), ("down enter", 8), ("q", None), ("escape", None)])
def test_the_picker_answers_with_an_engine_or_nothing(keys: str, pid: int | None, running: list[FoundEngine]) -> None:
    running[:] = [found(7), found(8, "qwen"), found(9)]

    async def script(pilot: Pilot[FoundEngine], shown: EngineList) -> None:
        assert lines(shown) == ["pid 7  tiny  cpu", "pid 8  qwen  cpu", "pid 9  tiny  cpu"]
        assert "3 engines are running. Choose one" in "\n".join(screen(pilot.app))
        await pilot.press(*keys.split())

    answer = picked(running, script)
    assert (answer.pid if answer is not None else None) == pid


@pytest.mark.long
def test_the_cursor_stays_on_its_engine_while_others_come_and_go(running: list[FoundEngine]) -> None:
    running[:] = [found(7), found(8)]

    async def script(pilot: Pilot[FoundEngine], shown: EngineList) -> None:
        async def updated(*there: FoundEngine) -> None:
            running[:] = there
            for _ in range(200):
                await pilot.pause(0.01)
                if shown.option_count == len(there):
                    break
            await pilot.pause()
            assert len(lines(shown)) == len(there)

        await pilot.press("down")
        await updated(found(6), found(7), found(8))
        assert shown.highlighted == 2
        await updated(found(8), found(9))
        assert shown.highlighted == 0
        await updated(found(9))
        assert shown.highlighted is None
        await pilot.press("enter")
        assert pilot.app.return_value is None and pilot.app.is_running, "the engine under the cursor is gone"
        await updated()
        assert "No engine runs." in "\n".join(screen(pilot.app))
        await updated(found(8), found(9))
        await pilot.press("down", "down", "enter")

    picked(running, script)


def test_the_present_source_is_marked(running: list[FoundEngine]) -> None:
    there = [found(7), found(8)]
    shown = EngineList(there, "demo, watched now", "")
    assert lines(shown) == ["● demo, watched now", "  pid 7  tiny  cpu", "  pid 8  tiny  cpu"]
    assert shown.engine(engine_picker.PRESENT) is None
    watched = EngineList(there, "tiny, pid 8, watched now", "e8")
    assert lines(watched) == ["  pid 7  tiny  cpu", "● pid 8  tiny  cpu"]
    assert watched.engine("e8") is None and watched.engine("e7") == there[0]


# ---- the app


@contextmanager
def two_engines() -> Iterator[tuple[Publisher, Publisher]]:
    """Publish an engine with 49 nodes and one with 19, in a folder of their own."""
    with runtime_folder():
        made = []
        for number, nodes in ((1, 50), (2, 20)):
            engine = Engine()
            facts = replace(FACTS, engine=f"engine-{number}", model=f"model-{number}", started=1000.0 + number)
            publisher = Publisher(facts, engine.collect, engine.pending, limits=ClientLimits(hz=50.0))
            publisher.start()
            engine.change(*many(nodes))
            made.append(publisher)
        try:
            yield made[0], made[1]
        finally:
            for publisher in made:
                publisher.close()


async def until(pilot: Pilot[None], true: Callable[[], object], expected: str) -> None:
    for _ in range(1000):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError(f"waited in vain for {expected}:\n" + "\n".join(screen(pilot.app)))


def test_another_engine_is_watched_without_a_restart(tmp_path: Path) -> None:
    async def run(first: Publisher, second: Publisher) -> None:
        app = MonitorApp(feed_of_found(engines()[0]), "tree", record_to=tmp_path / "a.rec")
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            await until(pilot, lambda: "49 nodes" in "\n".join(screen(app)), "the first engine")
            app.selection = replace(app.selection, node=7)
            feed = app.feed
            assert isinstance(feed, SocketFeed)
            await pilot.press("space", "g")
            await until(pilot, lambda: "model-2" in "\n".join(screen(app)), "the list")
            assert isinstance(app.screen, EngineScreen)
            assert any("●" in line and "model-1" in line for line in screen(app))
            await pilot.press("down", "enter")
            await until(pilot, lambda: "19 nodes" in "\n".join(screen(app)), "the second engine")
            assert app.shown is not None and app.shown.facts.model == "model-2"
            assert app.view is not None and app.view.id == "tree" and not app.playback.frozen
            assert app.selection.node != 7
            assert any("ends with its engine" in each.message for each in app._notifications)
            await until(pilot, lambda: first.attached == 0 and second.attached == 1, "the first connection's end")
            for key in "1346":
                await pilot.press(key)
            assert len(app.query_one(ContentSwitcher).children) == 5
        assert not feed._thread.is_alive()

    with two_engines() as both:
        asyncio.run(run(*both))
    assert len(list(read_recording(tmp_path / "a.rec"))) >= 2
