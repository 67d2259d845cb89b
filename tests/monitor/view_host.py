"""One view in an app of its own, and states with given values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from textual.app import App, ComposeResult
from textual.pilot import Pilot

from radixkv_monitor.state import State
from radixkv_monitor.views import Selected, View
from tests.monitor import fake_feed

FACTS = replace(fake_feed.FACTS, engine="e1", pid=1, started=900.0, version="0", max_length=1024)


def state(now: float = 1002.0, **values: Any) -> State:
    """Return a state of the named values only; lists of records are keyed by id or number."""
    usual: dict[str, Any] = {
        "line": 1,
        "tick": 1,
        "time": now,
        "now": now,
        "facts": FACTS,
        "stats": {},
        "nodes": {},
        "sequences": {},
        "live": {},
        "ended": {},
        "sessions": {},
        "evictions": {},
    }
    for name, given in values.items():
        if isinstance(given, list):
            given = {getattr(each, "number", getattr(each, "id", None)): each for each in given}
        usual[name] = given
    return State(**usual)


class Host(App[None]):
    """An app with one view; `selections` are the selections that the view posted."""

    CSS = "View { width: 1fr; height: 1fr; }"

    def __init__(self, view: View, shown: State | None = None) -> None:
        super().__init__()
        self.hosted = view
        self.selections: list[Selected] = []
        self._shown = shown

    def compose(self) -> ComposeResult:
        yield self.hosted

    def on_mount(self) -> None:
        if self._shown is not None:
            self.hosted.update(self._shown)

    def on_node_selected(self, message: Selected) -> None:
        self.selections.append(message)

    def on_block_selected(self, message: Selected) -> None:
        self.selections.append(message)

    def on_host_block_selected(self, message: Selected) -> None:
        self.selections.append(message)

    def on_request_selected(self, message: Selected) -> None:
        self.selections.append(message)


def hosted(
    view: View, shown: State | None, script: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = (160, 48)
) -> Host:
    """Run `script` on the view in an app of this size."""
    app = Host(view, shown)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            view.take_focus()
            await pilot.pause()
            await script(pilot)

    asyncio.run(run())
    return app


def screen(app: App[Any]) -> list[str]:
    """Return the screen as lines of text."""
    lines = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
