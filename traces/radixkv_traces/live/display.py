"""The figures of `radixkv-replay run`: a line of progress while it runs, tables on stdout at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from radixkv.cli.entry_point import table
from radixkv_traces.live.requests import TOO_LONG, Outcome
from radixkv_traces.live.results import Figures

_ROWS = {
    "requests": "requests",
    "finished": "answered",
    "failed": "failed",
    "too_long": "too long",
    "unfinished": "not finished",
    "seconds": "seconds",
    "requests_per_s": "answers/s",
    "output_tokens_per_s": "output tokens/s",
    "prompt_tokens": "prompt tokens",
    "hit_rate": "hit rate",
    "preemptions": "preemptions",
}
_TIMES = {
    "ttft_ms": "TTFT",
    "ttft_hit_ms": "TTFT, hit",
    "ttft_miss_ms": "TTFT, miss",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2e_ms": "E2E",
    "late_ms": "sent late",
}


@dataclass
class Tally:
    """Counts the finished requests of a replay, for its line of progress."""

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def add(self, outcome: Outcome) -> None:
        """Count one more finished request."""
        self.done += 1
        self.failed += outcome.error not in (None, TOO_LONG)
        if outcome.answer is not None:
            self.prompt_tokens += outcome.answer.prompt_tokens or 0
            self.cached_tokens += outcome.answer.cached_tokens or 0
        if outcome.ttft is not None:
            self.ttfts.append(outcome.ttft)

    def figures(self) -> Iterator[str]:
        """Yield the hit rate, the median TTFT of the newest requests, and the failures, if there are any."""
        if self.prompt_tokens:
            yield f"{self.cached_tokens / self.prompt_tokens:.1%} hit"
        if self.ttfts:
            yield f"TTFT {median(self.ttfts) * 1e3:.0f} ms"
        if self.failed:
            yield f"{self.failed:,} failed"


def show(found: Figures) -> None:
    """Print the figures as two tables: counts with a column for each run, and latencies."""
    runs = found["runs"]
    if not all(figures["whole"] for figures in runs.values()):
        print("Stopped early: these are the figures so far.")
    for name, figures in runs.items():
        if figures["requests"] and figures["too_long"] == figures["requests"]:
            print(f"Every request was too long for {name}: --shrink makes recorded blocks shorter.")
    print(_counts(runs))
    if any(figures[key] is not None for figures in runs.values() for key in _TIMES):
        print(_latencies(runs))
    for name, figures in runs.items():
        for error, count in figures["errors"].items():
            print(f"{count:,} x {error}")
        if figures["goodput"] is not None:
            print(_goodput(name, figures["goodput"]))
    if "cache_is_worth" in found:
        print(_cache_value(found["cache_is_worth"]))


def _counts(runs: dict[str, Figures]) -> str:
    shown = [key for key in _ROWS if key in ("requests", "hit_rate") or any(run[key] for run in runs.values())]
    rows = [[_ROWS[key], *(_number(key, figures[key]) for figures in runs.values())] for key in shown]
    head, *rest = rows if len(runs) == 1 else [["", *runs], *rows]
    return table(head, rest)


def _latencies(runs: dict[str, Figures]) -> str:
    rows = [
        [label if len(runs) == 1 else f"{label}, {run}", *(f"{value:,.1f}" for value in figures[key].values())]
        for run, figures in runs.items()
        for key, label in _TIMES.items()
        if figures[key] is not None
    ]
    return table(("ms", "mean", "median", "p90", "p99"), rows)


def _goodput(name: str, goodput: Figures) -> str:
    bars = ", ".join(f"{bar.upper()} <= {value:g} ms" for bar, value in goodput["bars_ms"].items())
    share = 0.0 if goodput["share"] is None else goodput["share"]
    return f"goodput of {name} ({bars}): {share:.1%} of the requests, {goodput['requests_per_s']:g}/s"


def _cache_value(ratios: Figures) -> str:
    named = {"ttft_ms": "median TTFT", "e2e_ms": "median E2E", "output_tokens_per_s": "output tokens/s"}
    said = [f"{label} {ratios[key]:.2f}x" for key, label in named.items() if ratios[key] is not None]
    return "gain from the cache: " + ", ".join(said)


def _number(key: str, value: Any) -> str:
    if value is None:
        return "?"
    if key == "hit_rate":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
