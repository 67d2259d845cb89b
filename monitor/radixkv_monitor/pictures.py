"""Draw the app's screens at one moment, without a terminal: for the docs, for reports, and for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot

from radixkv_monitor.app import MonitorApp
from radixkv_monitor.feed import Feed, Link, Status
from radixkv_monitor.screenshot import screenshot
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.views import View

SIZE = (120, 36)
"""The columns and lines of the docs' pictures."""


class StillFeed(Feed):
    """One of the states that a builder received, shown as the state of a live engine or of another `link`; its past can
    be shown.

    `title` names the source.
    """

    def __init__(self, builder: StateBuilder, shown: State | None, title: str, link: Link = "live") -> None:
        self.title = title
        self._builder = builder
        self._shown = shown
        self.link = Status(link, shown.time if shown is not None else 0.0)

    def start(self) -> None:
        """Do nothing: everything was received already."""

    def close(self) -> None:
        """Do nothing."""

    @property
    def latest(self) -> State | None:
        """The state."""
        return self._shown

    @property
    def status(self) -> Status:
        """The value of `link`."""
        return self.link

    @property
    def now(self) -> float:
        """The time to which the state's ages count."""
        return self._shown.now if self._shown is not None else 0.0

    @property
    def span(self) -> tuple[float, float] | None:
        """The span of the received frames."""
        return self._builder.timeline.span

    def at(self, when: float) -> State | None:
        """Return an earlier state."""
        return PastStates(self._builder).at(when)


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until everything is read, laid out and drawn."""
    while any(view.is_loading for view in pilot.app.query(View)):
        await pilot.pause(0.01)
    for _ in range(3):
        await pilot.pause()
        await pilot.wait_for_scheduled_animations()


async def drawn(
    app: MonitorApp,
    keys: tuple[str, ...] = (),
    size: tuple[int, int] = SIZE,
    more: Callable[[Pilot[Any]], Awaitable[None]] | None = None,
) -> str:
    """Return the app's screen, as an SVG picture, after these keys and after `more`."""
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
