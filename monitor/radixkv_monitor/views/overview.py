"""The Overview: one sentence, the pool as a bar, and six cards of numbers with sparklines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Grid

from radixkv_monitor import history as counters
from radixkv_monitor import theme
from radixkv_monitor.formatting import count, duration, plural, share, short, size
from radixkv_monitor.state import Sample, State
from radixkv_monitor.summary import Host, Part, Percentiles, States, Summary, summarise, verdict
from radixkv_monitor.views import Table, View
from radixkv_monitor.widgets.panel import Panel, stacked

SIGNS = {"good": "✔", "idle": "·", "warn": "▲", "bad": "✖"}
POOL = (("active", theme.ACTIVE), ("pinned", theme.PINNED), ("cached", theme.CACHED), ("free", theme.FREE))
GAUGE = 10
"""Cells of a bar of used rows, snapshots or host blocks."""
SOURCES = (
    ("from_device", "device", theme.CACHED),
    ("from_host", "host", theme.HOST),
    ("computed", "computed", theme.ACTIVE),
)
"""The sources of prompt tokens: the field of Host, the name and the shade."""
LOW = 14
"""Lines below which each card is one line of numbers."""
BRIEF = {"hit-rate": "hits", "first-token": "TTFT", "evictions": "evicted"}
"""The names of the numbers in such lines, where they need one."""


class OverviewView(View):
    """How the engine is doing."""

    DEFAULT_CSS = """
    OverviewView { layout: vertical; padding: 0 1; }
    #verdict { height: auto; max-height: 2; }
    #facts { height: 1; }
    #pool-bar { height: 3; }
    #cards { grid-size: 2 3; grid-gutter: 0 3; height: 1fr; }
    OverviewView.-states { #pool-bar { height: 4; } }
    OverviewView.-host { #pool-bar { height: 5; } }
    OverviewView.-wide {
        #cards { grid-size: 3 2; grid-gutter: 1 4; }
        #verdict { margin: 1 0; }
        #pool-bar { height: 5; margin: 1 0; }
    }
    OverviewView.-wide.-states { #pool-bar { height: 6; } }
    OverviewView.-wide.-host { #pool-bar { height: 7; } }
    OverviewView.-low {
        #cards { grid-size: 1 6; grid-gutter: 0 0; }
        #verdict { margin: 0; max-height: 1; }
        #facts { display: none; }
        #pool-bar { display: none; }
    }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._state: State | None = None
        self._summary: Summary | None = None

    def compose(self) -> ComposeResult:
        """Lay out the sentence, facts, pool and cards."""
        for name in ("verdict", "facts", "pool-bar"):
            yield Panel(name)
        with Grid(id="cards"):
            for name in CARDS:
                yield Panel(f"card-{name}")

    def on_resize(self, event: events.Resize) -> None:
        """Show two or three columns of cards, or one line each if there is little room."""
        self.set_class(event.size.height < LOW, "-low")
        self.set_class(event.size.width >= 120 and event.size.height >= LOW, "-wide")
        self.call_after_refresh(self._draw)

    def update(self, state: State) -> None:
        """Draw a state."""
        self._state, self._summary = state, summarise(state)
        self._draw()

    def export(self) -> Table:
        """Return the summary, one number a row."""
        if self._summary is None or self._state is None:
            return Table("overview", [])
        rows = [{"name": "verdict", "value": verdict(self._state, self._summary).sentence}]
        return Table("overview", [*rows, *_flat("", self._summary.as_dict())])

    # ---- drawing

    def _draw(self) -> None:
        if self._state is None or self._summary is None:
            return
        self._make_room("-states", self._summary.states is not None)
        self._make_room("-host", self._summary.host is not None)
        self._draw_verdict(self._state, self._summary)
        self._panel("facts").show([Text(facts_line(self._state), self._panel("facts").style_of("dim"), no_wrap=True)])
        self._panel("pool-bar").show(self._pool(self._panel("pool-bar"), self._state, self._summary))
        history = counters.of_one_engine(self._state.history)
        for name, card in CARDS.items():
            panel = self._panel(f"card-{name}")
            lines = card(panel, self._state, self._summary, history)
            if self.has_class("-low"):
                lines = [_brief(panel, BRIEF.get(name, ""), lines[1])]
            panel.show(lines[: max(1, panel.size.height)])

    def _panel(self, name: str) -> Panel:
        return self.query_one(f"#{name}", Panel)

    def _make_room(self, name: str, needed: bool) -> None:
        """Give the pool more lines if the model has recurrent state, or the engine a host tier."""
        if self.has_class(name) != needed:
            self.set_class(needed, name)
            self.call_after_refresh(self._draw)

    def _draw_verdict(self, state: State, summary: Summary) -> None:
        judgement = verdict(state, summary)
        colours = {"good": "success", "idle": "primary", "warn": "warning", "bad": "error"}
        style = Style(color=self.app.theme_variables.get(colours[judgement.level]), bold=True)
        if self._panel("verdict").show([Text(f"{SIGNS[judgement.level]} {judgement.sentence}", style)]):
            self.call_after_refresh(self._draw)  # its height may change, which changes the room for the cards

    def _pool(self, panel: Panel, state: State, summary: Summary) -> list[Text]:
        facts, pool, dark = state.facts, summary.pool, self.app.current_theme.dark
        parts = [(getattr(pool, name), shade.sign, Style(color=shade.on(dark))) for name, shade in POOL]
        legend = Text(no_wrap=True, overflow="ellipsis")
        for (name, _), (blocks, sign, style) in zip(POOL, parts, strict=True):
            legend.append("   " if legend else "")
            legend.append(f"{sign * 2} ", style)
            legend.append(f"{name} {share(blocks, pool.total)} ", panel.style_of("strong"))
            legend.append(count(blocks), panel.style_of("dim"))
        aside = (
            f"{plural(pool.total, 'block')} of {facts.block_size} tokens, {size(pool.total * facts.bytes_per_block)}"
            f" · {count(state.stats.get('cache.nodes', 0))} nodes"
        )
        bar = stacked(parts, panel.size.width)
        below = [legend]
        below += [] if summary.states is None else [states_line(panel, summary.states)]
        below += [] if summary.host is None else host_lines(panel, summary.host)
        return [panel.title("Pool", aside), *([bar] * max(1, panel.size.height - 1 - len(below))), *below]


def states_line(panel: Panel, states: States) -> Text:
    """Draw the used rows and snapshots of recurrent states as two short bars, with their numbers."""
    dark = panel.app.current_theme.dark
    line = Text("states", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    for name, slots, shade in (("rows", states.rows, theme.ACTIVE), ("snapshots", states.snapshots, theme.CACHED)):
        line.append(f"  {name} ", panel.style_of("dim"))
        line.append_text(_gauge(slots, shade, dark))
        line.append(f" {slots.counts}", panel.style_of("strong"))
    line.append(f"  {count(states.evicted)} evicted", panel.style_of("dim"))
    more = f"  {size(states.bytes)}, {count(states.copies)} copies" if states.bytes else ""
    if line.cell_len + len(more) <= panel.size.width:
        line.append(more, panel.style_of("dim"))
    return line


def host_lines(panel: Panel, host: Host) -> list[Text]:
    """Draw two lines: the used blocks of the host with its traffic, and the sources of prompt tokens."""
    dim, strong = panel.style_of("dim"), panel.style_of("strong")
    used = Text("host    ", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    used.append_text(_gauge(host.blocks, theme.HOST, panel.app.current_theme.dark))
    moved = Text()
    for name, rate, unit in (
        ("offloads", host.offloaded_per_second, "blocks/s"),
        ("loads", host.loaded_per_second, "tokens/s"),
    ):
        moved.append(f"  {name} ", dim)
        moved.append(short(rate), strong)
        moved.append(f" {unit}", dim)
    moved.append(", 10 s", dim)
    room = panel.size.width - used.cell_len - moved.cell_len
    forms = (f" {host.blocks.counts} blocks, {size(host.bytes)}", f" {host.blocks.counts}")
    used.append(next((form for form in forms if len(form) <= room), f" {host.blocks}"), strong)
    used.append_text(moved)
    return [used, _sources_line(panel, host)]


def _sources_line(panel: Panel, host: Host) -> Text:
    dark = panel.app.current_theme.dark
    line = Text("prompts ", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    parts = [(getattr(host, field), shade.sign, Style(color=shade.on(dark))) for field, _, shade in SOURCES]
    whole = sum(tokens for tokens, _, _ in parts)
    line.append_text(stacked(parts, GAUGE) if whole else Text(theme.FREE.sign * GAUGE, panel.style_of("dim")))
    for (tokens, sign, style), (_, name, _) in zip(parts, SOURCES, strict=True):
        line.append(f"  {sign} ", style)
        line.append(share(tokens, whole), panel.style_of("strong"))
        line.append(f" {name}", panel.style_of("dim"))
    line.append(" of tokens, 1 min", panel.style_of("dim"))
    return line


def _gauge(slots: Part, shade: theme.Shade, dark: bool) -> Text:
    """Draw the used part of some slots as a short bar."""
    used, free = Style(color=shade.on(dark)), Style(color=theme.FREE.on(dark))
    return stacked([(slots.part, shade.sign, used), (slots.whole - slots.part, theme.FREE.sign, free)], GAUGE)


def _brief(panel: Panel, name: str, numbers: Text) -> Text:
    """Return a card as one line."""
    if not name:
        return numbers
    return Text.assemble((f"{name} ", panel.style_of("title")), numbers, no_wrap=True, overflow="ellipsis")


def facts_line(state: State) -> str:
    """Describe the engine in one line."""
    facts = state.facts
    where = " ".join(dict.fromkeys(each for each in (facts.device, facts.dtype) if each != "none"))
    parts = (
        facts.model,
        where,
        "" if facts.attention == "none" else f"{facts.attention} attention",
        f"eviction {facts.eviction}",
        f"up {duration(state.now - facts.started)}",
        f"pid {facts.pid}",
        f"radixkv {facts.version}",
    )
    return " · ".join(part for part in parts if part)


def _flat(prefix: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return nested values as rows with dotted names."""
    rows: list[dict[str, Any]] = []
    for name, value in values.items():
        rows += (
            _flat(f"{prefix}{name}.", value) if isinstance(value, dict) else [{"name": prefix + name, "value": value}]
        )
    return rows


SPANS = ((60.0, "1 min"), (120.0, "2 min"), (300.0, "5 min"), (600.0, "10 min"))
"""The spans of sparklines; the shortest one that covers all samples is used."""
TALLEST = 12
"""The most lines of a sparkline."""

Card = Callable[[Panel, State, Summary, Sequence[Sample]], list[Text]]


def _spark_room(panel: Panel, lines: int) -> tuple[int, int]:
    """Return the columns and lines that are left for a sparkline."""
    return max(1, panel.size.width), min(TALLEST, max(1, panel.size.height - lines))


def _span(state: State, history: Sequence[Sample]) -> tuple[float, str]:
    """Return the seconds to draw, and their name."""
    seen = state.now - history[0].time if history else 0.0
    return next((span for span in SPANS if seen <= span[0]), SPANS[-1])


def hit_rate(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """The share of prompt tokens that were cached, over three spans."""
    width, height = _spark_room(panel, 2)
    span, span_name = _span(state, history)
    asked = counters.series(history, "prompt_tokens", state.now, span, width)
    found = counters.series(history, "cached_tokens", state.now, span, width)
    rates = [hits / tokens if tokens >= 1 else None for hits, tokens in zip(found, asked, strict=True)]
    return [
        panel.title("Hit rate", f"of prompt tokens, {span_name}"),
        panel.numbers(
            (str(summary.hit_minute), "1 min"), (str(summary.hit_run), "run"), (str(summary.hit_lifetime), "lifetime")
        ),
        *panel.spark(rates, height, top=1.0),
    ]


def first_token(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Times to the first token, of hits and of misses."""
    hit, miss = summary.ttft_hit, summary.ttft_miss
    lines = [
        panel.title("Time to first token", _gain(summary)),
        _times(panel, "hits", hit),
        _times(panel, "misses", miss),
    ]
    bars = ("hit p50", hit.median), ("miss p50", miss.median), ("hit p90", hit.p90), ("miss p90", miss.p90)
    room = panel.size.height - len(lines)
    drawn = [(name, seconds) for name, seconds in bars[: 2 if room < len(bars) else 4] if seconds is not None]
    longest = max((seconds for _, seconds in drawn), default=0.0)
    if room < 2 or longest <= 0:
        return lines
    for name, seconds in drawn:
        bar = "━" * max(1, round((panel.size.width - 10) * seconds / longest))
        lines.append(Text.assemble((f"{name:<9}", panel.style_of("dim")), (bar, panel.style_of("spark")), no_wrap=True))
    return lines


def _times(panel: Panel, name: str, times: Percentiles) -> Text:
    if not times.count:
        return Text(f"no {name} yet", panel.style_of("dim"), no_wrap=True)
    numbers = (f"{short(times.count):>4}", f"{name:<6}"), (f"{duration(times.median):>6}", "p50")
    return panel.numbers(*numbers, (f"{duration(times.p90):>6}", "p90"))


def _gain(summary: Summary) -> str:
    hit, miss = summary.ttft_hit.median, summary.ttft_miss.median
    return f"hits {miss / hit:.1f}x faster" if hit and miss and miss > hit else ""


def throughput(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Tokens per second, and steps."""
    width, height = _spark_room(panel, 3)
    span, span_name = _span(state, history)
    return [
        panel.title("Tokens per second", f"output, {span_name}"),
        panel.numbers(
            (short(summary.output_per_second), "output"),
            (short(summary.computed_per_second), "computed"),
            (short(summary.cached_per_second), "cached"),
        ),
        *panel.spark(counters.series(history, "output_tokens", state.now, span, width), height),
        panel.numbers(
            (duration(summary.seconds_per_step), "per step"), (_plain(summary.tokens_per_step), "tokens per step")
        ),
    ]


def requests(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Requests now and so far."""
    width, height = _spark_room(panel, 3)
    span, span_name = _span(state, history)
    return [
        panel.title("Requests", f"running, {span_name}"),
        panel.numbers(
            (count(summary.running), "running"),
            (count(summary.waiting), "waiting"),
            (count(summary.finished), "done"),
        ),
        *panel.spark(counters.gauges(history, "running", state.now, span, width), height),
        panel.numbers((count(summary.requests_minute), "ended in 1 min"), (count(summary.cancelled), "cancelled")),
    ]


def evictions(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Evicted tokens, and those that were requested again."""
    width, height = _spark_room(panel, 3)
    span, span_name = _span(state, history)
    return [
        panel.title("Evictions", f"tokens, {span_name}"),
        panel.numbers((short(summary.evicted_per_second), "tokens/s"), (str(summary.regret_minute), "regret in 1 min")),
        *panel.spark(counters.series(history, "cache.evicted_tokens", state.now, span, width), height),
        panel.numbers(
            (short(summary.regret_lifetime.part), "regret tokens,"),
            (share(summary.regret_lifetime.part, state.stats.get("cache.evicted_tokens", 0.0)), "of evicted"),
        ),
    ]


def problems(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Preemptions, failures, audits, and the cost of telemetry to the engine."""
    audited = f"of {plural(summary.audited_blocks, 'audited block')} differ" if summary.audited_blocks else "audits yet"
    lines = [
        panel.title("Problems"),
        panel.numbers(
            (count(summary.preemptions_minute), "preemptions in 1 min"), (count(summary.preemptions), "in total")
        ),
        panel.numbers(
            (count(summary.failed_minute), "failed in 1 min"), (short(summary.recomputed_tokens), "recomputed")
        ),
        panel.numbers((count(summary.differing_blocks), audited)),
    ]
    if "monitor_ns" in state.stats:
        lines.append(panel.numbers((f"{100 * summary.telemetry_share:.2f}%", "of engine time for telemetry")))
    return lines


def _plain(number: float | None) -> str:
    return "-" if number is None else short(number)


CARDS: dict[str, Card] = {
    "hit-rate": hit_rate,
    "first-token": first_token,
    "throughput": throughput,
    "requests": requests,
    "evictions": evictions,
    "problems": problems,
}
"""In the order of the grid."""
