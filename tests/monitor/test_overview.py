"""Test that the Overview shows the summary's numbers, at both sizes and for extreme values."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from radixkv.telemetry.records import PROCESS_NAMES, Changes
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.state import Sample
from radixkv_monitor.views.overview import OverviewView
from radixkv_monitor.widgets.panel import Panel
from tests.monitor.fake_feed import FACTS, FakeFeed
from tests.monitor.samples import request

SIZES = pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)], ids=["80x24", "160x48"]
)
ENDED = {"submitted": 990.0, "admitted": 990.1, "first_token": 990.3, "ended": 992.0}
"""The times of a request before 1000 s, which is the time of the states here."""
STATS = {
    "prompt_tokens": 10_000.0,
    "cached_tokens": 9_300.0,
    "output_tokens": 2_500.0,
    "decode_tokens": 2_460.0,
    "prefill_tokens": 700.0,
    "finished": 41.0,
    "running": 3.0,
    "waiting": 1.0,
    "steps": 500.0,
    "step_seconds": 10.0,
    "step_tokens": 3_000.0,
    "cache.cached_blocks": 40.0,
    "cache.held_blocks": 8.0,
    "cache.pinned_blocks": 2.0,
    "cache.query_tokens": 10_000.0,
    "cache.regret_tokens": 100.0,
    "cache.evicted_tokens": 500.0,
    "monitor_ns": 2e6,
    "audited_blocks": 12.0,
}


def text_of(view: OverviewView) -> str:
    return "\n".join(line.plain for panel in view.query(Panel) if panel.display for line in panel._lines)


def drawn(changes: Changes, size: tuple[int, int], history: tuple[Sample, ...] = ()) -> tuple[str, int]:
    """Return the Overview's text for a state, and its widest line."""
    feed = FakeFeed(changes)
    assert feed.state is not None
    feed.state = replace(feed.state, history=history)
    app = MonitorApp(feed)
    said: list[str] = []

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await settled(pilot)
            app.tick()
            await settled(pilot)
            assert isinstance(app.view, OverviewView)
            said.append(text_of(app.view))
            for panel in app.view.query(Panel):
                assert panel.region.bottom <= size[1] - 1, "nothing hides behind the foot"
                assert not panel.display or len(panel._lines) <= max(1, panel.size.height)

    asyncio.run(run())
    return said[0], max(map(len, said[0].splitlines()))


async def settled(pilot: Pilot[None]) -> None:
    for _ in range(3):
        await pilot.pause()


@SIZES
def test_all_numbers_are_on_screen(size: tuple[int, int]) -> None:
    ended = (request(**ENDED), request(**ENDED | {"number": 2, "cached_tokens": 0, "first_token": 991.2}))
    history = (Sample(940.0, FACTS.engine, {}), Sample(1000.0, FACTS.engine, STATS))
    changes = Changes(time=1000.0, reset=True, stats=STATS, requests=ended)
    text, _ = drawn(changes, size, history)
    for words in (
        "Running: 93% of 10,000 prompt tokens from cache and 0 preemptions in the last minute; pool 75% full",
        "tiny · cpu float32 · torch attention · eviction lru",
        "64 blocks of 16 tokens, 64.0 KiB",
        "active 9% 6",
        "pinned 3% 2",
        "cached 62% 40",
        "free 25% 16",
        "Hit rate  of prompt tokens, 1 min",
        "93% 1 min  93% run  93% since load",
        "100%┤",
        "TTFT hit      1 300 ms 300 ms 300 ms",
        "TTFT miss     1  1.2 s  1.2 s  1.2 s",
        "ITL        not sent by this engine",
        "1 min: number, p50, p90, p99",
        "queue time    2 100 ms 100 ms 100 ms",
        "41 decode  12 prefill  155 cached",
        "- CPU and RSS: not sent by this engine",
        "  41┤",
        "20 ms and  6 tokens per step, 1 min",
        "3 running  1 waiting  0 preempted",
        "41 finished  0 cancelled, 1 min",
        "8 tokens/s, 10 s",
        "1% regret of 10k tokens, 1 min",
        "1% regret of 10k tokens, since load",
        "none since load",
        "of time for telemetry",
    ):
        assert words in text, words


def test_an_engine_that_drafts_has_the_tokens_per_step_of_a_stream() -> None:
    drafts = {"drafting_steps": 200.0, "accepted_from_own": 120.0, "accepted_from_tree": 40.0}
    history = (Sample(940.0, FACTS.engine, {"drafting_steps": 100.0}), Sample(1000.0, FACTS.engine, STATS | drafts))
    changes = Changes(time=1000.0, reset=True, stats=STATS | drafts)
    text, _ = drawn(changes, (80, 24), history)
    assert "20 ms and  6 tokens per step, 1 min\n2.6 per stream with drafts, 1 min" in text
    assert "with drafts" not in drawn(Changes(time=1000.0, reset=True, stats=STATS), (80, 24))[0]


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ({"process_cpu_seconds": 100.0, "process_rss_bytes": 2.0**30}, "150% of a core, 10 s  1.0 GiB RSS"),
        (
            dict(zip(PROCESS_NAMES, (100.0, 2.0**30, 6 * 2.0**30, 24 * 2.0**30), strict=True)),
            "6.0 GiB device memory of 24.0 GiB, 25%",
        ),
    ],
)
def test_the_process_of_the_engine(stats: dict[str, float], words: str) -> None:
    before = {"process_cpu_seconds": 10.0}
    history = (Sample(940.0, FACTS.engine, before), Sample(1000.0, FACTS.engine, STATS | stats))
    text, _ = drawn(Changes(time=1000.0, reset=True, stats=STATS | stats), (160, 48), history)
    assert words in text and "not sent by this engine" in text, "the ITL is still missing"
    assert "CPU and RSS" not in text
