"""Recordings of an earlier version replay as that version showed them.

`parts.rec` and `states.rec` in tests/assets/recordings are flight recordings of real engines at 8ac3f19. The first
engine had conversations in two namespaces with shares, a host tier, forks, a pin, samples, a cancelled and a timed-out
request. The second one ran a hybrid model. The monitor at that commit made `summaries.json` from them, which must not
be made again. Pictures are drawn again only where a view was changed on purpose.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from radixkv.telemetry.recording import read_recording
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.pictures import drawn
from radixkv_monitor.print_once import to_dict
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import StateBuilder
from radixkv_monitor.views import VIEWS
from scripts.draw_monitor import Moment
from tests.monitor.test_snapshots import FixedUsage, nowhere, pictured  # noqa: F401  (a fixture of every test)
from tests.selection import mostly_long

FOLDER = Path(__file__).parents[1] / "assets" / "recordings"
SUMMARIES = FOLDER / "summaries.json"
RECORDINGS = [path.stem for path in sorted(FOLDER.glob("*.rec"))]
PICTURES = [f"{recording}-{view.name}" for recording in RECORDINGS for view in VIEWS]


def picture(name: str) -> str:
    recording, _, view = name.rpartition("-")
    app = MonitorApp(Moment(FOLDER / f"{recording}.rec"), view, usage_meter=FixedUsage())
    return asyncio.run(drawn(app, size=(100, 30)))


def summary(state: State) -> dict[str, Any]:
    """Everything that a state shows: its summary and counters, and its nodes, requests, sessions and evictions."""
    lists = (state.nodes, state.sequences, state.sessions, state.live, state.ended, state.evictions)
    return {**to_dict(state), "lists": [[asdict(each) for each in items.values()] for items in lists]}


def summaries(recording: str) -> list[dict[str, Any]]:
    """The summary of the state after each frame, as JSON has it."""
    builder = StateBuilder()
    states = [builder.take(frame) for frame in read_recording(FOLDER / f"{recording}.rec")]
    return [dict(json.loads(json.dumps(summary(state)))) for state in states if state is not None]


def with_old_keys(new: Any, old: Any) -> Any:
    """Leave out what later versions append: keys of dictionaries that the earlier version did not have."""
    if isinstance(old, dict):
        return {key: with_old_keys(new[key], value) for key, value in old.items()}
    if isinstance(old, list) and len(old) == len(new):
        return [with_old_keys(*each) for each in zip(new, old, strict=True)]
    return new


@pictured
@pytest.mark.parametrize("name", mostly_long(PICTURES, "parts-tree", "parts-pool", "states-overview"))
def test_a_recording_replays_to_the_same_picture(name: str) -> None:
    assert picture(name) == (FOLDER / f"{name}.svg").read_text("utf-8")


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_recording_replays_to_the_same_numbers(recording: str) -> None:
    old = json.loads(SUMMARIES.read_text("utf-8"))[recording]
    new = summaries(recording)
    assert len(new) == old["frames"] >= 10
    assert with_old_keys(new[-1], old["last"]) == old["last"]
    assert [(each["time"], each["nodes"], each["verdict"]["level"]) for each in new] == [
        tuple(row) for row in old["each"]
    ]
