"""Make Textual's pilot wait for an app on a busy machine, too."""

from __future__ import annotations

import asyncio

import pytest
from textual._wait import wait_for_idle


async def wait_for_messages(min_sleep: float = 1 / 50, max_sleep: float = 5) -> None:
    """Run the event loop until messages have passed through the app; then wait as Textual does.

    Textual compares CPU time with wall time over 20 ms. A process that gets no CPU for that time looks idle, although
    its messages are still waiting.
    """
    for _ in range(2):
        for _ in range(100):
            await asyncio.sleep(0)
        await wait_for_idle(min_sleep, max_sleep)


@pytest.fixture(autouse=True)
def _patient_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("textual.app", "textual.pilot"):
        monkeypatch.setattr(f"{module}.wait_for_idle", wait_for_messages)
