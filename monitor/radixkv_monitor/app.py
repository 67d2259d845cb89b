"""The monitor's app: views behind the keys 1 to 6, a line above and a line below them, and what is common to all.

Knows a feed, the table of views and the person's keys. Does not know what a view draws or where a state comes from.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher

from radixkv_monitor.feed import Feed, Status
from radixkv_monitor.messages import Selected, Selection
from radixkv_monitor.state import State
from radixkv_monitor.views import VIEWS, View

FRAMES_PER_SECOND = 10


class MonitorApp(App[None]):
    """Shows what `feed` tells, beginning with the view `start_screen`."""

    CSS_PATH = "app.tcss"
    TITLE = "radixkv-monitor"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i), f"show('{entry.name}')", entry.title, show=False) for i, entry in enumerate(VIEWS, 1)),
        Binding("space", "freeze", "Freeze"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, feed: Feed, start_screen: str = "overview") -> None:
        super().__init__()
        self.feed = feed
        self.start_screen = start_screen
        self.shown: State | None = None
        self.selection = Selection()
        self.is_frozen = False
        self._drawn: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        yield ContentSwitcher(id="views")

    async def on_mount(self) -> None:
        """Start to read and to draw."""
        self.feed.start()
        await self.action_show(self.start_screen)
        self.set_interval(1 / FRAMES_PER_SECOND, self.tick)

    def on_unmount(self) -> None:
        """Let the feed go."""
        self.feed.close()

    @property
    def view(self) -> View | None:
        """The view in front."""
        current = self.query_one("#views", ContentSwitcher).visible_content
        return current if isinstance(current, View) else None

    def tick(self) -> None:
        """Draw the feed's newest state, if it differs from what is shown, or a second has passed."""
        latest = self.shown if self.is_frozen else self.feed.latest
        if latest is None:
            return
        status = self.feed.status
        key = (latest.line, latest.tick, status, self.is_frozen, int(time.time()))
        if key == self._drawn:
            return
        self._drawn = key
        self._draw(latest, status)

    def _draw(self, state: State, status: Status) -> None:
        live = status.link == "live" and not self.is_frozen
        now = max(state.time, time.time()) if live else state.now
        self.shown = replace(state, now=now, stale=status.link == "stale", frozen=self.is_frozen)
        if self.view is not None:
            self.view.update(self.shown)

    async def action_show(self, name: str) -> None:
        """Bring a view to the front; it is made when it is first shown."""
        entry = next(each for each in VIEWS if each.name == name)
        switcher = self.query_one("#views", ContentSwitcher)
        if not switcher.query(f"#{name}"):
            await switcher.add_content(entry.load()(id=name))
        switcher.current = name
        if self.view is not None:
            self.view.select(self.selection)
            if self.shown is not None:
                self.view.update(self.shown)

    def action_freeze(self) -> None:
        """Stop the picture, or let it go on; reading goes on in either case."""
        self.is_frozen = not self.is_frozen
        self.tick()

    @on(Selected)
    async def remember(self, message: Selected) -> None:
        """Remember what was selected, tell the view in front, and bring its home to the front if it asks for that."""
        self.selection = replace(self.selection, **{message.kind: message.number})
        if message.show:
            await self.action_show(message.home)
        elif self.view is not None:
            self.view.select(self.selection)
