"""Draw the pictures of the monitor that README and docs show: docs/images/monitor-<screen>.svg.

Run `python scripts/draw_monitor.py [FOLDER]`. Each screen is drawn as the app draws it, at one moment of the recording
that the tests use too (scripts/record_demo.py made it); no terminal is needed. Knows a recording and the app's keys.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from radixkv.telemetry.recording import read_recording
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.feed import Feed, Status
from radixkv_monitor.screenshot import screenshot
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.theme import DARK, LIGHT
from radixkv_monitor.timeline import Timeline

ROOT = Path(__file__).parent.parent
RECORDING = ROOT / "tests" / "monitor" / "data" / "agents.rec"
FOLDER = ROOT / "docs" / "images"
SIZE = (120, 36)

PICTURES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "overview": ("overview", (), DARK.name),
    "tree": ("tree", ("down", "down", "down"), DARK.name),
    "pool": ("pool", (), DARK.name),
    "requests": ("requests", (), DARK.name),
    "evictions": ("evictions", ("s",), DARK.name),
    "light": ("tree", ("down", "down", "down"), LIGHT.name),
}
"""By name: a screen, the keys that are pressed there, and a theme."""


class Moment(Feed):
    """A recording, seen at one moment as if its engine were there: `when` seconds after its beginning, or its end."""

    title = "a recording"

    def __init__(self, path: Path = RECORDING, when: float | None = None) -> None:
        self._builder = StateBuilder(Timeline(inf, inf), seconds=inf)
        self._builder.take(*read_recording(path))
        begin, end = self._builder.timeline.span or (0.0, 0.0)
        self._shown = PastStates(self._builder).at(end if when is None else begin + when)
        self.link = Status("live", begin)

    def start(self) -> None:
        """Nothing: all of it is read."""

    def close(self) -> None:
        """Nothing."""

    @property
    def latest(self) -> State | None:
        """The state at that moment."""
        return self._shown

    @property
    def status(self) -> Status:
        """What was put into `link`."""
        return self.link

    @property
    def now(self) -> float:
        """That moment."""
        return self._shown.time if self._shown is not None else 0.0

    @property
    def span(self) -> tuple[float, float] | None:
        """All of the recording."""
        return self._builder.timeline.span

    def at(self, when: float) -> State | None:
        """A state of it."""
        return PastStates(self._builder).at(when)


async def settle(pilot: Pilot[Any]) -> None:
    """Until everything is laid out and drawn, whatever the machine does."""
    for _ in range(3):
        await pilot.pause()
        await pilot.wait_for_scheduled_animations()


async def drawn(
    app: MonitorApp,
    keys: tuple[str, ...] = (),
    size: tuple[int, int] = SIZE,
    more: Callable[[Pilot[Any]], Awaitable[None]] | None = None,
) -> str:
    """The app as it looks behind these keys, and behind what `more` does."""
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        app.tick()
        await settle(pilot)
        for key in keys:
            await pilot.press(key)
        if more is not None:
            await more(pilot)
        await settle(pilot)
        app.update_bottom_line()
        await settle(pilot)
        return screenshot(app)


def draw(name: str) -> str:
    """One of PICTURES."""
    screen, keys, theme = PICTURES[name]
    app = MonitorApp(Moment(), screen)
    app.theme = theme
    return asyncio.run(drawn(app, keys))


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description="Draw the monitor's screens from the shipped recording.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name in PICTURES:
        target = folder / f"monitor-{name}.svg"
        target.write_text(draw(name), encoding="utf-8")
        print(f"drew {target}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
