"""Show the log of verdict changes: the time, the level, how long it lasted, and its sentence."""

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


class VerdictScreen(TextScreen):
    """Show the changes of `log`, the newest first. `now` returns the time up to which the last level lasts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "close", "Close"),
        Binding("e", "export('json')", "Export as JSON"),
        Binding("c", "export('csv')", "Export as CSV"),
    ]

    class Export(Message):
        """The user asks for a file of this kind, "json" or "csv"."""

        def __init__(self, table: Table, kind: str) -> None:
            super().__init__()
            self.table, self.kind = table, kind

    def __init__(self, log: VerdictLog, now: Callable[[], float]) -> None:
        super().__init__()
        self._log, self._now = log, now
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        """Lay out one long text in a box that scrolls."""
        with VerticalScroll(id="dialog"):
            yield self._text

    def on_mount(self) -> None:
        """Draw, and draw again each second."""
        self.draw()
        self.set_interval(1, self.draw)

    def draw(self) -> None:
        """Draw the present log."""
        self._text.update(self._content())

    def action_export(self, kind: str) -> None:
        """Ask the app to write the log to a file."""
        self.post_message(self.Export(Table("verdicts", rows(self._log.changes, self._now())), kind))

    def _content(self) -> Content:
        after = duration(self._log.after) if self._log.after else ""
        about = f"A level counts once it held for {after}. " if after else ""
        parts = [
            Content.styled("Changes of the verdict", "bold $primary"),
            Content(f"\n{about}Newest first; e: JSON file, c: CSV file, esc: close\n"),
        ]
        if not self._log.changes:
            parts.append(Content("\nThere is no verdict yet"))
        for change, lasted in reversed(list(lengths(self._log.changes, self._now()))):
            sign, style = MARKS[change.level]
            head = f"\n{clock(change.time)}  "
            parts.append(Content.assemble(head, (f"{sign} {change.level:<4}", style), f"  for {duration(lasted)}\n"))
            parts.append(Content(f"{change.sentence}\n"))
        return Content("").join(parts)


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
