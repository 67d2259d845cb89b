"""The Latency view: histograms of TTFT, queue time, inter-token latency and end-to-end latency over one window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid
from textual.widgets import Static

from radixkv_monitor.formatting import short
from radixkv_monitor.latency import WINDOWS, Distribution, as_rows, latencies, name_of, time_text
from radixkv_monitor.state import State
from radixkv_monitor.views import Table, View, focus_now
from radixkv_monitor.widgets.histogram import LABEL, Scale, aligned, scale_of
from radixkv_monitor.widgets.panel import AXIS, Panel, columns

KINDS: Mapping[str, str] = {
    "ttft_hit": "TTFT hit",
    "ttft_miss": "TTFT miss",
    "queue_time": "Queue time",
    "itl": "ITL",
    "e2e": "E2E",
}
"""The fields of Latencies with their names, in the order of the grid."""
TTFT = ("ttft_hit", "ttft_miss")
"""The histograms with one axis, because they are compared."""
LOW = 14
"""Lines below which each histogram is one line of numbers."""


class LatencyView(View, can_focus=True):
    """How long requests and tokens took."""

    DEFAULT_CSS = """
    LatencyView { layout: vertical; padding: 0 1; }
    LatencyView .headline { height: 1; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    #histograms { grid-size: 2 3; grid-gutter: 0 3; height: 1fr; }
    LatencyView.-wide #histograms { grid-size: 3 2; grid-gutter: 1 4; }
    LatencyView.-low #histograms { grid-size: 1 5; grid-rows: 1; grid-gutter: 0 0; }
    #latency-e2e { column-span: 2; }
    LatencyView.-low #latency-e2e { column-span: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "window(1)", "Window", tooltip="the next window: 1 min, 10 min, since load"),
        Binding("W", "window(-1)", "Window back", show=False, tooltip="the previous window"),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.window: float | None = WINDOWS[0]
        self._found: Mapping[str, Distribution] = {}

    def compose(self) -> ComposeResult:
        """Lay out the headline and the histograms."""
        yield Static("", classes="headline", markup=False)
        with Grid(id="histograms"):
            for name in KINDS:
                yield Panel(f"latency-{name}")

    def on_resize(self, event: events.Resize) -> None:
        """Show two or three columns of histograms, or one line each if there is little room."""
        self.set_class(event.size.height < LOW, "-low")
        self.set_class(event.size.width >= 120 and event.size.height >= LOW, "-wide")
        self.call_after_refresh(self._draw)

    def take_focus(self) -> None:
        """Focus the view itself, for its keys."""
        focus_now(self)

    def update(self, state: State) -> None:
        """Draw a state."""
        self._state, found = state, latencies(state, self.window)
        self._found = {name: getattr(found, name) for name in KINDS}
        self._draw()

    def export(self) -> Table:
        """Return the buckets that count anything, one a row."""
        return Table("latency", as_rows(self._found))

    def action_window(self, steps: int) -> None:
        """Choose another window."""
        self.window = WINDOWS[(WINDOWS.index(self.window) + steps) % len(WINDOWS)]
        if self._state is not None:
            self.update(self._state)

    # ---- drawing

    def _draw(self) -> None:
        if self._state is None:
            return
        names = "  ".join(f"[{name_of(each)}]" if each == self.window else name_of(each) for each in WINDOWS)
        names += self._state.until
        bars = f"{names} · bars: number per bucket · ▲ p50, p90, p99"
        text = f"p50, p90, p99 · {names}" if self.has_class("-low") else bars
        self.query_one(".headline", Static).update(text, layout=False)
        panels = {name: self.query_one(f"#latency-{name}", Panel) for name in KINDS}
        if self.has_class("-low"):
            for name, panel in panels.items():
                panel.show([_brief(panel, KINDS[name], self._found[name])])
        else:
            for name, panel in panels.items():
                compared = [self._found[each] for each in (TTFT if name in TTFT else (name,))]
                counted = [aligned(each) for each in compared if each.counts is not None]
                scale = scale_of(counted, panel.size.width - AXIS - LABEL)
                panel.show(histogram(panel, KINDS[name], self._found[name], scale)[: max(1, panel.size.height)])


def histogram(panel: Panel, title: str, found: Distribution, scale: Scale) -> list[Text]:
    """Draw a title, the percentiles, columns right of an axis of counts, marks, and the axis of time."""
    lines = [panel.title(title, found.scope)]
    if found.counts is None:
        return lines
    numbers = _numbers(found)
    lines.append(panel.numbers(*((time_text(seconds), f"p{name}") for name, seconds in numbers)))
    dim, height = panel.style_of("dim"), max(1, panel.size.height - 4)
    sums = [count for count in scale.sums(aligned(found)) for _ in range(scale.cells)]
    labels = [short(max(sums, default=0)), *[""] * (height - 2), *["0"] * (height > 1)]
    for label, line in zip(labels, columns(sums, height), strict=True):
        margin = f"{label:>{AXIS - 1}}{'┤' if label else '│'}"
        lines.append(Text.assemble((margin, dim), (line, panel.style_of("spark")), no_wrap=True))
    lines.append(Text(" " * AXIS + scale.marks(numbers), panel.style_of("strong"), no_wrap=True))
    lines.append(Text(" " * AXIS + scale.axis(), dim, no_wrap=True))
    return lines


def _numbers(found: Distribution) -> Sequence[tuple[str, float | None]]:
    times = found.percentiles
    return (("50", times.median), ("90", times.p90), ("99", times.p99))


def _brief(panel: Panel, title: str, found: Distribution) -> Text:
    """Return a histogram as one line of numbers."""
    line = Text(f"{title:<11}", panel.style_of("title"), no_wrap=True, overflow="ellipsis")
    if found.counts is None:
        return line.append(found.scope, panel.style_of("dim"))
    for _, seconds in _numbers(found):
        line.append(f"{time_text(seconds):>7}", panel.style_of("strong"))
    return line.append(f"  {found.scope}", panel.style_of("dim"))
