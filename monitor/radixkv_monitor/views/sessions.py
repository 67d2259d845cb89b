"""The Sessions view: conversations, their length, and the share of their prompts that was cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.content import Content

from radixkv.telemetry.mirror import SESSIONS
from radixkv.telemetry.records import SessionRecord
from radixkv_monitor.formatting import duration, plural, share
from radixkv_monitor.state import State
from radixkv_monitor.views.requests import names_of
from radixkv_monitor.views.table_view import TableView
from radixkv_monitor.widgets.table import Cell, Column

STATUSES = {"running": ("●", "good"), "waiting": ("…", "warn"), "idle": ("○", "info"), "closed": ("✓", "dim")}
"""The sign and the style of each status."""
MOST_NAMED = 3
"""The most namespaces in the headline."""


@dataclass(frozen=True)
class SessionRow:
    """A session, the seconds since its last use, and whether all of its live requests wait to be admitted."""

    session: SessionRecord
    idle: float
    is_waiting: bool = False

    @property
    def hit_share(self) -> float | None:
        """The share of its prompt tokens that was cached, 0 to 1; None before the first prompt."""
        asked = self.session.prompt_tokens
        return self.session.cached_tokens / asked if asked else None

    @property
    def status(self) -> str:
        """Its status in one word."""
        if self.session.live:
            return "waiting" if self.is_waiting else "running"
        return "closed" if self.session.closed else "idle"


def _bar(row: SessionRow, width: int) -> Cell:
    part = row.hit_share
    if part is None:
        return [("-", "dim")]
    label = f"{share(row.session.cached_tokens, row.session.prompt_tokens):>4} "
    full = round(part * (width - len(label)))
    return [(label, "plain"), ("█" * full, "good"), ("·" * (width - len(label) - full), "dim")]


def _status(row: SessionRow, width: int) -> Cell:
    glyph, style = STATUSES[row.status]
    return [(f"{glyph} {row.status}", style)]


class SessionsView(TableView[SessionRow]):
    """Conversations: turns, length, share of cached prompt tokens."""

    title = "sessions"
    noun = "session"
    empty = "no session yet: engine.chat() starts one"
    columns: ClassVar[Sequence[Column[SessionRow]]] = (
        Column("session", 8, lambda row: row.session.number, lambda number: f"#{number}", "accent", sort="number",
               descending=False, search=lambda row: f"#{row.session.number}"),
        Column("state", 10, lambda row: row.status, cell=_status),
        Column("turns", 6, lambda row: row.session.requests, sort="turns", right=True),
        Column("tokens", 8, lambda row: row.session.tokens, sort="length", rank=1, right=True),
        Column("served from cache", 20, lambda row: row.hit_share, cell=_bar, sort="hit share", export="hit_share",
               grows=True, most=36),
        Column("output", 8, lambda row: row.session.output_tokens, rank=3, right=True),
        Column("last used", 10, lambda row: row.idle, duration, sort="last use", descending=False, export="idle_s",
               rank=1, right=True),
        Column("namespace", 26, lambda row: row.session.namespace, style="dim", sort="namespace",
               sort_key=lambda row: row.session.namespace or "", descending=False, rank=2),
        Column("tenant", 14, lambda row: row.session.tenant, style="dim", rank=4, optional=True),
        Column("label", 14, lambda row: row.session.label, style="dim", rank=4, optional=True),
        Column("newest API id", 14, lambda row: row.session.request_id, style="dim", rank=5, optional=True),
    )  # fmt: skip
    first_sorts = ("last use", "length", "hit share", "turns", "number", "namespace")

    def rows_of(self, state: State) -> Sequence[SessionRow]:
        """Return all sessions of the state."""
        running = {each.session for each in state.live.values() if each.phase not in ("waiting", "preempted")}
        waiting = {each.session for each in state.live.values()} - running
        return [
            SessionRow(each, round(max(0.0, state.now - each.used), 3), each.number in waiting)
            for each in state.sessions.values()
        ]

    def key(self, row: SessionRow) -> Hashable:
        """Return its number."""
        return row.session.number

    def record(self, row: SessionRow) -> SessionRecord:
        """Return the session."""
        return row.session

    def headline(self, rows: Sequence[SessionRow], state: State) -> str:
        """Count the sessions and their cached prompt tokens."""
        counts = Counter(row.status for row in rows)
        asked = sum(row.session.prompt_tokens for row in rows)
        found = sum(row.session.cached_tokens for row in rows)
        return (
            f"{'newest ' * (len(rows) >= SESSIONS)}{plural(len(rows), 'session')}: {counts['running']:,} running, "
            f"{counts['waiting']:,} waiting · {share(found, asked)} of {asked:,} prompt tokens from cache"
            f"{_by_namespace(rows)}"
        )

    def detail(self, row: SessionRow, state: State) -> Content:
        """Describe the cost and savings of the conversation."""
        session = row.session
        turns = plural(session.requests, "turn")
        computed = session.prompt_tokens - session.cached_tokens
        lasted = duration(session.used - session.started)
        names = ", ".join(names_of(session))
        newest = f" Newest request: {names}." if names else ""
        return Content(
            f"Session #{session.number}{_of(session.namespace)}: {turns} in {lasted}, now "
            f"{plural(session.tokens, 'token')} long. Its prompts had {session.prompt_tokens:,} tokens in all; "
            f"{session.cached_tokens:,} were cached, {computed:,} were computed.{newest}"
        )


def _of(namespace: str | None) -> str:
    return "" if namespace is None else f" in {namespace}"


def _by_namespace(rows: Sequence[SessionRow]) -> str:
    """Name the namespaces with the most prompt tokens and their hit rates; empty if there is only one."""
    asked: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for row in rows:
        name = row.session.namespace or "default"
        asked[name] += row.session.prompt_tokens
        found[name] += row.session.cached_tokens
    if len(asked) < 2:
        return ""
    named = ", ".join(f"{name} {share(found[name], tokens)}" for name, tokens in asked.most_common(MOST_NAMED))
    more = len(asked) - MOST_NAMED
    return f" · {named}" + (f", {more:,} more" if more > 0 else "")
