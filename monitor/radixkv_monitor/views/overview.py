"""The first screen: one sentence, the pool, and six cards of numbers, each with its last minutes.

Knows summaries and how to lay them out. Does not know what a card says (cards.py), no node and no request by name.
"""

from __future__ import annotations

from typing import Any

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Grid

from radixkv_monitor import history as counters
from radixkv_monitor import palette
from radixkv_monitor.export import Table
from radixkv_monitor.formatting import count, duration, share, size, some
from radixkv_monitor.state import State
from radixkv_monitor.summary import Summary, summarise, verdict
from radixkv_monitor.views import View
from radixkv_monitor.views.cards import CARDS
from radixkv_monitor.widgets.bars import stacked
from radixkv_monitor.widgets.panel import Panel

SIGNS = {"good": "✔", "idle": "·", "warn": "▲", "bad": "✖"}
POOL = (("active", palette.ACTIVE), ("pinned", palette.PINNED), ("cached", palette.CACHED), ("free", palette.FREE))
LOW = 14
"""Lines below which each card is a line of its numbers."""
BRIEF = {"hit-rate": "hits", "first-token": "TTFT", "evictions": "evicted"}
"""What stands before the numbers of such a card, where they do not speak for themselves."""


class OverviewView(View):
    """How the engine is doing."""

    DEFAULT_CSS = """
    OverviewView { layout: vertical; padding: 0 1; }
    #verdict { height: auto; max-height: 2; }
    #facts { height: 1; }
    #pool-bar { height: 3; }
    #cards { grid-size: 2 3; grid-gutter: 0 3; height: 1fr; }
    OverviewView.-wide {
        #cards { grid-size: 3 2; grid-gutter: 1 4; }
        #verdict { margin: 1 0; }
        #pool-bar { height: 5; margin: 1 0; }
    }
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
        """The sentence, facts, pool and cards."""
        for name in ("verdict", "facts", "pool-bar"):
            yield Panel(name)
        with Grid(id="cards"):
            for name in CARDS:
                yield Panel(f"card-{name}")

    def on_resize(self, event: events.Resize) -> None:
        """Two columns of cards, or three; lines, where there is no room for cards."""
        self.set_class(event.size.height < LOW, "-low")
        self.set_class(event.size.width >= 120 and event.size.height >= LOW, "-wide")
        self.call_after_refresh(self._draw)

    def update(self, state: State) -> None:
        """Draw a state."""
        self._state, self._summary = state, summarise(state)
        self._draw()

    def export(self) -> Table:
        """The summary, as one row a number."""
        if self._summary is None or self._state is None:
            return Table("overview", [])
        rows = [{"name": "verdict", "value": verdict(self._state, self._summary).sentence}]
        return Table("overview", [*rows, *_flat("", self._summary.as_dict())])

    # ---- drawing

    def _draw(self) -> None:
        if self._state is None or self._summary is None:
            return
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

    def _draw_verdict(self, state: State, summary: Summary) -> None:
        said = verdict(state, summary)
        colours = {"good": "success", "idle": "primary", "warn": "warning", "bad": "error"}
        style = Style(color=self.app.theme_variables.get(colours[said.level]), bold=True)
        if self._panel("verdict").show([Text(f"{SIGNS[said.level]} {said.sentence}", style)]):
            self.call_after_refresh(self._draw)  # it may take a line more, or fewer, and leave others to the cards

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
            f"{some(pool.total, 'block')} of {facts.block_size} tokens, {size(pool.total * facts.bytes_per_block)}"
            f" · {count(state.stats.get('cache.nodes', 0))} nodes"
        )
        bar = stacked(parts, panel.size.width)
        return [panel.title("Pool", aside), *([bar] * max(1, panel.size.height - 2)), legend]


def _brief(panel: Panel, name: str, numbers: Text) -> Text:
    """A card in one line."""
    if not name:
        return numbers
    return Text.assemble((f"{name} ", panel.style_of("title")), numbers, no_wrap=True, overflow="ellipsis")


def facts_line(state: State) -> str:
    """What the engine is."""
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
    """Nested values as rows of dotted names."""
    rows: list[dict[str, Any]] = []
    for name, value in values.items():
        rows += (
            _flat(f"{prefix}{name}.", value) if isinstance(value, dict) else [{"name": prefix + name, "value": value}]
        )
    return rows
