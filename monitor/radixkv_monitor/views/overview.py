"""The Overview: one sentence, the pool as a bar, the curve of pool sizes, and six cards of numbers with graphs."""

from __future__ import annotations

from typing import Any

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Grid

from radixkv.telemetry.what_if import WhatIfReport
from radixkv_monitor import history as counters
from radixkv_monitor import theme
from radixkv_monitor.formatting import count, duration, plural, share, short, size
from radixkv_monitor.occupancy import Disk, Host, Part, States
from radixkv_monitor.state import State
from radixkv_monitor.summary import Summary, summarise, verdict, what_if_sentence
from radixkv_monitor.views import Table, View
from radixkv_monitor.views.overview_cards import CARDS, rate_window
from radixkv_monitor.widgets.panel import Panel, columns, stacked

SIGNS = {"good": "✔", "idle": "·", "warn": "▲", "bad": "✖"}
POOL = (("active", theme.ACTIVE), ("pinned", theme.PINNED), ("cached", theme.CACHED), ("free", theme.FREE))
GAUGE = 10
"""Cells of a bar of used rows, snapshots, or blocks of a tier."""
POOL_SIZES = ("¼x*", "½x*", "1x* you are here", "2x*", "4x*", "8x*", "∞*")  # a star is a hit rate
SOURCES = (
    ("from_device", "device", theme.CACHED),
    ("from_host", "host", theme.HOST),
    ("computed", "computed", theme.ACTIVE),
)
"""The sources of prompt tokens: the field of Host, the name and the shade."""
LOW = 14
"""Lines below which each card is one line of numbers."""
BRIEF = {"hit-rate": "hits", "evictions": "evicted"}
"""The names of the numbers in such lines, where they need one."""


class OverviewView(View):
    """How the engine is doing."""

    DEFAULT_CSS = """
    OverviewView { layout: vertical; padding: 0 1; }
    #verdict { height: auto; max-height: 2; }
    #facts { height: 1; }
    #pool-bar { height: 3; }
    #what-if { height: auto; max-height: 4; }
    #cards { grid-size: 2 3; grid-gutter: 0 3; height: 1fr; }
    OverviewView.-states { #pool-bar { height: 4; } }
    OverviewView.-host { #pool-bar { height: 5; } }
    OverviewView.-disk { #pool-bar { height: 6; } }
    OverviewView.-wide {
        #cards { grid-size: 3 2; grid-gutter: 1 4; }
        #verdict { margin: 1 0; }
        #pool-bar { height: 5; margin: 1 0; }
        #what-if { margin: 0 0 1 0; }
    }
    OverviewView.-wide.-states { #pool-bar { height: 6; } }
    OverviewView.-wide.-host { #pool-bar { height: 7; } }
    OverviewView.-wide.-disk { #pool-bar { height: 8; } }
    OverviewView.-low {
        #cards { grid-size: 1 6; grid-gutter: 0 0; }
        #verdict { margin: 0; max-height: 1; }
        #facts { display: none; }
        #pool-bar { display: none; }
    }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._summary: Summary | None = None

    def compose(self) -> ComposeResult:
        """Lay out the sentence, facts, pool and cards."""
        for name in ("verdict", "facts", "pool-bar", "what-if"):
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
        rows = [{"name": "verdict", "value": verdict(self._state, self._summary, self.thresholds).sentence}]
        return Table("overview", [*rows, *_flat("", self._summary.as_dict())])

    # ---- drawing

    def _draw(self) -> None:
        if self._state is None or self._summary is None:
            return
        self._make_room("-states", self._summary.states is not None)
        self._make_room("-host", self._summary.host is not None)
        self._make_room("-disk", self._summary.disk is not None)
        self._draw_verdict(self._state, self._summary)
        self._panel("facts").show([Text(facts_line(self._state), self._panel("facts").style_of("dim"), no_wrap=True)])
        self._panel("pool-bar").show(self._pool(self._panel("pool-bar"), self._state, self._summary))
        curve, report = self._panel("what-if"), self._state.what_if
        curve.display = report is not None and not self.has_class("-low")
        if report is not None and curve.show(what_if_lines(curve, report)):
            self.call_after_refresh(self._draw)
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
        """Give the pool more lines if the model has recurrent state, or the engine a lower tier."""
        if self.has_class(name) != needed:
            self.set_class(needed, name)
            self.call_after_refresh(self._draw)

    def _draw_verdict(self, state: State, summary: Summary) -> None:
        judgement = verdict(state, summary, self.thresholds)
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
        below += [] if summary.host is None else host_lines(panel, summary.host, rate_window(summary))
        below += [] if summary.disk is None else [disk_line(panel, summary.disk)]
        return [panel.title("Pool", aside), *([bar] * max(1, panel.size.height - 1 - len(below))), *below]


def what_if_lines(panel: Panel, report: WhatIfReport) -> list[Text]:
    """Draw the hit rates of other pool sizes as a line of small columns, and the sentence."""
    line = Text("What if", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    for name, rate in zip(POOL_SIZES, report.curve.hit_rates, strict=True):
        line.append(f"  {name}".replace("*", columns([rate], top=1.0)[0] + f"{rate:.0%}"), panel.style_of("spark"))
    return [line, Text(what_if_sentence(report), panel.style_of("dim"))]


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


def host_lines(panel: Panel, host: Host, window: str) -> list[Text]:
    """Draw two lines: the used blocks of the host with its traffic in `window`, and the sources of prompt tokens."""
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
    moved.append(f", {window}", dim)
    room = panel.size.width - used.cell_len - moved.cell_len
    forms = (f" {host.blocks.counts} blocks, {size(host.bytes)}", f" {host.blocks.counts}")
    used.append(next((form for form in forms if len(form) <= room), f" {host.blocks}"), strong)
    used.append_text(moved)
    return [used, _sources_line(panel, host)]


def disk_line(panel: Panel, disk: Disk) -> Text:
    """Draw the used blocks of the disk as a short bar, with its numbers."""
    line = Text("disk    ", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    line.append_text(_gauge(disk.blocks, theme.CACHED, panel.app.current_theme.dark))
    return line.append(f" {disk}", panel.style_of("strong"))


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
