"""Attach the app over the socket to a real engine in another process; the screen must agree with the engine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.telemetry import discovery
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.live import SocketFeed
from tests.monitor.view_host import screen

DEADLINE = 45.0  # the deadline in seconds, on a busy machine


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a runtime folder for the test, with a path short enough for sockets."""
    made = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    monkeypatch.delenv("RADIXKV_MONITOR", raising=False)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def engine(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process, and wait until its engine works."""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.monitor.watched_engine"],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    assert int(child.stdout.readline()) == child.pid
    yield child
    child.kill()
    child.wait()


def say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.05)


@pytest.mark.long
def test_the_screen_and_the_command_say_what_the_engine_says(engine: subprocess.Popen[str]) -> None:
    async def watch() -> None:
        feed = SocketFeed("test", lambda: discovery.connect(engine.pid, hz=10.0))
        app = MonitorApp(feed)
        async with app.run_test(size=(160, 48)) as pilot:
            await until(lambda: app.shown is not None and app.shown.stats.get("finished", 0) > 3)
            under_load = app.shown
            assert under_load is not None and not under_load.stale
            assert under_load.sessions and under_load.nodes
            say(engine)
            assert engine.stdout is not None
            truth = json.loads(await asyncio.to_thread(engine.stdout.readline))
            await asyncio.to_thread(the_command_says, engine.pid, truth)
            await until(lambda: app.shown is not None and app.shown.stats["finished"] == truth["finished"])
            await until(lambda: app.shown is not None and not app.shown.live and not app.shown.sequences)
            shown = app.shown
            assert shown is not None
            for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "steps", "running"):
                assert shown.stats[name] == truth[name], name
            for name, value in truth["cache"].items():
                assert shown.stats[f"cache.{name}"] == value, name
            await pilot.press("2", "1")
            await pilot.pause(0.3)
            text = "\n".join(screen(app))
            cache = truth["cache"]
            assert f"{cache['num_blocks']:,} blocks of {cache['block_size']} tokens" in text
            assert f"{cache['nodes']:,} nodes" in text
            assert f"{truth['finished']:,} finished" in text.replace("  ", " ")
            assert sum(node.tokens for node in shown.nodes.values()) > 0
            owned = {block for node in shown.nodes.values() for block in _blocks(node.blocks)}
            assert len(owned) == cache["cached_blocks"] + cache["held_blocks"]
            engine.kill()
            await until(lambda: app.shown is not None and app.shown.stale)
            assert any("stale" in line.lower() or "reach" in line.lower() for line in screen(app))

    asyncio.run(watch())


def the_command_says(pid: int, truth: dict[str, Any]) -> None:
    """Check that `radixkv-monitor --once --json` prints the state of the engine."""
    command = [sys.executable, "-c", "import sys; from radixkv_monitor.cli import main; sys.exit(main())"]
    expected = (truth["cache"]["free_blocks"], truth["cache"]["cached_blocks"])
    end = time.monotonic() + DEADLINE
    while True:  # a client gets the last published state at once, which may be older than the engine's rest
        said = subprocess.run(
            [*command, str(pid), "--once", "--json"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        printed = json.loads(said.stdout)
        assert printed["engine"]["pid"] == pid
        pool = printed["summary"]["pool"]
        if (pool["free"], pool["cached"]) == expected or time.monotonic() > end:
            break
    assert (pool["free"], pool["cached"]) == expected


def _blocks(runs: tuple[int, ...]) -> Iterator[int]:
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(first, first + count)
