"""Compare every screen with a stored picture: 80x24 and 160x48, dark and light, from a recorded file.

After an intended change, run `pytest tests/monitor/test_snapshots.py --snapshot-update` and look at the new pictures.
Another release of Textual may draw differently, so pictures are compared only with the release that drew them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from textual.app import App
from textual.command import CommandList
from textual.pilot import Pilot
from textual.widgets import Input

from radixkv.telemetry.discovery import FoundEngine
from radixkv.telemetry.protocol import Delta, Hello, Snapshot
from radixkv.telemetry.recording import read_recording
from radixkv_monitor import engine_picker
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.engine_picker import EnginePicker
from radixkv_monitor.feed import Feed, Status, Traffic
from radixkv_monitor.pictures import settle
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.screenshot import screenshot
from radixkv_monitor.self_usage import Cost, UsageMeter
from radixkv_monitor.state import State
from radixkv_monitor.theme import LIGHT
from radixkv_monitor.views import VIEWS
from scripts.draw_monitor import FOLDER, PICTURES, RECORDING, Moment, draw
from tests.monitor.samples import DISK, HOST, STATES, WHAT_IF
from tests.selection import mostly_long

DREW = {"textual": "8.2.8", "rich": "15.0.0"}
HERE = {name: version(name) for name in DREW}
pictured = pytest.mark.skipif(HERE != DREW, reason=f"the pictures were drawn by {DREW}, here are {HERE}")
SIZES = pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)], ids=["80x24", "160x48"]
)
NAMES = [view.name for view in VIEWS]

BEGAN, SECONDS = 1_790_000_000.0, 60  # of the recording
Looks = Callable[..., None]


class FixedUsage(UsageMeter):
    """Usage with the same values on every machine."""

    def read(self, traffic: Traffic) -> Cost:
        return Cost(0.04, 61 * 2**20, 10.0, 8.4 * 2**10)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove everything about this machine from the screen."""
    monkeypatch.setenv("TZ", "UTC")
    for name in ("NO_COLOR", "FORCE_COLOR", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def looks(snap_compare: Callable[..., bool]) -> Looks:
    """Compare an app, after some keys and after `more`, with the stored picture."""

    def compare(
        app: App[Any],
        size: tuple[int, int],
        *keys: str,
        more: Callable[[Pilot[Any]], Awaitable[None]] | None = None,
    ) -> None:
        async def steps(pilot: Pilot[Any]) -> None:
            await settle(pilot)
            if isinstance(app, MonitorApp):
                app.tick()
                app.update_bottom_line()  # not after a second: the line below a dialog stays as it was
                await settle(pilot)
            for key in keys:
                await pilot.press(key)
            if more is not None:
                await more(pilot)
            if isinstance(app, MonitorApp):
                app.tick()
                app.update_bottom_line()
            await settle(pilot)

        app.export_screenshot = lambda **_: screenshot(app)  # type: ignore[method-assign]
        assert snap_compare(app, terminal_size=size, run_before=steps)

    return compare


def watching(name: str = "overview", feed: Feed | None = None) -> MonitorApp:
    return MonitorApp(feed or Moment(), name, usage_meter=FixedUsage())


async def until(pilot: Pilot[Any], done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        await pilot.pause(0.02)


# ---- the screens


@pictured
@SIZES
@pytest.mark.parametrize("name", mostly_long(NAMES, "overview", "tree"))
def test_a_view(looks: Looks, name: str, size: tuple[int, int]) -> None:
    looks(watching(name), size)


@pytest.mark.long
@pictured
@pytest.mark.parametrize("name", ["overview", "tree", "pool"])
def test_a_view_on_a_light_screen(looks: Looks, name: str) -> None:
    app = watching(name)
    app.theme = LIGHT.name
    looks(app, (160, 48))


@pictured
@SIZES
@pytest.mark.parametrize("name", ["overview", pytest.param("pool", marks=pytest.mark.long)])
def test_a_view_of_a_hybrid_model(looks: Looks, name: str, size: tuple[int, int]) -> None:
    """Rows and snapshots of recurrent states are shown next to the blocks."""
    feed = Moment()
    assert feed.latest is not None
    stats = {**feed.latest.stats, **STATES, "state_bytes": 2.0**26, "state_copies": 40.0}
    feed._shown = replace(feed.latest, stats=stats)
    looks(watching(name, feed), size)


@pictured
@SIZES
@pytest.mark.parametrize("name", mostly_long(["overview", "tree", "pool"], "tree"))
def test_a_view_of_an_engine_with_a_host_tier(looks: Looks, name: str, size: tuple[int, int]) -> None:
    """Every leaf that nothing holds is shown as a node on the host."""
    feed = Moment()
    assert feed.latest is not None
    feed._shown = on_host(feed.latest)
    looks(watching(name, feed), size)


@pictured
@SIZES
def test_an_engine_with_a_disk(looks: Looks, size: tuple[int, int]) -> None:
    feed = Moment()
    assert feed.latest is not None
    shown = on_host(feed.latest)
    feed._shown = replace(shown, stats={**shown.stats, **DISK})
    looks(watching("overview", feed), size)


def on_host(shown: State) -> State:
    """Move unheld leaves to a host tier: a run of host blocks for each."""
    parents = {each.parent for each in shown.nodes.values()}
    nodes, used = dict(shown.nodes), 0
    for each in shown.nodes.values():
        if each.parent and each.id not in parents and not each.locks:
            blocks = sum(each.blocks[1::2])
            nodes[each.id] = replace(each, blocks=(used, blocks), residence="host")
            used += blocks
    stats = {**shown.stats, **HOST, "cache.host_free_blocks": 2560.0 - used, "host_tokens": 30_000.0}
    return replace(shown, facts=replace(shown.facts, host_blocks=2560), nodes=nodes, stats=stats)


@pytest.mark.long
@pictured
@SIZES
def test_the_curve_of_pool_sizes(looks: Looks, size: tuple[int, int]) -> None:
    feed = Moment()
    assert feed.latest is not None
    feed._shown = replace(feed.latest, what_if=WHAT_IF)
    looks(watching("overview", feed), size)


@pytest.mark.long
@pictured
@SIZES
def test_a_node_is_lit_in_the_pool(looks: Looks, size: tuple[int, int]) -> None:
    """Enter in the Tree shows the node's blocks in the Pool."""
    looks(watching("tree"), size, *["down"] * 9, "enter")


@pytest.mark.long
@pictured
@SIZES
def test_a_filter(looks: Looks, size: tuple[int, int]) -> None:
    async def still(pilot: Pilot[Any]) -> None:
        pilot.app.screen.query_one("View", expect_type=None).query_one(Input).cursor_blink = False

    looks(
        watching("tree"),
        size,
        "slash",
        *["space" if each == " " else "colon" if each == ":" else each for each in "min:400 cached"],
        more=still,
    )


@pictured
@SIZES
def test_the_help(looks: Looks, size: tuple[int, int]) -> None:
    looks(watching("tree"), size, "question_mark")


@pytest.mark.long
@pictured
@SIZES
def test_the_palette(looks: Looks, size: tuple[int, int]) -> None:
    async def listed(pilot: Pilot[Any]) -> None:
        commands = len([*pilot.app.get_system_commands(pilot.app.screen)])
        await until(pilot, lambda: pilot.app.screen.query_one(CommandList).option_count == commands)
        pilot.app.screen.query_one(Input).cursor_blink = False

    looks(watching("overview"), size, "ctrl+p", more=listed)


@pytest.mark.long
@pictured
@SIZES
def test_an_engine_that_is_gone(looks: Looks, size: tuple[int, int]) -> None:
    feed = Moment()
    feed.link = Status("stale", BEGAN + SECONDS, "the engine closed the connection; next attempt in 2.0 s")
    looks(watching("overview", feed), size)


@pytest.mark.long
@pictured
@SIZES
def test_a_replay(looks: Looks, size: tuple[int, int]) -> None:
    feed = FileFeed(RECORDING, clock=lambda: 0.0)

    async def halfway(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: feed.span == (BEGAN, BEGAN + SECONDS) and feed.status.sentence == "")
        feed.pause(False)
        feed.seek(BEGAN + 30.0)
        await until(pilot, lambda: feed.latest is not None and feed.latest.time == BEGAN + 30.0)

    looks(watching("tree", feed), size, more=halfway)


@pictured
@SIZES
def test_the_picker(looks: Looks, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    running = [
        FoundEngine("e1", 4711, None, BEGAN - 7200, "tiny", "0.1.0", "cpu", "/run/4711.sock"),
        FoundEngine("e2", 4711, None, BEGAN - 7190, "tiny", "0.1.0", "cpu", "/run/4711-2.sock"),
        FoundEngine("e3", 4712, None, BEGAN - 40, "Qwen/Qwen3-0.6B", "0.1.0", "cuda:0", "/run/4712.sock"),
    ]
    monkeypatch.setattr(engine_picker, "engines", lambda: running)
    looks(EnginePicker(running, clock=lambda: BEGAN), size, "down")


@pytest.mark.long
@pictured
@pytest.mark.parametrize("name", list(PICTURES))
def test_the_pictures_in_the_docs_are_what_the_script_draws(name: str) -> None:
    assert (FOLDER / f"monitor-{name}.svg").read_text(encoding="utf-8") == draw(name), (
        "python scripts/draw_monitor.py draws them again"
    )


# ---- the recording


def test_the_recording_is_small_and_holds_all_that_there_is_to_see() -> None:
    assert RECORDING.stat().st_size < 200 * 1024
    first, second, *rest = read_recording(RECORDING)
    assert isinstance(first, Hello) and first.facts.pid == 4711
    assert isinstance(second, Snapshot) and second.last and second.changes.reset
    assert len(rest) == 30 and all(isinstance(each, Delta) for each in rest)
    state = Moment().latest
    assert state is not None and state.time == BEGAN + SECONDS
    requests = [*state.ended.values(), *state.live.values()]
    assert {each.miss_reason for each in requests} >= {"full", "never_seen", "diverged", "evicted"}
    assert {each.phase for each in requests} >= {"finished", "cancelled", "decode"}
    assert any(each.streams > 1 for each in requests) and len(state.sessions) > 20
    assert any(each.wanted_again is not None for each in state.evictions.values())
    assert any(node.pins for node in state.nodes.values()) and any(node.namespace for node in state.nodes.values())
