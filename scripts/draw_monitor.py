"""Draw the monitor's pictures for README and docs: docs/images/monitor-<screen>.svg.

Run `python scripts/draw_monitor.py [FOLDER]`. The app draws each screen at one moment of the tests' recording (see
scripts/record_demo.py); no terminal is needed.
"""

from __future__ import annotations

import argparse
import asyncio
from math import inf
from pathlib import Path

from radixkv.telemetry.recording import read_recording
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.pictures import StillFeed, drawn
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.theme import DARK, LIGHT
from radixkv_monitor.timeline import Timeline

ROOT = Path(__file__).parent.parent
RECORDING = ROOT / "tests" / "monitor" / "data" / "agents.rec"
FOLDER = ROOT / "docs" / "images"

PICTURES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "overview": ("overview", (), DARK.name),
    "tree": ("tree", ("down", "down", "down"), DARK.name),
    "pool": ("pool", (), DARK.name),
    "requests": ("requests", (), DARK.name),
    "evictions": ("evictions", ("s",), DARK.name),
    "light": ("tree", ("down", "down", "down"), LIGHT.name),
}
"""By name: a view, the keys to press, and a theme."""


class Moment(StillFeed):
    """A recording shown as a live engine at one moment: `when` seconds after its start, or at its end."""

    def __init__(self, path: Path = RECORDING, when: float | None = None) -> None:
        builder = StateBuilder(Timeline(inf, inf), seconds=inf)
        builder.take(*read_recording(path))
        begin, end = builder.timeline.span or (0.0, 0.0)
        super().__init__(builder, PastStates(builder).at(end if when is None else begin + when), "a recording")


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
