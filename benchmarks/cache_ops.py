"""Time the prefix cache's operations, and SGLang 0.5.23's Rust core on the same work in the same run.

    python benchmarks/cache_ops.py [--quick] [--rounds 3] [--only turns,match]

Each workload (benchmarks/peers/workloads.py: seeded, identical for both) runs in a fresh process per engine and
round, the engines in turn, so that both meet the same disturbances; a figure is the median over the rounds. Clock:
CPU time of the one thread, its reading (about 0.4 us) included.

For radixkv, `open`, `extend`, `commit`, `close` and `match` are timed, from int32 arrays or plain lists to block
tables, write plans and slot arrays. Allocation, eviction, validation, a namespace, ghosts and counters are included.
For SGLang, `match_prefix` + `path_device_indices` + `lock`, `evict` where room is missing, `insert` and `unlock` are
timed. Its slot allocator, namespaces and, except in the rows with lists, the making of its token arrays are left out.
Rows: "turn" is a whole request; "insert 8k" is extend + commit here and `insert` alone there; "evict 64" is the time
that an eviction adds to an `extend` here and to the same step there. With lengths that are not a multiple of 16 SGLang
keeps whole pages only; radixkv keeps every token. Results are checked while timing: slots hold the right tokens,
evicted counts are exact, nothing leaks, and at page-aligned lengths the hit rates of both agree to 0.003 (both are
LRU; SGLang evicts whole nodes, radixkv trims to the block). The bars in microseconds were set on a quiet machine: the
line below the table gives the cost of an empty Python call on this one, now. Without SGLang's wheel only our rows are
printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import sglang_core  # noqa: E402  # lies next to this file, not installed


class Row(NamedTuple):
    label: str
    workload: str  # key of WORKLOADS, for us
    metric: str
    peer: tuple[str, str] | None  # its workload and metric; None: it has nothing of the kind
    bar: str  # "" none; ">= 1.8x", "<= 1x" of the peer; "<= 10" absolute


ROWS = (
    Row("multi-turn, turns/s", "turns", "turns_per_s", ("turns", "turns_per_s"), ">= 1.8x"),
    Row("  200 sessions at a time, turns/s", "turns_window", "turns_per_s", ("turns_window", "turns_per_s"), ">= 1.8x"),
    Row("  509-token turns, turns/s", "turns_509", "turns_per_s", ("turns_509", "turns_per_s"), ""),
    Row("  509, 200 at a time, turns/s", "turns_window_509", "turns_per_s", ("turns_window_509", "turns_per_s"), ""),
    Row("  from plain lists, turns/s", "turns_lists", "turns_per_s", ("turns_lists", "turns_per_s"), ""),
    Row("  with an observer, turns/s", "turns_observed", "turns_per_s", ("turns", "turns_per_s"), ""),
    Row("match 8k, one node, us", "match_8k", "us", ("match_8k", "us"), "<= 1x"),
    Row("match 32k, 64-node chain, us", "match_chain", "us", ("match_chain", "us"), "<= 1x"),
    Row("match 32k, grown turn by turn, us", "match_grown", "us", ("match_grown", "us"), ""),
    Row("insert 8k under 2k, us", "insert", "reserve_publish_us", ("insert", "publish_us"), "<= 1x"),
    Row("  the whole request, us", "insert", "request_us", ("insert", "request_us"), ""),
    Row("evict 64 among 10k leaves, us", "evict_10k", "us", ("evict_10k", "us"), "<= 10"),
    Row("evict 64 among 100k leaves, us", "evict_100k", "us", ("evict_100k", "us"), "<= 10"),
    Row("  with all of its extend, us", "evict_100k", "reserve_us", ("evict_100k", "reserve_us"), ""),
    Row("  the whole request, us", "evict_100k", "request_us", ("evict_100k", "request_us"), ""),
    Row("evict half of 100k leaves, ms", "evict_100k", "half_ms", ("evict_100k", "half_ms"), ""),
    Row("one-token extend + commit, us", "decode", "us", None, "<= 4"),
    Row("  from a list of one, us", "decode_lists", "us", None, "<= 4"),
    Row("64-token leaf, bytes (tracemalloc)", "bytes", "bytes", None, "<= 1000"),
    Row(
        "64-token leaf, bytes (resident)",
        "evict_100k",
        "resident_bytes_per_leaf",
        ("evict_100k", "resident_bytes_per_leaf"),
        "",
    ),
)
COMPARED = {row.peer[0] for row in ROWS if row.peer}
SAME_HITS = ("turns", "turns_window", "turns_lists")
TOLERANCE = 0.003


def measure(engine: str, workload: str, quick: bool) -> dict[str, float]:
    """Run one workload in this process."""
    import workloads as w

    lists, observed = workload.endswith("_lists"), workload.endswith("_observed")
    make: Any
    if engine == "radixkv":
        from radixkv_cache import RadixKV

        make = functools.partial(RadixKV, w.PAGE, as_lists=lists, observed=observed)
    else:
        make = functools.partial(sglang_core.SGLang, w.PAGE, as_lists=lists)
    sessions, repeats = (100, 50) if quick else (1000, 400)
    order = "window" if "window" in workload else "uniform"
    if workload.startswith("turns"):
        return w.turns(make, order, 509 if "509" in workload else 512, sessions)
    if workload.startswith("match"):
        shape = {"match_8k": "node", "match_chain": "chain", "match_grown": "grown"}[workload]
        return w.match(make, shape, 8192 if shape == "node" else 32768, repeats)
    if workload == "insert":
        return w.insert(make, repeats)
    if workload.startswith("evict"):
        leaves = (1000 if quick else 10_000) if workload == "evict_10k" else (5000 if quick else 100_000)
        return w.evict(make, leaves, 20 if quick else 100)
    if workload == "bytes":
        return w.traced_bytes(make, 2000 if quick else 20_000)
    if workload == "machine":
        return w.call_nanoseconds()
    return w.decode(make, new=256 if quick else 2048)


def in_fresh_process(engine: str, workload: str, quick: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--engine", engine, "--only", workload, *(["--quick"] if quick else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent, check=False)
    if done.returncode:
        sys.exit(f"{engine}, {workload}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


class Runs:
    """Medians over fresh processes, the engines in turn within each workload; measured when first asked for."""

    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds, self.quick = rounds, quick
        self.engines = ("radixkv", "sglang") if sglang_core.available() else ("radixkv",)
        self.medians: dict[tuple[str, str], dict[str, float]] = {}

    def of(self, engine: str, workload: str) -> dict[str, float] | None:
        """The medians of `engine` in `workload`; None if it did not take part."""
        if ("radixkv", workload) not in self.medians:
            self._measure(workload, self.engines if workload in COMPARED else ("radixkv",))
        return self.medians.get((engine, workload))

    def _measure(self, workload: str, engines: tuple[str, ...]) -> None:
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
        for round_ in range(self.rounds):
            for engine in engines:
                note = f"\r{workload}: {engine}, round {round_ + 1} of {self.rounds}"
                print(f"{note:60}\r", end="", file=sys.stderr, flush=True)
                runs[engine].append(in_fresh_process(engine, workload, self.quick))
        print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
        for engine, all_ in runs.items():
            self.medians[engine, workload] = {key: statistics.median(run[key] for run in all_) for key in all_[0]}


def verdict(row: Row, ours: float, theirs: float | None) -> str:
    if not row.bar:
        return ""
    sign, bar = row.bar.split()
    if bar.endswith("x"):
        if theirs is None:
            return f"bar {row.bar}"
        value, bound = ours / theirs, float(bar[:-1])
    else:
        value, bound = ours, float(bar)
    met = value >= bound if sign == ">=" else value <= bound
    return f"bar {row.bar}: {'met' if met else 'MISSED'}"


def report(rows: list[Row], runs: Runs) -> list[dict[str, Any]]:
    """Measure and print row by row."""
    print(f"{'':36}{'radixkv':>12}{'SGLang Rust':>14}{'we are':>16}")
    lines = []
    for row in rows:
        own = runs.of("radixkv", row.workload)
        peer = runs.of("sglang", row.peer[0]) if row.peer else None
        assert own is not None
        ours, theirs = own[row.metric], peer[row.peer[1]] if peer and row.peer else None
        gain = None if not theirs else ours / theirs if row.metric == "turns_per_s" else theirs / ours
        word = "bigger" if "bytes" in row.metric else "slower"
        standing = "" if gain is None else f"{gain:.2f}x better" if gain >= 1 else f"{1 / gain:.2f}x {word}"
        shown = "-" if theirs is None else f"{theirs:,.6g}"
        judged = verdict(row, ours, theirs)
        print(f"{row.label:36}{ours:>12,.6g}{shown:>14}{standing:>16}  {judged}".rstrip(), flush=True)
        lines.append({"row": row.label.strip(), "of": row.workload, "ours": ours, "theirs": theirs, "bar": judged})
    return lines


def check_hits(medians: dict[tuple[str, str], dict[str, float]]) -> dict[str, Any]:
    """Hit rates of both sides: they agree where every length is a whole number of pages, and ours is no lower
    elsewhere.
    """
    hits: dict[str, Any] = {}
    for (engine, workload), numbers in medians.items():
        if "hit_rate" in numbers:
            hits.setdefault(workload, {})[engine] = (numbers["hit_rate"], numbers["evicted_tokens"])
    for workload, by in hits.items():
        if len(by) == 2:
            ours, theirs = by["radixkv"], by["sglang"]
            agree = abs(ours[0] - theirs[0]) <= TOLERANCE if workload in SAME_HITS else ours[0] >= theirs[0]
            assert agree, f"{workload}: (hit rate, evicted tokens) {ours} here, {theirs} there"
        text = "; ".join(f"{engine} {rate:.4f}, {int(gone):,} tokens evicted" for engine, (rate, gone) in by.items())
        print(f"hit rate of {workload:20} {text}")
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: smaller workloads, one round")
    parser.add_argument("--rounds", type=int, help="fresh processes per engine and workload (default 3)")
    parser.add_argument("--only", help="comma-separated beginnings of workload names")
    parser.add_argument("--engine", choices=["radixkv", "sglang"], help="run one workload here and print its numbers")
    chosen = parser.parse_args()
    if chosen.engine:
        print(json.dumps(measure(chosen.engine, chosen.only, chosen.quick)))
        return
    only = tuple((chosen.only or "").split(","))
    rows = [row for row in ROWS if row.workload.startswith(only)]
    rounds = chosen.rounds or (1 if chosen.quick else 3)
    runs = Runs(rounds, chosen.quick)
    lines = report(rows, runs)
    call = (runs.of("radixkv", "machine") or {})["ns"]
    print(f"an empty Python call costs {call} ns here and now; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    hits = check_hits(runs.medians)
    if not sglang_core.available():
        print(sglang_core.HOW)
    machine = {"call_ns": call, "python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
    print(
        json.dumps(
            {"benchmark": "cache_ops", "rounds": rounds, "quick": chosen.quick, "rows": lines, "hits": hits, **machine}
        )
    )


if __name__ == "__main__":
    main()
