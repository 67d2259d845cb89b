"""What each card of the Overview says: a title, numbers, and their last minutes as a sparkline.

Knows summaries, samples and how much room a panel has. Does not know where the panels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from radixkv_monitor import history as counters
from radixkv_monitor.formatting import count, duration, share, short, some
from radixkv_monitor.state import Sample, State
from radixkv_monitor.summary import Percentiles, Summary
from radixkv_monitor.widgets.panel import Panel

SPANS = ((60.0, "1 min"), (120.0, "2 min"), (300.0, "5 min"), (600.0, "10 min"))
"""How long the sparklines are: as short as shows all that was seen."""
TALLEST = 12
"""Lines of a sparkline."""

Card = Callable[[Panel, State, Summary, Sequence[Sample]], list[Text]]


def _spark_room(panel: Panel, lines: int) -> tuple[int, int]:
    """Columns and lines that are left for a sparkline."""
    return max(1, panel.size.width), min(TALLEST, max(1, panel.size.height - lines))


def _span(state: State, history: Sequence[Sample]) -> tuple[float, str]:
    """Over how many seconds to draw, and what that is called."""
    seen = state.now - history[0].time if history else 0.0
    return next((span for span in SPANS if seen <= span[0]), SPANS[-1])


def hit_rate(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Of prompt tokens, over three spans."""
    width, height = _spark_room(panel, 2)
    span, spoken = _span(state, history)
    asked = counters.series(history, "prompt_tokens", state.now, span, width)
    found = counters.series(history, "cached_tokens", state.now, span, width)
    rates = [hits / tokens if tokens >= 1 else None for hits, tokens in zip(found, asked, strict=True)]
    return [
        panel.title("Hit rate", f"of prompt tokens, {spoken}"),
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
    """Tokens a second, and steps."""
    width, height = _spark_room(panel, 3)
    span, spoken = _span(state, history)
    return [
        panel.title("Tokens per second", f"output, {spoken}"),
        panel.numbers(
            (short(summary.output_per_second), "output"),
            (short(summary.computed_per_second), "computed"),
            (short(summary.cached_per_second), "cached"),
        ),
        *panel.spark(counters.series(history, "output_tokens", state.now, span, width), height),
        panel.numbers(
            (duration(summary.seconds_per_step), "a step"), (_plain(summary.tokens_per_step), "tokens in it")
        ),
    ]


def requests(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Now and so far."""
    width, height = _spark_room(panel, 3)
    span, spoken = _span(state, history)
    return [
        panel.title("Requests", f"running, {spoken}"),
        panel.numbers(
            (count(summary.running), "running"),
            (count(summary.waiting), "waiting"),
            (count(summary.finished), "done"),
        ),
        *panel.spark(counters.gauges(history, "running", state.now, span, width), height),
        panel.numbers((count(summary.requests_minute), "ended in 1 min"), (count(summary.cancelled), "cancelled")),
    ]


def evictions(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """What had to go, and what of it was wanted again."""
    width, height = _spark_room(panel, 3)
    span, spoken = _span(state, history)
    return [
        panel.title("Evictions", f"tokens, {spoken}"),
        panel.numbers((short(summary.evicted_per_second), "tokens/s"), (str(summary.regret_minute), "regret in 1 min")),
        *panel.spark(counters.series(history, "cache.evicted_tokens", state.now, span, width), height),
        panel.numbers(
            (short(summary.regret_lifetime.part), "came back,"),
            (share(summary.regret_lifetime.part, state.stats.get("cache.evicted_tokens", 0.0)), "of all that went"),
        ),
    ]


def trouble(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Preemptions and audits, and what telling all of this costs the engine."""
    audited = f"wrong of {some(summary.audited_blocks, 'audited block')}" if summary.audited_blocks else "audits yet"
    lines = [
        panel.title("Trouble"),
        panel.numbers(
            (count(summary.preemptions_minute), "preemptions in 1 min"), (count(summary.preemptions), "ever")
        ),
        panel.numbers(
            (count(summary.failed_minute), "failed in 1 min"), (short(summary.recomputed_tokens), "computed twice")
        ),
        panel.numbers((count(summary.differing_blocks), audited)),
    ]
    if "monitor_ns" in state.stats:
        lines.append(panel.numbers((f"{100 * summary.telemetry_share:.2f}%", "of its thread for telemetry")))
    return lines


def _plain(number: float | None) -> str:
    return "-" if number is None else short(number)


CARDS: dict[str, Card] = {
    "hit-rate": hit_rate,
    "first-token": first_token,
    "throughput": throughput,
    "requests": requests,
    "evictions": evictions,
    "trouble": trouble,
}
"""In the order of the grid."""
