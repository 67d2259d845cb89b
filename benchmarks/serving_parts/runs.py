"""Run one engine once, run rounds of engines in turn, and print tables of the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .bench import PLAIN, TIES, Bench
from .clients import Record, closed_loop
from .figures import Figures, agreement, figures, median
from .servers import Server
from .workloads import Session

COLUMNS = {
    "requests_per_s": "req/s",
    "output_tokens_per_s": "tok/s",
    "ttft_p50_ms": "ttft p50",
    "ttft_p90_ms": "p90",
    "ttft_p99_ms": "p99",
    "gap_p50_ms": "gap p50",
    "gap_p90_ms": "p90",
    "gap_p99_ms": "p99",
    "gap_max_ms": "max",
    "hit_tokens": "hit",
    "computed_tokens": "computed",
    "preemptions": "preempted",
    "kv_mb": "KV MB",
    "held_mb": "held MB",
}


def run(
    bench: Bench, engine: str, kv_tokens: int, play: Callable[[Server], list[Record]]
) -> tuple[Figures, list[Record]]:
    """Start the engine, warm it up, let `play` load it, stop it."""
    with bench.serve(engine, kv_tokens) as server:
        before = server.counted()
        records = play(server)
        after = server.counted()
    hits, computed = after.hit_tokens - before.hit_tokens, after.computed_tokens - before.computed_tokens
    return figures(records, replace(after, hit_tokens=hits, computed_tokens=computed)), records


def measure_closed(
    bench: Bench, sessions: list[Session], engines: Sequence[str], rounds: int
) -> tuple[dict[str, Figures], list[str]]:
    """Print and return the median figures of each engine, and its wrong answers."""
    runs: dict[str, list[Figures]] = {engine: [] for engine in engines}
    wrong: list[str] = []
    for number in range(rounds):
        answers: dict[str, list[Record]] = {}
        for engine in engines:
            found, answers[engine] = run(
                bench, engine, room(bench, sessions), lambda server: closed_loop(server, sessions, bench.clients)
            )
            runs[engine].append(found)
        wrong += _compare(bench, answers, aloud=number == 0)
    medians = {engine: median(found) for engine, found in runs.items()}
    show("closed loop", {engine: found.as_dict() for engine, found in medians.items()})
    return medians, wrong


def _compare(bench: Bench, answers: dict[str, list[Record]], *, aloud: bool) -> list[str]:
    wrong = []
    for engine, records in answers.items():
        if engine == PLAIN or PLAIN not in answers:
            continue
        alike = agreement(bench.plain, answers[PLAIN], records)
        if aloud:
            said = f"{alike.alike} of {alike.sessions} sessions answered alike"
            print(f"    {engine}: {said}" + (f"; the widest tie: {alike.widest:.1e}" if alike.widest else ""))
        if alike.widest > TIES[engine]:
            wrong.append(f"{bench.name}: {engine} and {PLAIN} differ by more than a tie: {alike.widest:.2g}")
    return wrong


def room(bench: Bench, sessions: list[Session]) -> int:
    """KV tokens for as many of the longest histories as there are clients."""
    longest = max(session.longest() for session in sessions)
    return bench.clients * -(-longest // 256) * 256


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print a table; times in ms."""
    print(f"  {title}")
    print(" " * 28 + "".join(f"{label:>10}" for label in COLUMNS.values()))
    for engine, row in rows.items():
        print(f"    {engine:<24}" + "".join(f"{_cell(row[key]):>10}" for key in COLUMNS), flush=True)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.2f}"
