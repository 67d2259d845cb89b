"""Draw the monitor's pictures for README and docs: docs/images/monitor-<screen>.svg.

Run `python scripts/draw_monitor.py [FOLDER]`. The app draws each screen at one moment of the tests' recording (see
scripts/record_demo.py); no terminal is needed.
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
"""By name: a view, the keys to press, and a theme."""


class Moment(Feed):
    """A recording shown as a live engine at one moment: `when` seconds after its start, or at its end."""

    title = "a recording"

    def __init__(self, path: Path = RECORDING, when: float | None = None) -> None:
        self._builder = StateBuilder(Timeline(inf, inf), seconds=inf)
        self._builder.take(*read_recording(path))
        begin, end = self._builder.timeline.span or (0.0, 0.0)
        self._shown = PastStates(self._builder).at(end if when is None else begin + when)
        self.link = Status("live", begin)

    def start(self) -> None:
        """Do nothing: the recording is read already."""

    def close(self) -> None:
        """Do nothing."""

    @property
    def latest(self) -> State | None:
        """The state at that moment."""
        return self._shown

    @property
    def status(self) -> Status:
        """The value of `link`."""
        return self.link

    @property
    def now(self) -> float:
        """The time of that moment."""
        return self._shown.time if self._shown is not None else 0.0

    @property
    def span(self) -> tuple[float, float] | None:
        """The span of the recording."""
        return self._builder.timeline.span

    def at(self, when: float) -> State | None:
        """Return a state of the recording."""
        return PastStates(self._builder).at(when)


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until everything is laid out and drawn."""
    for _ in range(3):
        await pilot.pause()
        await pilot.wait_for_scheduled_animations()


async def drawn(
    app: MonitorApp,
    keys: tuple[str, ...] = (),
    size: tuple[int, int] = SIZE,
    more: Callable[[Pilot[Any]], Awaitable[None]] | None = None,
) -> str:
    """Return the app's screen after these keys and after `more`."""
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
    """Draw one of PICTURES."""
    screen, keys, theme = PICTURES[name]
    app = MonitorApp(Moment(), screen)
    app.theme = theme
    return asyncio.run(drawn(app, keys))


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description="Draw the monitor's screens from the shipped recording.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name in PICTURES:
        target = folder / f"monitor-{name}.svg"
        target.write_text(draw(name), encoding="utf-8")
        print(f"drew {target}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
