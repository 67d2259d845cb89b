"""Run the monitor's app: seven views on the keys 1 to 7, status lines around them, and the keys that all views share.

The app draws the state that Playback selects, and never waits for a feed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import ContentSwitcher, Input
from textual.widgets._toast import Toast

from radixkv import private_files
from radixkv.telemetry.command_queue import Outcome
from radixkv.telemetry.discovery import FoundEngine
from radixkv_monitor.alert_settings import AlertSettings
from radixkv_monitor.alerts import Alerter
from radixkv_monitor.dialogs import (
    KEYS,
    ConfirmScreen,
    ExportScreen,
    HelpScreen,
    InfoScreen,
    SafeCommandPalette,
    copied_json,
    copied_text,
    key_name,
    shown_bindings,
    verdict_texts,
    view_texts,
)
from radixkv_monitor.engine_picker import EngineScreen
from radixkv_monitor.feed import Feed
from radixkv_monitor.feed_factory import feed_of_found
from radixkv_monitor.formatting import plural
from radixkv_monitor.playback import Playback
from radixkv_monitor.questions import CommandAsked, Question, can_control
from radixkv_monitor.screenshot import screenshot
from radixkv_monitor.self_usage import FRAMES_PER_SECOND, FrameLimiter, UsageMeter
from radixkv_monitor.shutdown import exit_on_signals, has_shell
from radixkv_monitor.state import State
from radixkv_monitor.theme import DARK, LIGHT, THEMES
from radixkv_monitor.views import VIEWS, Selected, Selection, Table, View
from radixkv_monitor.widgets.status_lines import Banner, BottomLine, TopLine

LINK_KINDS = {"stale": "bad", "silent": "warn"}
"""The colour of the source's condition, where it is no plain one."""
REPLY_NOTICE = 1.5
"""The seconds without a reply after which a notification says that a command was sent."""


class MonitorApp(App[None]):
    """Show the states of `feed`, beginning with the view `start_screen`.

    A `usage_meter` adds the monitor's own cost to the bottom line. A `frame_limiter` limits how often the app draws
    without a key press. `alerts` has the thresholds of the verdict and the reactions to a change of its level. Raises
    InvalidInput if the log of verdicts that it names cannot be opened. With `read_only` no commands are offered.
    """

    CSS_PATH = "app.tcss"
    TITLE = "radixkv-monitor"
    BINDINGS: ClassVar[list[BindingType]] = [*KEYS]

    def __init__(
        self,
        feed: Feed,
        start_screen: str = "overview",
        *,
        sort: str | None = None,
        record_to: Path | None = None,
        usage_meter: UsageMeter | None = None,
        frame_limiter: FrameLimiter | None = None,
        theme: Theme = DARK,
        alerts: AlertSettings | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__()
        self.feed = feed
        self.start_screen = start_screen
        self.sort = sort
        self._record_to = record_to
        self.playback = Playback(feed)
        self.alerter = Alerter(feed, alerts or AlertSettings(), write_terminal=self._write_terminal)
        self.selection = Selection()
        self.shown: State | None = None
        self.read_only = read_only
        self._usage_meter, self._frame_limiter = usage_meter, frame_limiter
        self._drawn: tuple[object, ...] = ()
        self._top = TopLine([(entry.name, entry.title) for entry in VIEWS])
        self._banner = Banner()
        self._bottom = BottomLine()
        for each in THEMES:
            self.register_theme(each)
        self.theme = theme.name

    def compose(self) -> ComposeResult:
        """Lay out the parts from top to bottom."""
        yield self._top
        yield self._banner
        yield ContentSwitcher(id="views")
        yield self._bottom

    async def on_mount(self) -> None:
        """Start reading and drawing."""
        exit_on_signals(self, lambda: self.feed.close())
        self.app_resume_signal.subscribe(
            self, lambda _: self.refresh(layout=True)
        )  # the shell has drawn over the screen
        self.feed.start()
        await self.action_show(self.start_screen)
        self.set_interval(0.5 / FRAMES_PER_SECOND, self._tick_if_due)
        self.set_interval(1, self.update_bottom_line)
        self.set_interval(1, self.alerter.check)
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.update_bottom_line())
        self.theme_changed_signal.subscribe(self, lambda _: self._update_view())

    def on_unmount(self) -> None:
        """Close the feed."""
        self.feed.close()

    @property
    def view(self) -> View | None:
        """Return the view that is shown."""
        found = self.screen_stack[0].query(ContentSwitcher) if self.screen_stack else ()
        current = found[0].visible_content if found else None
        return current if isinstance(current, View) else None

    # ---- drawing

    def _tick_if_due(self) -> None:
        """Draw, unless the frame limiter refuses."""
        if self._frame_limiter is None or self._frame_limiter.ready():
            self.tick()

    def tick(self) -> None:
        """Draw if anything differs from the screen, or if a second has passed."""
        if not self.is_running:  # the views are being removed
            return
        state = self.playback.state_to_draw()
        self._update_frame()
        if state is None:
            return
        if self.read_only and state.control:
            state = replace(state, control=False)
        if self._record_to is not None:
            path, self._record_to = self._record_to, None
            self._write(path, self.feed.record)
        moment = (state.line, state.tick, int(state.now), state.baseline)
        key = (*moment, state.stale, state.frozen, state.end_reason, int(state.silence), state.control)
        if key != self._drawn:
            commands_changed = can_control(state) != can_control(self.shown)
            self._drawn, self.shown = key, state
            if self._frame_limiter is not None:
                self._frame_limiter.drawn()
            self._update_view()
            if commands_changed:
                self.screen_stack[0].refresh_bindings()

    def _update_frame(self) -> None:
        """Update the status lines around the view, and their style."""
        facts = self.shown.facts if self.shown is not None else None
        source = self.feed.title
        if facts is not None:  # the peer names the engine too, if its process has several, as the picker does
            has_several = self.feed.peer.startswith(f"{facts.pid}-")
            source = f"{facts.model} · pid {self.feed.peer if has_several else facts.pid}"
        self._top.set_text(source, self.playback.link, LINK_KINDS.get(self.feed.status.link, ""))
        self._banner.set_text(*self.playback.banner)
        self.screen_stack[0].set_class(self.feed.status.link == "stale", "-stale")

    def update_bottom_line(self) -> None:
        """Show the keys, first the view's, and the monitor's cost."""
        first = self.screen_stack[0]
        if self.screen is not first:
            return
        shown = [each for each in first.active_bindings.values() if each.binding.show and each.enabled]
        shown.sort(key=lambda each: each.node is self)
        once = {
            each.binding.action: each.binding for each in reversed(shown)
        }  # if several keys do the same, keep the first
        keys = [(each.key_display or key_name(each.key), each) for each in reversed(once.values())]
        cost = str(self._usage_meter.read(self.feed.traffic)) if self._usage_meter is not None else ""
        self._bottom.set_text(keys, cost if self.size.width >= 120 else cost.partition(", ")[0])

    # ---- views

    async def action_show(self, name: str) -> None:
        """Show a view; create it when it is shown first."""
        entry = next(each for each in VIEWS if each.name == name)
        switcher = self.screen_stack[0].query_one("#views", ContentSwitcher)
        if all(child.id != name for child in switcher.children):
            made = entry.load()(id=name)
            made.thresholds = self.alerter.settings.thresholds
            await switcher.add_content(made)
            if self.sort is not None:
                made.sort_by(self.sort)
        switcher.current = name
        self._top.show(name)
        self._update_view()
        if self.view is not None:
            self.view.select(self.selection)
            self.view.take_focus()

    def _update_view(self) -> None:
        if self.view is not None and self.shown is not None:
            self.view.update(self.shown)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys of views in dialogs and where they are characters of a filter.

        They act before the next key is handed to a widget, which may be a slash.
        """
        if action == "view" and (len(self.screen_stack) > 1 or isinstance(self.focused, Input)):
            return False
        return super().check_action(action, parameters)

    async def action_view(self, name: str) -> None:
        """Show a view, for a key."""
        await self.action_show(name)

    @on(Selected)
    async def remember(self, message: Selected) -> None:
        """Remember the selection, and show the view that the message names if it asks for that."""
        self.selection = replace(self.selection, **{message.kind: message.number})
        if message.show:
            await self.action_show(message.home)

    # ---- commands to the engine

    @on(CommandAsked)
    def confirm(self, message: CommandAsked) -> None:
        """Ask before a command is sent."""
        asked = message.question
        self.push_screen(ConfirmScreen(asked.title, asked.consequences), partial(self._confirmed, self.feed, asked))

    def _confirmed(self, feed: Feed, asked: Question, answer: bool | None) -> None:
        if not answer:
            return
        if feed is not self.feed or not can_control(self.playback.state_to_draw()) or self.read_only:
            self._report(Outcome(False, "the screen no longer shows the present state of that engine"))
        else:
            self.run_worker(self._send(feed, asked), exit_on_error=False)

    async def _send(self, feed: Feed, asked: Question) -> None:
        """Send a command, and show the engine's reply. It may come after a long step."""
        reply = asyncio.wrap_future(feed.command(asked.verb, asked.number, asked.engine))
        done, _ = await asyncio.wait((reply,), timeout=REPLY_NOTICE)
        if not done:
            self.notify("The engine executes commands between two steps.", title="Sent", markup=False)
        self._report(await reply)

    def _report(self, outcome: Outcome) -> None:
        text = f"{outcome.text[:1].upper()}{outcome.text[1:]}."
        if outcome.done:
            self.notify(text, title="Done", markup=False)
        else:
            self.notify(text, title="Not done", severity="warning", markup=False)

    # ---- the source

    def action_switch(self) -> None:
        """Ask for another engine to watch."""
        shown = self.shown
        present = f"{self.feed.title}, watched now"
        self.push_screen(EngineScreen(present, shown.facts.engine if shown is not None else ""), self._switch)

    async def _switch(self, found: FoundEngine | None) -> None:
        if found is not None:
            await self.switch_to(feed_of_found(found))

    async def switch_to(self, feed: Feed) -> None:
        """Show another source from now on. A recording ends, and views lose their selections and filters."""
        old, recording = self.feed, self.feed.recording
        if recording is not None and recording.running:
            old.stop_recording()
            self.notify(f"Recorded to {recording.path}: the recording ends with its engine")
        Thread(target=old.close, name="radixkv-monitor-close", daemon=True).start()  # it may take a second
        self.feed, self.playback = feed, Playback(feed)
        self.alerter.watch(feed)
        self.selection, self.shown, self._drawn = Selection(), None, ()
        switcher = self.screen_stack[0].query_one("#views", ContentSwitcher)
        name = switcher.current or self.start_screen
        switcher.current = None
        await switcher.remove_children()
        feed.start()
        await self.action_show(name)
        self.tick()

    # ---- keys

    def action_freeze(self) -> None:
        """Freeze the screen or resume it; the feed is read in either case."""
        self.playback.freeze()
        self.tick()

    def action_scrub(self, seconds: float) -> None:
        """Move through the recorded past."""
        self.playback.scrub(seconds)
        self.tick()

    def action_speed(self, steps: int) -> None:
        """Play a recording faster or slower."""
        if self.playback.replay is None:
            self.notify("Only recordings have a speed: use radixkv-monitor --replay FILE", severity="warning")
        else:
            self.playback.replay.faster(steps)
            self.tick()

    def action_baseline(self) -> None:
        """Count "run" from now on."""
        began = self.playback.set_baseline()
        self.notify('Counting "run" from now on' if began else 'Counting "run" since the monitor attached')
        self.tick()

    def action_record(self) -> None:
        """Start a recording, or stop it."""
        recording = self.feed.recording
        if recording is not None and recording.running:
            self.feed.stop_recording()
            self.notify(f"Recorded to {recording.path}")
        else:
            self._write(_new_path("recording", "rec"), self.feed.record)
        self._update_frame()

    def action_save(self) -> None:
        """Write the last minutes to a file, as a recording."""
        self._write(_new_path("past", "rec"), self.feed.save)

    def action_export(self) -> None:
        """Ask for a format and write a file."""
        if self.view is not None:
            self.push_screen(ExportScreen(), self._export)

    def action_copy(self, form: str) -> None:
        """Copy the selected item to the terminal's clipboard (OSC 52): its description, or as JSON."""
        if self.view is None or self.shown is None:
            return
        text = copied_json(self.view) if form == "json" else copied_text(self.view, self.shown)
        self.copy_to_clipboard(text)
        first, *others = text.splitlines() or [""]
        more = f" and {plural(len(others), 'more line')}" if others else ""
        self.notify(f"{first[:60]}{more}", title="Copied, if the terminal allows it")

    def action_suspend_process(self) -> None:
        """Stop the process until the shell resumes it; warn if no shell can."""
        if has_shell():
            super().action_suspend_process()
        else:
            self.notify("There is no shell to return to; q quits", severity="warning")

    def action_maximise(self) -> None:
        """Hide the status lines around the view, or show them again."""
        self.screen_stack[0].toggle_class("-bare")

    def action_theme(self) -> None:
        """Switch between the dark and the light theme."""
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name

    def action_help(self) -> None:
        """Show the keys of this view and the common keys."""
        view = self.view
        own = [*shown_bindings(view)] if view is not None else []
        title = next((entry.title for entry in VIEWS if view is not None and entry.name == view.id), "")
        sections: list[tuple[str, Iterable[Binding]]] = [("Everywhere", KEYS)]
        if own:
            sections.insert(0, (title, own))
        self.push_screen(HelpScreen(sections))

    def action_info(self) -> None:
        """Show in full the texts that lines may cut."""
        parts = [("Notices", self.playback.banner[0])]
        if self.shown is not None:
            parts = [*verdict_texts(self.shown, self.alerter.settings.thresholds), *parts]
        if self.view is not None:
            parts += view_texts(self.view)
        self.push_screen(InfoScreen(parts))

    def action_command_palette(self) -> None:
        """Open the command palette, unless it is open."""
        if not isinstance(self.screen, SafeCommandPalette):
            self.push_screen(SafeCommandPalette(id="--command-palette"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """List the commands of the palette: every view, and every key with an immediate effect.

        Of Textual's own commands only those that do something here are listed, last.
        """
        for entry in VIEWS:
            show = partial(self.call_later, self.action_show, entry.name)
            yield SystemCommand(entry.title, entry.about.capitalize(), show)
        yield SystemCommand("Engines", "Watch another running engine", self.action_switch)
        yield SystemCommand("Info", "Show the selected item and the verdict in full", self.action_info)
        yield SystemCommand("Freeze", "Freeze the screen, or resume", self.action_freeze)
        yield SystemCommand("Record", "Start or stop recording to a file", self.action_record)
        yield SystemCommand("Save the past", "Write the last ten minutes to a file", self.action_save)
        yield SystemCommand("Export", "Export this view to a file", self.action_export)
        yield SystemCommand("Baseline", 'Count "run" from now on, or since the monitor attached', self.action_baseline)
        yield SystemCommand("Dark or light", "Switch between the dark and the light theme", self.action_theme)
        yield SystemCommand("Bare", "Hide or show the lines around the view", self.action_maximise)
        yield SystemCommand("Copy", "Copy the description of the selected item", partial(self.action_copy, "text"))
        yield SystemCommand("Copy as JSON", "Copy the selected item as JSON", partial(self.action_copy, "json"))
        yield SystemCommand("Help", "Show all keys and the meaning of the words", self.action_help)
        yield SystemCommand("Theme", "Choose a theme from a list", self.action_change_theme)
        yield SystemCommand("Quit", "Quit the monitor", self.action_quit)

    # ---- alerts

    def _write_terminal(self, text: str) -> None:
        """Write a control sequence to the terminal, between two updates of the screen."""
        if self._driver is not None and not self.is_headless:
            self._driver.write(text)

    # ---- files

    async def _export(self, kind: str | None) -> None:
        view = self.view
        if kind is None or view is None:
            return
        if kind == "svg":
            # The dialog and older notifications are still on screen; take the picture after they are gone.
            await self.screen_stack[0].query(Toast).remove()
            self.call_after_refresh(lambda: self._save_text(str(view.id), "svg", screenshot(self)))
        else:
            self._write_table(view.export(), kind)

    def _write_table(self, table: Table, kind: str) -> None:
        self._save_text(table.name, kind, table.to_json() if kind == "json" else table.to_csv())

    def _save_text(self, name: str, kind: str, text: str) -> None:
        self._write(_new_path(name, kind), partial(private_files.write, data=text.encode()))

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a new file, and report the path or the error."""
        try:
            write(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self.notify(f"{path}: {reason}", title="Nothing was written", severity="error")
        else:
            self.notify(f"{path}", title="Recording to" if write == self.feed.record else "Written")


def _new_path(name: str, kind: str) -> Path:
    """Return a path in the current folder that does not exist yet."""
    stem = f"radixkv-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (f"{stem}{f'-{number}' if number else ''}.{kind}" for number in range(1_000_000))
    return next(path for path in (Path.cwd() / name for name in names) if not path.exists())
