"""The six cards of the Overview: each returns a title and lines that fit into its panel.

Every number names its window, and every graph its maximum and the span of time that it covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from radixkv_monitor import history as counters
from radixkv_monitor.formatting import count, duration, plural, share, short, size
from radixkv_monitor.history import MINUTE, MOMENT
from radixkv_monitor.latency import Percentiles, name_of, time_text
from radixkv_monitor.occupancy import Part, Process
from radixkv_monitor.state import Sample, State
from radixkv_monitor.summary import Summary
from radixkv_monitor.widgets.panel import Panel

SPANS = ((60.0, "1 min"), (120.0, "2 min"), (300.0, "5 min"), (600.0, "10 min"))
"""The spans of graphs; the shortest one that covers all samples is used."""
TALLEST = 12
"""The most lines of a graph."""

MISSES = {"never_seen": "new", "no_state": "without state"}
"""The reasons of misses as the card names them, where they differ."""

Card = Callable[[Panel, State, Summary, Sequence[Sample]], list[Text]]


def _room(panel: Panel, lines: int) -> int:
    """Return the lines that are left for a graph."""
    return min(TALLEST, max(1, panel.size.height - lines))


def _span(state: State, history: Sequence[Sample]) -> tuple[float, str]:
    """Return the seconds to draw, and their name."""
    seen = state.now - history[0].time if history else 0.0
    return next((span for span in SPANS if seen <= span[0]), SPANS[-1])


def _rates(state: State, history: Sequence[Sample], name: str, span: float) -> Callable[[int], list[float]]:
    """Return a function that gives a counter's growth per second at a number of points of a graph."""
    return lambda points: [each * points / span for each in counters.series(history, name, state.now, span, points)]


def rate_window(summary: Summary) -> str:
    """Name the window of the rates; before the first one, that which they will have."""
    return duration(summary.rate_window or MOMENT)


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def hit_rate(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """The share of prompt tokens that were cached, over three windows, and the others by the reason of the miss."""
    span, span_name = _span(state, history)

    def rates(points: int) -> Sequence[float | None]:
        asked = counters.series(history, "prompt_tokens", state.now, span, points)
        found = counters.series(history, "cached_tokens", state.now, span, points)
        return [hits / tokens if tokens >= 1 else None for hits, tokens in zip(found, asked, strict=True)]

    missed = [(short(tokens), MISSES.get(reason, reason)) for reason, tokens in summary.missed_tokens.items()]
    return [
        panel.title("Hit rate", f"of prompt tokens, {span_name}"),
        panel.numbers(
            (str(summary.hit_minute), summary.minute_name),
            (str(summary.hit_run), "run"),
            (str(summary.hit_lifetime), "since load"),
        ),
        *([panel.numbers(*missed)] if missed else []),
        *panel.graph(rates, _room(panel, 2 + bool(missed)), _percent, top=1.0),
    ]


def latency(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Percentiles of TTFT, inter-token latency, queue time and end-to-end latency, with their counts."""
    rows = (
        ("TTFT hit", summary.ttft_hit),
        ("TTFT miss", summary.ttft_miss),
        ("ITL", summary.itl),
        ("queue time", summary.queue_time),
        ("E2E", summary.e2e),
    )
    lines = [panel.title("Latency", f"{summary.latency_window}: number, p50, p90, p99")]
    lines += [_percentiles(panel, name, times) for name, times in rows]
    if summary.itl is not None and summary.itl_window != summary.latency_window:
        lines[3].append(f" {summary.itl_window}", panel.style_of("dim"))
    if gain := _gain(summary):
        lines.append(Text(gain, panel.style_of("dim"), no_wrap=True))
    return lines


def _percentiles(panel: Panel, name: str, times: Percentiles | None) -> Text:
    """Write a row of the card; a dash for times that the engine does not send."""
    line = Text(f"{name:<10}", panel.style_of("dim"), no_wrap=True, overflow="ellipsis")
    if times is None:
        return line.append(" not sent by this engine", panel.style_of("dim"))
    line.append(f"{short(times.count):>5}", panel.style_of("dim"))
    for value in (times.median, times.p90, times.p99):
        line.append(f" {time_text(value):>6}", panel.style_of("strong"))
    return line


def _gain(summary: Summary) -> str:
    hit, miss = summary.ttft_hit.median, summary.ttft_miss.median
    return f"TTFT p50 of hits: {miss / hit:.1f} times faster" if hit and miss and miss > hit else ""


def throughput(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Tokens per second, and steps."""
    span, span_name = _span(state, history)

    counted = "decode_tokens" in state.stats  # by an older engine they are not, but its output tokens are
    rate, name = (summary.decode_per_second, "decode") if counted else (summary.output_per_second, "output")
    window, drafted = name_of(summary.watched or MINUTE), summary.stream_tokens_per_step
    return [
        panel.title("Tokens/s", f"{rate_window(summary)}; graph: {name}, {span_name}"),
        panel.numbers(
            (short(rate), name),
            (short(summary.prefill_per_second), "prefill"),
            (short(summary.cached_per_second), "cached"),
        ),
        *panel.graph(_rates(state, history, f"{name}_tokens", span), _room(panel, 3 + (drafted is not None)), short),
        panel.numbers(
            (duration(summary.seconds_per_step), "and"),
            (short(summary.tokens_per_step), f"tokens per step, {window}"),
        ),
        *([panel.numbers((f"{drafted:.1f}", f"per stream with drafts, {window}"))] if drafted is not None else []),
    ]


def requests(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Requests now, and those that ended in the last minute."""
    span, span_name = _span(state, history)
    ended = summary.requests_minute
    finished = ended - summary.failed_minute - summary.timed_out_minute - summary.cancelled_minute
    return [
        panel.title("Requests", f"now; graph: running, {span_name}"),
        panel.numbers(
            (count(summary.running), "running"),
            (count(summary.waiting), "waiting"),
            (count(summary.preempted), "preempted"),
        ),
        *panel.graph(
            lambda points: counters.gauges(history, "running", state.now, span, points), _room(panel, 3), short
        ),
        panel.numbers(
            (count(max(0, finished)), "finished"),
            (count(summary.cancelled_minute), f"cancelled, {summary.minute_name}"),
        ),
    ]


def evictions(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Evicted tokens, and those that were requested again."""
    span, span_name = _span(state, history)
    return [
        panel.title("Evictions", f"graph: tokens/s, {span_name}"),
        panel.numbers((short(summary.evicted_per_second), f"tokens/s, {rate_window(summary)}")),
        *panel.graph(_rates(state, history, "cache.evicted_tokens", span), _room(panel, 4), short),
        _regret(panel, summary.regret_minute, summary.minute_name),
        _regret(panel, summary.regret_lifetime, "since load"),
    ]


def _regret(panel: Panel, regret: Part, window: str) -> Text:
    """Write the share of the requested tokens that had been evicted, and the number of requested tokens."""
    return panel.numbers((str(regret), f"regret of {short(regret.whole)} tokens, {window}"))


def problems(panel: Panel, state: State, summary: Summary, history: Sequence[Sample]) -> list[Text]:
    """Failures, preemptions and audits that are not 0, and the cost of the engine's process and of its telemetry."""
    minute = (
        (summary.failed_minute, "failed"),
        (summary.timed_out_minute, "timed out"),
        (summary.preemptions_minute, "preemptions"),
    )
    since_load = (
        (summary.failed, "failed"),
        (summary.timed_out, "timed out"),
        (summary.preemptions, "preemptions"),
        (summary.recomputed_tokens, "tokens recomputed"),
        (summary.differing_blocks, f"of {plural(summary.audited_blocks, 'audited block')} differ"),
        (summary.overdue_admissions, "overdue"),
    )
    known = [(minute, summary.minute_name), (since_load, "since load")]
    found = [line for counts, window in known if (line := _counted(counts, window))]
    lines = [panel.title("Problems", "and the engine's process")]
    lines += [panel.numbers(*figures) for figures in found or [[("none", "since load")]]]
    lines += [panel.numbers(*figures) for figures in _process(summary.process)]
    if "monitor_ns" in state.stats:
        window = rate_window(summary) if summary.rate_window else "since load"
        lines.append(panel.numbers((f"{100 * summary.telemetry_share:.2f}%", f"of time for telemetry, {window}")))
    return lines


def _counted(counts: Sequence[tuple[int, str]], window: str) -> list[tuple[str, str]]:
    """Write the numbers that are not 0; the last one with their window."""
    found = [(short(number), name) for number, name in counts if number]
    return [*found[:-1], *((number, f"{name}, {window}") for number, name in found[-1:])]


def _process(process: Process | None) -> list[list[tuple[str, str]]]:
    """Name the CPU time and the memory of the engine's process, and on a second line the memory of its device."""
    if process is None:
        return [[("-", "CPU and RSS: not sent by this engine")]]
    cpu = "-" if process.cpu_share is None else _percent(process.cpu_share)
    lines = [[(cpu, f"of a core, {duration(process.cpu_window or MOMENT)}"), (size(process.rss_bytes), "RSS")]]
    if process.device_bytes is not None:
        whole = process.device_total_bytes
        part = f" of {size(whole)}, {share(process.device_bytes, whole)}" if whole else ""
        lines.append([(size(process.device_bytes), f"device memory{part}")])
    return lines


CARDS: dict[str, Card] = {
    "hit-rate": hit_rate,
    "latency": latency,
    "throughput": throughput,
    "requests": requests,
    "evictions": evictions,
    "problems": problems,
}
"""In the order of the grid."""
