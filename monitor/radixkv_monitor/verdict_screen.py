"""Show texts in full, and the log of verdict changes: the time, the level, how long it lasted, and its sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from radixkv_monitor.dialogs import TextScreen
from radixkv_monitor.formatting import clock, duration
from radixkv_monitor.summary import Level
from radixkv_monitor.verdict_log import VerdictChange, VerdictLog
from radixkv_monitor.views import Table

MARKS: dict[Level, tuple[str, str]] = {
    "good": ("●", "bold $success"),
    "idle": ("○", "bold $foreground"),
    "warn": ("▲", "bold $warning"),
    "bad": ("✗", "bold $error"),
}
"""The sign and the style of each level."""


SHOWN = 100
"""The changes on the screen; a file has all that the log keeps. A longer text would take seconds to lay out."""


class InfoScreen(TextScreen):
    """Show the titled texts `parts`, and the changes of `log`, the newest first.

    `now` returns the time up to which the last level lasts.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "dismiss", "Close"),
        Binding("e", "export('json')", "Export as JSON"),
        Binding("c", "export('csv')", "Export as CSV"),
    ]

    class Export(Message):
        """The user asks for a file of this kind, "json" or "csv"."""

        def __init__(self, table: Table, kind: str) -> None:
            super().__init__()
            self.table, self.kind = table, kind

    def __init__(self, parts: Sequence[tuple[str, str]], log: VerdictLog, now: Callable[[], float]) -> None:
        super().__init__()
        self.parts = [(title, text) for title, text in parts if text]
        self._log, self._now = log, now
        self._present, self._past = Static(markup=False), Static(markup=False)
        self._drawn: tuple[object, ...] | None = None

    def compose(self) -> ComposeResult:
        """Lay out the texts, the present level, which is drawn each second, and below it the levels before."""
        with VerticalScroll(id="dialog"):
            for title, text in self.parts:
                yield Static(Content.assemble((title, "bold $primary"), f"\n{text}\n"), markup=False)
            yield self._present
            yield self._past

    def on_mount(self) -> None:
        """Draw, and draw again each second."""
        self.draw()
        self.set_interval(1, self.draw)

    def draw(self) -> None:
        """Draw the present log."""
        shown = list(self._log.changes)[-SHOWN:]
        named = len({change.engine for change in shown}) > 1
        newest = [_entry(change, lasted, named) for change, lasted in reversed(lengths(shown, self._now()))]
        self._present.update(Content("").join([self._heading(), *newest[:1]]))
        key = (len(self._log.changes), self._log.changes[-1] if self._log.changes else None)
        if key != self._drawn:
            self._drawn = key
            self._past.update(Content("").join(newest[1:]))

    def action_export(self, kind: str) -> None:
        """Ask the app to write the whole log to a file."""
        self.post_message(self.Export(Table("verdicts", rows(self._log.changes, self._now())), kind))

    def _heading(self) -> Content:
        number, after = len(self._log.changes), self._log.after
        parts = [f"A level counts once it held for {duration(after)}." if after else ""]
        parts.append(f"The newest {SHOWN} of {number:,} first;" if number > SHOWN else "Newest first;")
        keys = " ".join(each for each in (*parts, "e: JSON file, c: CSV file, esc: close\n") if each)
        text = keys if number else f"{keys}\nThere is no verdict yet"
        return Content.assemble(("Changes of the verdict", "bold $primary"), f"\n{text}")


def _entry(change: VerdictChange, lasted: float, named: bool) -> Content:
    """Describe a change, and name its engine if the log has changes of several."""
    engine = f", engine {change.engine}" if named else ""
    sign, style = MARKS[change.level]
    head = Content.assemble(
        f"\n{clock(change.time)}  ", (f"{sign} {change.level:<4}", style), f"  for {duration(lasted)}{engine}"
    )
    return Content("").join([head, Content(f"\n{change.sentence}\n")])


def lengths(changes: Sequence[VerdictChange], now: float) -> list[tuple[VerdictChange, float]]:
    """Return each change with the seconds until the next one; the last level lasts until `now`."""
    ends = [after.time for _, after in pairwise(changes)]
    return [
        (change, max(0.0, end - change.time)) for change, end in zip(changes, [*ends, now][: len(changes)], strict=True)
    ]


def rows(changes: Sequence[VerdictChange], now: float) -> list[Mapping[str, Any]]:
    """Return the changes for export, the oldest first; `reasons` are names."""
    return [
        {**change.as_dict(), "reasons": [each.name for each in change.reasons], "lasted": lasted}
        for change, lasted in lengths(changes, now)
    ]
