"""The Requests view: a waterfall of waiting, prefill and decode, and why prompts missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from radixkv.prompt_breaks import RULES
from radixkv.telemetry.records import RequestRecord, SessionRecord
from radixkv_monitor import questions
from radixkv_monitor.formatting import duration, plural, share
from radixkv_monitor.questions import ControlledView, Question
from radixkv_monitor.state import State
from radixkv_monitor.summary import head_sentence, head_waits_for
from radixkv_monitor.views import RequestSelected, Selection
from radixkv_monitor.views.table_view import TableView
from radixkv_monitor.widgets.panel import widths
from radixkv_monitor.widgets.table import Cell, Column, RowTable

PHASES = {
    "waiting": ("…", "warn"),
    "prefill": ("▶", "info"),
    "decode": ("●", "good"),
    "paused": ("‖", "warn"),
    "preempted": ("↺", "warn"),
    "finished": ("✓", "plain"),
    "cancelled": ("∅", "dim"),
    "failed": ("✗", "bad"),
    "timed out": ("◷", "warn"),
}
"""A sign for each phase and outcome, in addition to its colour, and its table style."""
ENDS = ("finished", "failed", "timed out", "cancelled")

LENGTHS = (15.0, 30.0, 60.0, 120.0)
"""The seconds that an axis may show: few values, so that the scale seldom changes."""

WAITING, PREFILL, DECODE, PREEMPTED = ("░", "warn"), ("▒", "info"), ("█", "good"), ("─", "bad")
"""The sign and the style of each part of a bar."""
LEGEND = "░ waiting ▒ prefill █ decode ─ preempted"


@dataclass(frozen=True)
class Axis:
    """The time span of a waterfall."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """The length in seconds."""
        return self.end - self.start

    def cell(self, time: float, width: int) -> int:
        """Return the cell of a time, counted from the left and limited to the axis."""
        place = (time - self.start) / self.length * width
        return min(max(int(place), 0), width)


@dataclass(frozen=True)
class RequestRow:
    """A request, the present time, and the time axis that all rows share."""

    request: RequestRecord
    now: float
    axis: Axis

    @property
    def end(self) -> float:
        """The end of the request, or now."""
        return self.now if self.request.ended is None else self.request.ended

    @property
    def total(self) -> float:
        """Seconds from submission to the end, or until now: the end-to-end latency."""
        return round(self.end - self.request.submitted, 6)

    @property
    def computed(self) -> int:
        """The prompt tokens that were computed so far, without those computed again."""
        request = self.request
        return min(request.computed_tokens, max(0, request.prompt_tokens - request.cached_tokens))

    @property
    def outcome(self) -> str:
        """The phase, or "timed out" for a request that failed because of its own timeout."""
        return "timed out" if self.request.timed_out else self.request.phase

    @property
    def itl(self) -> float | None:
        """The mean seconds between two tokens of a stream, without preemptions; None below two tokens."""
        request = self.request
        gaps = request.output_tokens / max(1, request.streams) - 1
        if request.first_token is None or gaps <= 0:
            return None
        decoding = self.end - request.first_token - preempted_seconds(request, request.first_token, self.end)
        return max(0.0, decoding) / gaps


def _phase(row: RequestRow, width: int) -> Cell:
    sign, style = PHASES[row.outcome]
    return [(f"{sign} {row.outcome}", style)]


def _own_bar(row: RequestRow, width: int) -> Cell:
    """Draw the parts of the request, with at least a cell each, on an axis of its own."""
    parts = _parts(row.request, row.end)
    cells = widths([stop - start for start, stop, _ in parts], width)
    return [(sign * wide, style) for (_, _, (sign, style)), wide in zip(parts, cells, strict=True)]


def _cached(row: RequestRow, width: int) -> Cell:
    request = row.request
    if request.admitted is None:
        return [("-", "dim")]
    part = share(request.cached_tokens, request.prompt_tokens)
    return [(f"{part:>4} ", "good" if request.cached_tokens else "warn"), (f"of {request.prompt_tokens:,}", "dim")]


def _computed(row: RequestRow, width: int) -> Cell:
    request = row.request
    again = [(f" +{request.recomputed_tokens:,}↺", "warn")] if request.recomputed_tokens else []
    return [(f"{row.computed:,}", "plain"), *again]


class RequestsView(TableView[RequestRow], ControlledView):  # Textual takes the styles of the first base only
    """Requests that run, wait, or ended recently."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("x", "control('cancel')", "Cancel", tooltip="cancel the request")]

    title = "requests"
    noun = "request"
    empty = "no request yet"
    columns: ClassVar[Sequence[Column[RequestRow]]] = (
        Column("request", 8, lambda row: row.request.number, lambda number: f"#{number}", "accent", sort="arrival",
               search=lambda row: f"#{row.request.number}"),
        Column("phase", 11, lambda row: row.outcome, cell=_phase, sort="live first",
               sort_key=lambda row: (row.request.live, row.request.number)),
        Column("cached", 13, lambda row: row.request.cached_tokens, cell=_cached),
        Column("computed", 11, lambda row: row.computed, cell=_computed, sort="computed",
               export="computed_prompt_tokens", rank=4, right=True),
        Column("output", 6, lambda row: row.request.output_tokens, rank=1, right=True),
        Column("queue", 7, lambda row: row.request.queue_time, duration, sort="queue time", export="queue_time_s",
               rank=2, right=True),
        Column("TTFT", 7, lambda row: row.request.ttft, duration, sort="TTFT", export="ttft_s", rank=1, right=True),
        Column("ITL", 7, lambda row: row.itl, duration, sort="ITL", export="itl_s", rank=3, right=True),
        Column("E2E", 7, lambda row: row.total, duration, sort="total time", export="total_s", rank=3, right=True),
        Column("miss reason", 18, lambda row: miss_word(row.request), style="dim", rank=2),
        Column("its time", 12, lambda row: None, cell=_own_bar, grows=True, most=24),
        Column("API id", 14, lambda row: row.request.request_id, style="dim", rank=5, optional=True),
        Column("label", 10, lambda row: row.request.label, style="dim", rank=5, optional=True),
        Column("namespace", 20, lambda row: row.request.namespace, style="dim", rank=6, optional=True),
        Column("tenant", 12, lambda row: row.request.tenant, style="dim", rank=8, optional=True),
        Column("waterfall", 14, lambda row: None, rank=7, grows=True,
               cell=lambda row, width: bar(row.request, row.axis, width, row.now)),
    )  # fmt: skip
    first_sorts = ("arrival", "live first", "TTFT", "queue time", "ITL", "computed", "total time")

    def rows_of(self, state: State) -> Sequence[RequestRow]:
        """Return all requests of the state."""
        requests = [*state.live.values(), *state.ended.values()]
        axis = axis_of(requests, state.now)
        return [RequestRow(each, state.now, axis) for each in requests]

    def key(self, row: RequestRow) -> Hashable:
        """Return its number."""
        return row.request.number

    def record(self, row: RequestRow) -> RequestRecord:
        """Return the request."""
        return row.request

    def more_words(self, row: RequestRow) -> str:
        """Return its session, whether it was preempted or coalesced, and the reason of its wait."""
        request = row.request
        session = "" if request.session is None else f"session {request.session}"
        marks = f"{'preempted' * (request.preemptions > 0)} {'coalesced' * request.coalesced}"
        return f"{session} {marks} {request.waits_for or ''}"

    def headline(self, rows: Sequence[RequestRow], state: State) -> str:
        """Count the requests by phase and outcome, and describe the waterfall."""
        counts = Counter(row.outcome for row in rows)
        running, queued = (int(state.stats.get(name, 0)) for name in ("running", "waiting"))
        waiting = max(0, queued - counts["preempted"])  # preempted requests are in the wait queue too
        ended = ", ".join(f"{counts[name]:,} {name}" for name in ENDS if counts[name]) or "none"
        head = head_sentence(head_waits_for(state.live.values()))
        axis = f" · {LEGEND} · waterfall: the last {duration(rows[0].axis.length)}" if rows else ""
        return (
            f"{running:,} running, {waiting:,} waiting, {counts['preempted']:,} preempted"
            f"{head and f' · {head}'} · newest {len(state.ended):,} ended: {ended}{axis}"
        )

    def detail(self, row: RequestRow, state: State) -> Content:
        """Describe the request, its miss, and its times."""
        request, head = row.request, head_sentence(row.request.waits_for)
        lines = [_origin(row), miss_sentence(request), *_change(request), *_texts(request)]
        return Content("\n".join([*lines, _times(row) + (head and f" The {head}.")]))

    def selected(self, selection: Selection) -> Hashable:
        """Return the number of the selected request."""
        return selection.request

    def question(self, verb: str) -> Question | None:
        """Return the question for cancelling the request under the cursor."""
        state = self._state
        row: RequestRow | None = self.table.cursor
        if state is None or row is None:
            return None
        number = row.request.number
        return questions.cancel(state, state.live.get(number) or state.ended.get(number) or row.request)

    def on_row_table_moved(self, event: RowTable.Moved) -> None:
        """Post the request under the cursor to other views."""
        if isinstance(event.key, int) and self.table.has_focus:
            self._selected_key = event.key
            self.post_message(RequestSelected(event.key))


def _origin(row: RequestRow) -> str:
    request = row.request
    parts = [f"Request #{request.number}"]
    parts += [f"session #{request.session}"] * (request.session is not None)
    parts += [f"namespace {request.namespace}"] * (request.namespace is not None)
    parts += names_of(request)
    parts += [plural(request.streams, "stream")] * (request.streams > 1)
    parts += [f"priority {request.priority}"] * (request.priority != 0)
    parts += ["waited for another request to compute its prefix"] * request.coalesced
    parts += [f"{row.outcome}: {request.finish}"] * (request.finish is not None)
    return " · ".join(parts)


def _change(request: RequestRecord) -> list[str]:
    """Name the part of the prompt that differs from an earlier prompt; return nothing if none is known."""
    if request.changed_part is None:
        return []
    rule = RULES.get(request.changed_rule or "")
    remedy = "" if rule is None else f" {rule.remedy}"
    return [f"In its conversation, {request.changed_part} was different before ({request.changed_rule}).{remedy}"]


def _texts(request: RequestRecord) -> list[str]:
    """Return the texts around the first difference to a cached prompt, or say how to get them."""
    if request.cached_text:
        return [f"Prompt: {request.own_text}", f"Cached: {request.cached_text}"]
    hint = "To see both texts at this place, load the engine with expose_text=True (serve --expose-text)."
    return [] if request.cached_text is None else [hint]


def names_of(record: RequestRecord | SessionRecord) -> list[str]:
    """Return the names that the sender gave a request, each with its kind."""
    names = (("API id", record.request_id), ("tenant", record.tenant), ("label", record.label))
    return [f"{kind} {name}" for kind, name in names if name is not None]


def _times(row: RequestRow) -> str:
    """Write the seconds of each part of the request, and its recomputed tokens."""
    request = row.request
    if request.admitted is None:
        return f"{'Waiting' if request.live else 'It waited'} for {duration(row.total)}."
    first = row.end if request.first_token is None else request.first_token
    lost = preempted_seconds(request, request.admitted, first)
    prefill = first - request.admitted - lost
    text = f"Queue time {duration(request.queue_time)}, prefill {duration(prefill)}"
    if request.first_token is None:
        text += " so far" if request.live else ", no token"
    else:
        later = preempted_seconds(request, first, row.end)
        decode, lost = row.end - first - later, lost + later
        rate = f", {request.output_tokens / decode:.0f} tokens/s" if decode > 0 and request.output_tokens > 1 else ""
        itl = "" if row.itl is None else f", mean ITL {duration(row.itl)}"
        text += f", decode {duration(decode)} ({plural(request.output_tokens, 'token')}{itl}{rate})"
    if request.preemptions:
        measured = f" for {duration(lost)}" if request.preempted_ms else ""
        text += f", preempted {plural(request.preemptions, 'time')}{measured}"
    again = f" Computed again after it was preempted: {plural(request.recomputed_tokens, 'token')}."
    return f"{text}; E2E {duration(row.total)}.{again if request.recomputed_tokens else ''}"


def preemptions_of(request: RequestRecord, now: float) -> list[tuple[float, float]]:
    """Return the beginning and the end of each recorded preemption, in seconds since 1970; the last may be open."""
    times = [request.submitted + each / 1000 for each in request.preempted_ms]
    return list(zip(times[::2], [*times[1::2], *[now] * (len(times) % 2)], strict=True))


def preempted_seconds(request: RequestRecord, start: float, stop: float) -> float:
    """Return the seconds between `start` and `stop` in which the request was preempted."""
    return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in preemptions_of(request, stop))


def axis_of(requests: Iterable[RequestRecord], now: float) -> Axis:
    """Return the shortest axis up to now that shows all live requests from their start, or the longest one."""
    oldest = min((each.submitted for each in requests if each.live), default=now)
    length = next((each for each in LENGTHS if now - oldest <= each), LENGTHS[-1])
    return Axis(now - length, now)


def bar(request: RequestRecord, axis: Axis, width: int, now: float) -> list[tuple[str, str]]:
    """Return pieces of text, `width` cells in all, each with its style.

    The parts are in order and without gaps. A part that is too short to see takes a cell from the part before it. Parts
    that ended before the axis are left out.
    """
    end = now if request.ended is None else request.ended
    if end < axis.start:
        return [("<", "dim"), (" " * (width - 1), "plain")]
    right = max(axis.cell(end, width), 1)
    pieces = [(" " * (width - right), "plain")]
    for start, stop, (glyph, style) in reversed(_parts(request, end)):
        first = min(axis.cell(start, width), right - 1)
        if first < 0 or stop < axis.start:
            break
        pieces.append((glyph * (right - first), style))
        right = first
    return [(" " * right, "plain"), *reversed(pieces)]


def _parts(request: RequestRecord, end: float) -> list[tuple[float, float, tuple[str, str]]]:
    """Return the times and the look of each part. Parts of no duration are left out, except the last."""
    admitted = end if request.admitted is None else request.admitted
    first = end if request.first_token is None else request.first_token
    parts = [(request.submitted, admitted, WAITING), (admitted, first, PREFILL), (first, end, DECODE)]
    reached = 1 + (request.admitted is not None) + (request.first_token is not None)
    whole = [part for index, part in enumerate(parts[:reached], 1) if part[1] > part[0] or index == reached]
    for begin, stop in preemptions_of(request, end):
        whole = [piece for part in whole for piece in _cut(part, begin, stop)]
    return whole


def _cut(
    part: tuple[float, float, tuple[str, str]], begin: float, stop: float
) -> list[tuple[float, float, tuple[str, str]]]:
    """Divide a part of a bar by a preemption from `begin` to `stop`."""
    start, end, look = part
    begin, stop = max(begin, start), min(stop, end)
    if begin >= stop:
        return [part]
    pieces = [(start, begin, look), (begin, stop, PREEMPTED), (stop, end, look)]
    return [piece for piece in pieces if piece[1] > piece[0]]


def miss_sentence(request: RequestRecord) -> str:
    """Say how much of a prompt was cached, and why not more."""
    if request.admitted is None:
        begin = "It has not been admitted yet" if request.live else "It ended before it was admitted"
        return f"{begin}, so the cache was not searched."
    cached, asked = request.cached_tokens, request.prompt_tokens
    head = f"{cached:,} of {plural(asked, 'prompt token')} ({share(cached, asked)}) were cached."
    if request.host_tokens:
        head = f"{head.removesuffix('.')}, {request.host_tokens:,} of them on the host."
    if request.disk_tokens:
        head += f" {request.disk_tokens:,} were read from disk."
    return f"{head} {_rest(request)} {draft_sentence(request)}".strip()


def draft_sentence(request: RequestRecord) -> str:
    """Say how many drafted tokens were accepted; empty without drafts."""
    if not request.drafted_tokens:
        return ""
    steps = max(request.output_tokens - request.accepted_tokens, 1)
    rate = f"{request.output_tokens / steps:.1f} tokens a step"
    return f"{request.accepted_tokens:,} of {request.drafted_tokens:,} drafted tokens were accepted: {rate}."


def _rest(request: RequestRecord) -> str:
    again = request.miss_without_state
    if again:
        again_text = f"{plural(again, 'more token')} had cached KV, but were computed again for their recurrent state."
        return f"{again_text} {_reason(request)}"
    return _reason(request)


def _reason(request: RequestRecord) -> str:
    at = "" if request.miss_at is None else f"{request.miss_at:,}"
    match request.miss_reason:
        case "diverged":
            return f"At token {at} the prompt diverges from all cached prompts."
        case "never_seen":
            return f"The tokens from {at} on were never computed here, or were evicted too long ago to be recorded."
        case "evicted":
            ago = duration(request.miss_evicted_ago)
            return (
                f"From token {at} on, {plural(request.miss_evicted_tokens, 'more token')} would have matched, but were "
                f"evicted {ago} before, {request.miss_pressure or 'to make room'}."
            )
        case "limit" | "full":
            return "The whole prompt was cached; its last token is always computed, for its logits."
        case _:
            return ""


def miss_word(request: RequestRecord) -> str:
    """Return the reason of a miss in a word or two."""
    if request.admitted is None or request.miss_reason is None:
        return ""
    word = request.miss_reason.replace("_", " ")
    return word if request.miss_at is None or word == "full" else f"{word} @{request.miss_at:,}"
