"""Test that frames are drawn at the highest rate, and less often where they are expensive."""

from __future__ import annotations

import asyncio

import pytest

from radixkv.telemetry.records import Changes
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.self_usage import FRAMES_PER_SECOND, LONGEST_INTERVAL, FrameLimiter
from tests.monitor.fake_feed import FakeFeed


def pictures(cost: float, rest: float, seconds: float = 60.0, share: float = 0.17) -> tuple[int, float]:
    """Return the frames drawn in `seconds`, and the share of a core they took, if a frame takes `cost` and other work
    `rest`.
    """
    now = spent = 0.0
    frame_limiter = FrameLimiter(share, clock=lambda: now, spent=lambda: spent)
    drawn = 0
    for step in range(1, int(seconds * 10) + 1):
        spent += (step / 10 - now) * rest
        now = step / 10
        if frame_limiter.ready():
            frame_limiter.drawn()
            spent += cost
            drawn += 1
    return drawn, spent / seconds


def test_cheap_pictures_come_as_often_as_anyone_reads_them() -> None:
    drawn, _ = pictures(cost=0.01, rest=0.05)
    assert drawn == pytest.approx(60 * FRAMES_PER_SECOND, rel=0.01)


@pytest.mark.parametrize("cost", [0.02, 0.03, 0.05, 0.08, 0.12])
def test_dear_pictures_come_less_often_rather_than_cost_more(cost: float) -> None:
    drawn, taken = pictures(cost, rest=0.05)
    assert taken <= 0.175
    assert drawn >= min(60 * FRAMES_PER_SECOND, 0.6 * 60 * (0.17 - 0.05) / cost), "nor much less often than they may"


def test_a_picture_comes_each_second_whatever_it_costs() -> None:
    drawn, taken = pictures(cost=0.9, rest=0.05)
    assert drawn == pytest.approx(60 / LONGEST_INTERVAL, abs=1) and taken > 0.5


def test_an_app_asks_before_each_picture_but_not_when_a_key_was_pressed() -> None:
    asked = []

    class Never(FrameLimiter):
        def ready(self) -> bool:
            asked.append(True)
            return False

    async def run() -> None:
        app = MonitorApp(FakeFeed(Changes(1.0)), frame_limiter=Never())
        async with app.run_test() as pilot:
            while not asked:
                await pilot.pause(0.05)
            assert app.shown is None
            await pilot.press("space")
            assert app.shown is not None

    asyncio.run(run())
