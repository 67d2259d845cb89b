"""The screen of `radixkv-replay run`: progress on stderr while it runs, tables on stdout at its end."""

from __future__ import annotations

import time
from statistics import median
from types import TracebackType
from typing import Any, Self

import rich.progress
from rich.console import Console
from rich.table import Table

from radixkv_traces.live.requests import TOO_LONG, Outcome
from radixkv_traces.live.results import Figures

_REDRAW_INTERVAL = 0.2  # seconds between two drawings
_LINE_INTERVAL = 10.0  # seconds between two lines in a file
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


class Progress:
    """A line on stderr with the progress of a replay; a new line every ten seconds if stderr is not a terminal."""

    def __init__(self, name: str, total: int) -> None:
        """`name` is the target, `total` the number of requests."""
        console = Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(20),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._name = name
        self._total = total
        self._task = self._bar.add_task(f"{name}: the first request", total=total)
        self._drawn = 0.0 if console.is_terminal else time.monotonic()
        self._done = self._failed = self._prompt = self._cached = 0
        self._ttfts: list[float] = []

    def add(self, outcome: Outcome) -> None:
        """Count one more finished request."""
        self._done += 1
        self._failed += outcome.error not in (None, TOO_LONG)
        if outcome.answer is not None:
            self._prompt += outcome.answer.prompt_tokens or 0
            self._cached += outcome.answer.cached_tokens or 0
        if outcome.ttft is not None:
            self._ttfts = [*self._ttfts[-99:], outcome.ttft]
        now = time.monotonic()
        if now - self._drawn < (_REDRAW_INTERVAL if self._console.is_terminal else _LINE_INTERVAL):
            return
        self._drawn = now
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=self._line())
        else:
            self._console.print(f"{self._done:,} of {self._total:,} requests · {self._line()}", highlight=False)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal."""
        self._bar.stop()

    def _line(self) -> str:
        parts = [self._name]
        if self._prompt:
            parts.append(f"{self._cached / self._prompt:.1%} hit")
        if self._ttfts:
            parts.append(f"TTFT {median(self._ttfts) * 1e3:.0f} ms")
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        return " · ".join(parts)


def show(found: Figures) -> None:
    """Print the figures as two tables, a column for each run."""
    console = Console(highlight=False)
    runs = found["runs"]
    if not all(figures["whole"] for figures in runs.values()):
        console.print("[bold]Stopped early[/]: these are the figures so far.")
    for name, figures in runs.items():
        if figures["requests"] and figures["too_long"] == figures["requests"]:
            console.print(f"Every request was too long for {name}: --shrink makes recorded blocks shorter.")
    console.print(_counts(runs))
    if any(figures[key] is not None for figures in runs.values() for key in _TIMES):
        console.print(_latencies(runs))
    for name, figures in runs.items():
        for error, count in figures["errors"].items():
            console.print(f"{count:,} x {error}", markup=False)
        if figures["goodput"] is not None:
            console.print(_goodput(name, figures["goodput"]))
    if "cache_is_worth" in found:
        console.print(_cache_value(found["cache_is_worth"]))


def _counts(runs: dict[str, Figures]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=len(runs) > 1)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for key, label in _ROWS.items():
        values = [figures[key] for figures in runs.values()]
        if any(values) or key in ("requests", "hit_rate"):
            table.add_row(label, *(_number(key, value) for value in values))
    return table


def _latencies(runs: dict[str, Figures]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    for name in ("mean", "median", "p90", "p99"):
        table.add_column(name, justify="right")
    for run, figures in runs.items():
        for key, label in _TIMES.items():
            if figures[key] is not None:
                shown = label if len(runs) == 1 else f"{label}, {run}"
                table.add_row(shown, *(f"{value:,.1f}" for value in figures[key].values()))
    return table


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
