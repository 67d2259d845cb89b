"""The Evictions view: evicted runs of tokens, the reason, and whether they were requested again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.content import Content

from radixkv.telemetry.records import EvictionRecord
from radixkv_monitor.formatting import duration, plural, share
from radixkv_monitor.state import State
from radixkv_monitor.views import NodeSelected, Selection
from radixkv_monitor.views.table_view import TableView
from radixkv_monitor.widgets.table import Cell, Column, RowTable


@dataclass(frozen=True)
class EvictionRow:
    """An eviction and its age."""

    eviction: EvictionRecord
    ago: float

    @property
    def wanted_after(self) -> float | None:
        """Seconds until the tokens were requested again; None if they were not."""
        again = self.eviction.wanted_again
        return None if again is None else again - self.eviction.time


def _wanted_again(row: EvictionRow, width: int) -> Cell:
    if row.wanted_after is None:
        return [("-", "dim")]
    return [(f"! after {duration(row.wanted_after)}", "bad")]


class EvictionsView(TableView[EvictionRow]):
    """Evicted runs: age, reason, regret."""

    title = "evictions"
    noun = "eviction"
    empty = "no evictions yet: the pool had room for everything"
    columns: ClassVar[Sequence[Column[EvictionRow]]] = (
        Column("ago", 8, lambda row: row.ago, duration, sort="time", sort_key=lambda row: row.eviction.number,
               right=True),
        Column("tokens", 8, lambda row: row.eviction.tokens, sort="tokens", right=True),
        Column("blocks", 7, lambda row: row.eviction.blocks, rank=2, right=True),
        Column("unused for", 10, lambda row: row.eviction.idle_s, duration, sort="time unused", rank=1, right=True),
        Column("ended here", 10, lambda row: row.eviction.hits, sort="ended here", rank=1, right=True),
        Column("requested again", 15, lambda row: row.wanted_after, cell=_wanted_again, sort="regret", descending=False,
               search=lambda row: "" if row.wanted_after is None else "requested wanted again regret",
               export="wanted_after_s"),
        Column("reason", 24, lambda row: row.eviction.pressure, style="dim", rank=4, grows=True),
    )  # fmt: skip
    first_sorts = ("time", "regret", "tokens", "time unused", "ended here")
    old_sorts: ClassVar[Mapping[str, str]] = {"hits": "ended-here"}

    def rows_of(self, state: State) -> Sequence[EvictionRow]:
        """Return the newest evictions."""
        return [EvictionRow(each, max(0.0, state.now - each.time)) for each in state.evictions.values()]

    def key(self, row: EvictionRow) -> Hashable:
        """Return its number."""
        return row.eviction.number

    def record(self, row: EvictionRow) -> EvictionRecord:
        """Return the eviction."""
        return row.eviction

    def more_words(self, row: EvictionRow) -> str:
        """Return its node."""
        return f"#{row.eviction.node}"

    def headline(self, rows: Sequence[EvictionRow], state: State) -> str:
        """Count the evicted tokens, and the requested ones that had been evicted."""
        evicted, regret, asked = (
            int(state.stats.get(f"cache.{name}", 0)) for name in ("evicted_tokens", "regret_tokens", "query_tokens")
        )
        wanted = sum(1 for row in rows if row.wanted_after is not None)
        return (
            f"{plural(evicted, 'token')} evicted since load; {regret:,} of {asked:,} requested tokens had been evicted "
            f"({share(regret, asked)} regret) · newest {plural(len(rows), 'eviction')}: {wanted:,} requested again"
        )

    def detail(self, row: EvictionRow, state: State) -> Content:
        """Describe the eviction in sentences."""
        return Content(eviction_sentence(row.eviction))

    def selected(self, selection: Selection) -> Hashable:
        """Return the last eviction from the selected node."""
        evictions = self._state.evictions.values() if self._state is not None else ()
        return max((each.number for each in evictions if each.node == selection.node), default=None)

    def on_row_table_opened(self, event: RowTable.Opened) -> None:
        """Show the node in the Tree, if a part of it is still cached."""
        event.stop()
        row = self.table.cursor
        if row is None:
            return
        if self._state is not None and row.eviction.node in self._state.nodes:
            self.post_message(NodeSelected(row.eviction.node, show=True))
        else:
            self.notify(f"Node {row.eviction.node} is no longer cached.")


def eviction_sentence(record: EvictionRecord) -> str:
    """Say which tokens were evicted, why, and whether they were requested again."""
    tokens = f"Tokens {record.start:,} to {record.start + record.tokens:,} of node {record.node}"
    ended = f"the cached prefixes of {plural(record.hits, 'request')}" if record.hits else "no cached prefix"
    head = f"{tokens} were evicted, {record.pressure or 'to make room'}: {plural(record.blocks, 'block')}, unused for "
    return f"{head}{duration(record.idle_s)}; {ended} ended here. {_regret(record)}"


def _regret(record: EvictionRecord) -> str:
    if record.wanted_again is None:
        return "They have not been requested since."
    return f"They were requested again {duration(record.wanted_again - record.time)} later (counted as regret)."
