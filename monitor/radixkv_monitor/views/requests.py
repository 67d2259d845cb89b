"""The Requests screen: a waterfall of who waited, computed and answered when, and why prompts missed. Knows records."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from textual.content import Content

from radixkv.telemetry.records import RequestRecord
from radixkv_monitor import reasons
from radixkv_monitor.formatting import duration, share, some
from radixkv_monitor.messages import RequestSelected, Selection
from radixkv_monitor.state import State
from radixkv_monitor.views.table_view import Listing, Order
from radixkv_monitor.waterfall import Axis, axis_of, bar
from radixkv_monitor.widgets.table import Cell, Column, RowTable


@dataclass(frozen=True)
class RequestRow:
    """A request, what the time is, and the time axis that all rows share."""

    request: RequestRecord
    now: float
    axis: Axis

    @property
    def total(self) -> float:
        """Seconds from its submission to its end, or until now."""
        end = self.request.ended
        return (self.now if end is None else end) - self.request.submitted


def _phase(row: RequestRow, width: int) -> Cell:
    phase = row.request.phase
    return [(f"{reasons.GLYPHS[phase]} {phase}", reasons.STYLES[phase])]


def _waterfall(row: RequestRow, width: int) -> Cell:
    return bar(row.request, row.axis, width, row.now)


def _cached(row: RequestRow, width: int) -> Cell:
    request = row.request
    if request.admitted is None:
        return [("-", "dim")]
    part = share(request.cached_tokens, request.prompt_tokens)
    return [(f"{part:>4} ", "good" if request.cached_tokens else "warn"), (f"of {request.prompt_tokens:,}", "dim")]


def _computed(row: RequestRow, width: int) -> Cell:
    request = row.request
    again = [(f"+{request.recomputed_tokens:,}", "warn")] if request.recomputed_tokens else []
    return [(f"{request.computed_tokens:,}", "plain"), *again]


class RequestsView(Listing[RequestRow]):
    """Requests that run, wait, or ended lately."""

    title = "requests"
    empty = "no request yet"
    columns: ClassVar[Sequence[Column[RequestRow]]] = (
        Column("request", 8, lambda row, _: [(f"#{row.request.number}", "accent")]),
        Column("phase", 11, _phase),
        Column("cached", 13, _cached),
        Column("computed", 10, _computed, rank=2, right=True),
        Column("output", 6, lambda row, _: [(f"{row.request.output_tokens:,}", "plain")], rank=1, right=True),
        Column("TTFT", 7, lambda row, _: [(duration(row.request.ttft), "plain")], rank=1, right=True),
        Column("total", 7, lambda row, _: [(duration(row.total), "plain")], rank=3, right=True),
        Column("why not more", 18, lambda row, _: [(reasons.miss_word(row.request), "dim")], rank=4),
        Column("namespace", 20, lambda row, _: [(row.request.namespace or "-", "dim")], rank=5),
        Column("waterfall", 14, _waterfall, grows=True),
    )
    orders: ClassVar[Sequence[Order[RequestRow]]] = (
        Order("arrival", lambda row: row.request.number),
        Order("live first", lambda row: (row.request.live, row.request.number)),
        Order("TTFT", lambda row: row.request.ttft),
        Order("computed", lambda row: row.request.computed_tokens),
        Order("total time", lambda row: row.total),
    )

    def rows_of(self, state: State) -> Sequence[RequestRow]:
        """All requests that are remembered."""
        requests = [*state.live.values(), *state.ended.values()]
        axis = axis_of(requests, state.now)
        return [RequestRow(each, state.now, axis) for each in requests]

    def key(self, row: RequestRow) -> Hashable:
        """Its number."""
        return row.request.number

    def words(self, row: RequestRow) -> str:
        """Number, phase, namespace, session, reason."""
        request = row.request
        session = "" if request.session is None else f"session {request.session}"
        reason = (request.miss_reason or "").replace("_", " ")
        marks = f"{'preempted' * (request.preemptions > 0)} {'coalesced' * request.coalesced}"
        return f"#{request.number} {request.phase} {request.namespace or ''} {session} {reason} {marks}".lower()

    def facts(self, row: RequestRow) -> dict[str, Any]:
        """The record, and what is derived from it."""
        return asdict(row.request) | {"ttft_s": row.request.ttft, "total_s": round(row.total, 6)}

    def headline(self, rows: Sequence[RequestRow], state: State) -> str:
        """How many there are, and what the waterfall shows."""
        running, waiting = (int(state.stats.get(name, 0)) for name in ("running", "waiting"))
        axis = f" · waterfall: the last {duration(rows[0].axis.length)}" if rows else ""
        return f"{running:,} running, {waiting:,} waiting, {len(state.ended):,} that ended{axis}"

    def detail(self, row: RequestRow, state: State) -> Content:
        """Whose it is, the miss explained, and where the time went."""
        return Content("\n".join((_whose(row.request), reasons.miss(row.request), _times(row))))

    def selected(self, selection: Selection) -> Hashable:
        """The request that is selected."""
        return selection.request

    def on_row_table_moved(self, event: RowTable.Moved) -> None:
        """Tell other views which request is under the cursor."""
        if isinstance(event.key, int) and self.table.has_focus:
            self.post_message(RequestSelected(event.key))


def _whose(request: RequestRecord) -> str:
    parts = [f"Request #{request.number}"]
    parts += [f"session #{request.session}"] * (request.session is not None)
    parts += [f"namespace {request.namespace}"] * (request.namespace is not None)
    parts += [some(request.streams, "stream")] * (request.streams > 1)
    parts += [f"priority {request.priority}"] * (request.priority != 0)
    parts += [f"preempted {some(request.preemptions, 'time')}"] * (request.preemptions > 0)
    parts += ["waited for a neighbour to compute its prefix"] * request.coalesced
    parts += [f"ended: {request.finish}"] * (request.finish is not None)
    return " · ".join(parts)


def _times(row: RequestRow) -> str:
    request = row.request
    if request.admitted is None:
        return f"Waiting for {duration(row.total)}."
    text = f"Waited {duration(request.admitted - request.submitted)}"
    if request.first_token is None:
        return f"{text}, then {duration(row.now - request.admitted)} of prefill so far."
    text += f", prefill {duration(request.first_token - request.admitted)}"
    end = row.now if request.ended is None else request.ended
    decode, rate = end - request.first_token, ""
    if decode > 0 and request.output_tokens > 1:
        rate = f", {request.output_tokens / decode:.0f} tokens/s"
    return f"{text}, decode {duration(decode)} ({some(request.output_tokens, 'token')}{rate})."
