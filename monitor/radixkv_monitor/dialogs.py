"""Dialogs over a view: help, export, full texts, and the command palette; and the keys that work in every view.

Textual's palette (8.2) fails on keys that arrive before its list is drawn or after it has answered; ours ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList, Static

from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.formatting import clock
from radixkv_monitor.print_once import to_text
from radixkv_monitor.state import State
from radixkv_monitor.summary import summarise, verdict
from radixkv_monitor.views import VIEWS, View

Result = TypeVar("Result")

WORDS = (
    ("free", "blocks without content"),
    ("cached", "blocks that only the tree holds; evicted when room is needed"),
    ("active", "blocks of open sequences; never evicted"),
    ("pinned", "blocks that a pin holds, until it is released or expires"),
    ("rows", "slots for the recurrent states of open sequences, in models that have such state"),
    ("snapshots", "slots for recurrent states in the tree, which later prompts resume from"),
    ("host", "host memory: blocks that leave the pool are offloaded there, and loaded when needed again"),
    ("● ○ ◆ ▽ □", "nodes held by a sequence, not held, held by a pin, marked as done, on the host"),
    ("hit rate", "cached share of all prompt tokens; a request counts when it is admitted"),
    ("share", "tokens of a node and its descendants, of all tokens in the tree"),
    ("idle", "the time since the last use of a node, or of the node that owns a block"),
    ("reused", "requests whose cached prefix includes a node, since the node is cached"),
    ("ended here", "requests whose cached prefix ended at a node; a removed last child leaves them to its parent"),
    ("hit, miss", "at least half of the prompt was cached, or less"),
    ("run", "since the monitor attached, or since b was pressed"),
    ("TTFT", "time from submission to the first token, the queue time included"),
    ("queue time", "time from submission to the first admission"),
    ("ITL", "time between two output tokens of a stream, preemptions and pauses included"),
    ("E2E", "time from submission to the end of a finished request"),
    ("p50 p90 p99", "times that 50, 90 and 99 of 100 measured ones do not exceed"),
    (
        "timed out",
        "ended by the request's own timeout; failed requests ended by an error, and cancelled ones by the caller",
    ),
    (
        "new, evicted",
        "prompt tokens that were computed because they were never seen, or had been evicted; diverged: the prompt "
        "departs from all cached prompts",
    ),
    ("verdict", "the first line of the Overview; its level is good, idle, warn or bad, and i lists the changes"),
    ("░ ▒ █ ─", "a request over time: waiting, prefill, decode, preempted"),
    ("regret", "tokens that were requested again after they were evicted"),
    ("audit", "cached blocks that were computed again, to verify their content"),
    ("silent", "the engine is connected, but has sent nothing for 3 seconds or more"),
    ("stale", "the engine cannot be reached; the screen shows its last state"),
)
"""The meaning of the words on the screens."""


class TextDialog(ModalScreen[Result]):
    """A text in a box that scrolls, and keys that close it with a result."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll(1)", "down", show=False),
        Binding("up,k", "scroll(-1)", "up", show=False),
    ]

    def text(self) -> Content:
        """Return the text."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Lay out the text."""
        with VerticalScroll(id="dialog"):
            yield Static(self.text(), markup=False)

    def action_scroll(self, lines: int) -> None:
        """Scroll by `lines`."""
        self.query_one("#dialog").scroll_relative(y=lines, animate=False)


class TextScreen(TextDialog[None]):
    """A text to read."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Close")]


class InfoScreen(TextScreen):
    """Show the titled texts `parts`; empty ones are left out."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("i", "dismiss", "Close")]

    def __init__(self, parts: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.parts = [(title, text) for title, text in parts if text]

    def text(self) -> Content:
        """Return the titles and texts."""
        return Content("").join(
            Content.assemble((title, "bold $primary"), f"\n{text}\n\n") for title, text in self.parts
        )


class HelpScreen(TextScreen):
    """Show all keys, and the words that the screens use."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "dismiss", "Close")]

    def __init__(self, sections: Sequence[tuple[str, Iterable[Binding]]]) -> None:
        super().__init__()
        self._sections = sections

    def text(self) -> Content:
        """List the keys by section, then the words."""
        parts = [
            Content.styled("radixkv-monitor", "bold $primary"),
            Content("  shows a running engine. Only an engine with monitor='rw' executes commands.\n"),
        ]
        for title, bindings in self._sections:
            parts.append(Content.styled(f"\n{title}\n", "bold"))
            parts += [_line(keys, meaning) for meaning, keys in _grouped(bindings)]
        parts.append(Content.styled("\nWords\n", "bold"))
        parts += [_line(word, meaning) for word, meaning in WORDS]
        return Content("").join(parts)


class ExportScreen(TextDialog[str]):
    """Ask for a format; the result is "json", "csv", "svg" or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "dismiss('json')", "JSON"),
        Binding("c", "dismiss('csv')", "CSV"),
        Binding("s", "dismiss('svg')", "SVG"),
        Binding("escape,q,e", "dismiss", "Cancel"),
    ]

    def text(self) -> Content:
        """Ask the question, and list the answers."""
        parts = [
            Content.styled("Write a file into the current folder\n\n", "bold"),
            _answer("j", "dismiss('json')", "JSON: the rows of this view"),
            _answer("c", "dismiss('csv')", "CSV: the rows of this view"),
            _answer("s", "dismiss('svg')", "SVG: a picture of the screen"),
            _answer("esc", "dismiss()", "cancel"),
        ]
        return Content("").join(parts)


class ConfirmScreen(TextDialog[bool]):
    """Ask for the confirmation of a command, with its consequences; every key but `y` declines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, consequences: Sequence[str]) -> None:
        super().__init__()
        self._question, self._consequences = title, consequences

    def text(self) -> Content:
        """Ask the question, and list the consequences and the answers."""
        parts = [Content.styled(f"{self._question}\n\n", "bold $error")]
        parts += [Content(f"{each}\n") for each in self._consequences if each]
        parts += [Content("\n"), _answer("y", "dismiss(True)", "yes"), _answer("n esc", "dismiss(False)", "no")]
        return Content("").join(parts).rstrip()


def _answer(key: str, action: str, text: str) -> Content:
    """Write a key and its answer, which can be clicked too."""
    link = Content.from_markup(f"[@click=screen.{action}]{text}[/]\n")
    return Content.assemble((f"{key:>5}  ", "bold $accent"), link)


NAMES = {
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "slash": "/",
    "comma": ",",
    "full_stop": ".",
    "minus": "-",
    "plus": "+",
    "equals_sign": "=",
}
"""How keys are written, where that differs from their name."""


def key_name(key: str) -> str:
    """Return a key as it is written: `question_mark` is `?`."""
    return NAMES.get(key, key)


def _grouped(bindings: Iterable[Binding]) -> list[tuple[str, str]]:
    """Group keys by their meaning, in the order of the first key of each."""
    keys: dict[str, list[str]] = {}
    for binding in bindings:
        meaning = binding.tooltip or binding.description
        keys.setdefault(meaning[:1].lower() + meaning[1:], []).append(_keys(binding))
    return [(meaning, " ".join(dict.fromkeys(each))) for meaning, each in keys.items()]


def _keys(binding: Binding) -> str:
    return binding.key_display or " ".join(key_name(key.strip()) for key in binding.key.split(","))


def _line(left: str, right: str) -> Content:
    return Content.assemble((f"{left:>12}", "$accent"), f"  {right}\n")


class SafeCommandPalette(CommandPalette):
    """A command palette that answers once."""

    _answered = False

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close the palette; ignore later keys."""
        if self._answered:
            return AwaitComplete()
        self._answered = True
        return super().dismiss(result)

    async def _dispatch_message(self, message: Message) -> None:
        # A second Enter may be queued already when the first one closes the palette.
        if not (self._answered and isinstance(message, Input.Submitted | Button.Pressed | OptionList.OptionSelected)):
            await super()._dispatch_message(message)

    def _action_command_list(self, action: str) -> None:
        try:
            super()._action_command_list(action)
        except KeyError:  # the lines of the list are not laid out yet
            return


# ---- the keys


_PACKAGE = __name__.partition(".")[0]
SCRUB_STEP, SCRUB_LEAP = 5.0, 60.0
"""The seconds that the keys for the past move."""

KEYS: tuple[Binding, ...] = (
    *(
        Binding(str(at), f"view('{view.name}')", view.title, show=False, tooltip=view.about, priority=True)
        for at, view in enumerate(VIEWS, 1)
    ),
    Binding("question_mark", "help", "Help", tooltip="show this help"),
    Binding("space", "freeze", "Freeze", tooltip="freeze the screen, or resume; a recording pauses"),
    Binding(
        "left_square_bracket",
        f"scrub({-SCRUB_STEP})",
        "Past",
        tooltip="go back 5 seconds; the last ten minutes are kept",
    ),
    Binding("right_square_bracket", f"scrub({SCRUB_STEP})", "forward", show=False, tooltip="go forward 5 seconds"),
    Binding("left_curly_bracket", f"scrub({-SCRUB_LEAP})", "back", show=False, tooltip="go back a minute"),
    Binding("right_curly_bracket", f"scrub({SCRUB_LEAP})", "forward", show=False, tooltip="go forward a minute"),
    Binding("less_than_sign", "speed(-1)", "slower", show=False, tooltip="play a recording slower"),
    Binding("greater_than_sign", "speed(1)", "faster", show=False, tooltip="play a recording faster"),
    Binding("g", "switch", "Engines", show=False, tooltip="watch another running engine"),
    Binding("i", "info", "Info", show=False, tooltip="show the selected item in full, the verdict, and its changes"),
    Binding("b", "baseline", "Baseline", tooltip='count "run" from now on; again: from the start'),
    Binding("r", "record", "Record", tooltip="start or stop recording to a file in the current folder"),
    Binding("e", "export", "Export", tooltip="export this view to a file: JSON, CSV or SVG"),
    Binding("y", "copy('text')", "Copy", show=False, tooltip="copy the description of the selected item"),
    Binding("Y", "copy('json')", "Copy", show=False, tooltip="copy the selected item as JSON"),
    Binding("m", "maximise", "Maximise", show=False, tooltip="hide or show the lines around the view"),
    Binding("t", "theme", "Theme", show=False, tooltip="switch between the dark and the light theme"),
    Binding("ctrl+z", "suspend_process", "Suspend", show=False, tooltip="suspend to the shell; fg resumes"),
    Binding("q", "quit", "Quit", tooltip="quit"),
    Binding("ctrl+c", "quit", "Quit", show=False, priority=True, tooltip="quit from any screen"),
)


def shown_bindings(view: View) -> Iterable[Binding]:
    """List the bindings of a view and its widgets, each key once, except the keys that edit text."""
    known: set[str] = set()
    for widget in (view, *view.query("*").exclude("FilterInput")):
        kinds = [kind for kind in type(widget).__mro__ if kind.__module__.startswith(_PACKAGE)]
        for binding in Binding.make_bindings(chain.from_iterable(vars(kind).get("BINDINGS", ()) for kind in kinds)):
            offered = not binding.action.startswith("control(") or view.check_action("control", ())
            if binding.key not in known and binding.description and offered:
                known.add(binding.key)
                yield binding


# ---- full texts


def verdict_texts(state: State, thresholds: Thresholds = DEFAULTS) -> list[tuple[str, str]]:
    """Return the verdict on a state, and its reasons with their levels."""
    found = verdict(state, summarise(state), thresholds)
    reasons = "\n".join(f"{each.level:<5}{each.sentence}" for each in found.reasons)
    return [(f"Verdict at {clock(state.now)}", found.sentence), ("Reasons", reasons)]


def view_texts(view: Widget) -> list[tuple[str, str]]:
    """Return the headline of a view and the description of its selected item, also if there is no room for them."""
    from radixkv_monitor.widgets.detail_pane import DetailPane

    panes = [pane.detail.text for pane in view.query(DetailPane) if pane.detail is not None]
    selected = [*_texts(view, ".detail"), *panes]
    return [("Headline", "\n".join(_texts(view, ".headline"))), ("Selected", "\n\n".join(selected))]


def copied_text(view: View, state: State) -> str:
    """Return the text to copy: the description of the selected item, or the summary of the engine without one."""
    _, (_, selected) = view_texts(view)
    return selected or to_text(state, thresholds=view.thresholds)


def copied_json(view: View) -> str:
    """Return the selected row of a view as JSON, or all its rows without one."""
    row = view.selected_row()
    return view.export().to_json() if row is None else json.dumps(dict(row), indent=2)


def _texts(view: Widget, selector: str) -> list[str]:
    return [text for each in view.query(selector).results(Static) if (text := str(each.content))]
