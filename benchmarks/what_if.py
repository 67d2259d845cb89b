"""Measure the curve of pool sizes, and the lint of prompts: what they find, their memory, and their CPU time.

    python benchmarks/what_if.py [--traces DIR] [--megabytes 100] [--repeats 5]

The curve. The traces are the package's samples, four kinds of `radixkv-replay generate`, and with --traces the two full
traces of `benchmarks/trace_lru.py`. A pool has 0.25%, 2.5% or 10% of a trace's unique blocks. Each of the six sizes of
its curve is replayed through the real cache, and the share of hit tokens may differ by 2 points, and by 0.1 points for
a trace of less than 8,192 blocks. Memory is the peak of a curve that has met 100,000 blocks. CPU time is the median of
five runs for hashing a request's tokens and adding it, while all blocks are sampled (`few`) and while the sample is
full (`full`). It may take 30 us a request and 25 us for each 1,000 tokens.

Lint. It reads 20 logs with one fault of known cost each, and 5 without faults (tests/traces/faulty_logs.py): rule,
place and tokens must be right. Then `radixkv-replay lint` reads a log of 100 MB in another process. Its lines repeat
their conversations, and a third of the sessions have a new id in each system prompt. CPU time is user and system time
of all threads, with the start. The live part compares each request of the 25 logs as a server does. Its time is the
median over the requests of known conversations: all but the first one of each session.

The last line is JSON; the exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from trace_lru import add_traces, sources

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' logs

from radixkv.serve.break_index import BreakIndex
from radixkv.telemetry.what_if import SIZES, WhatIf, mixed, prefix_ids
from radixkv_traces.formats import read
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.lint import lint
from radixkv_traces.simulate import replay
from radixkv_traces.simulate_detail import curve
from radixkv_traces.workload import Workload, prepare
from tests.traces.faulty_logs import CLEAN, FAULTS, LOGS, TABLE, Fault, number, plain_log, version_of

SHARES = (0.0025, 0.025, 0.10)
SAMPLED = 8192
POINTS, POINTS_EXACT = 2.0, 0.1
MEBIBYTES = 4
MICROSECONDS, PER_1000_TOKENS = 30, 25
GENERATED = 4000  # requests of each kind of `generate`
SESSIONS = 50  # conversations that take turns while CPU time is measured
BARS = {"cpu_s": 60.0, "rss_mb": 500.0, "live_us": 30.0}
CHILD = """
import json, sys, time
from pathlib import Path
from radixkv_traces.cli import main
main(["lint", sys.argv[1], "--json"])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"cpu_s": time.process_time(), "rss_mb": int(peak.split()[1]) * 1024 / 1e6}))
"""


# ---- the curve


def curve_rows(traces: Any) -> list[dict[str, Any]]:
    """Return a row for each bar of the curve; print each."""
    rows = [error_row(name, workload, share) for name, workload in workloads(traces) for share in SHARES]
    cases = [(size, tokens, full) for size in (16, 64) for tokens in (100, 1000, 10_000) for full in (False, True)]
    return [*rows, memory_row(), *(cpu_row(*case) for case in cases)]


def workloads(traces: Any) -> Iterator[tuple[str, Workload]]:
    every = [*sources(None), *(sources(traces) if traces else [])]
    for name, source, block_tokens in every:
        yield name, prepare(list(read(source)), block_tokens)
    for name, kind in KINDS.items():
        yield f"generate {name}", prepare(islice(generate(kind, sessions=GENERATED, seed=1), GENERATED), 64)


def error_row(name: str, workload: Workload, share: float) -> dict[str, Any]:
    pool = max(1, int(workload.unique_blocks * share))
    exact = [replay(workload, max(1, int(size * pool)), "lru").token_hit_rate for size in SIZES[:-1]]
    errors = [100 * (rate - true) for rate, true in zip(curve(workload, pool).values(), exact, strict=False)]
    bar = POINTS_EXACT if workload.unique_blocks < SAMPLED else POINTS
    row = {"trace": name, "unique_blocks": workload.unique_blocks, "pool_blocks": pool}
    row |= {"points": [round(error, 3) for error in errors], "bar": bar, "passed": max(map(abs, errors)) <= bar}
    shown = " ".join(f"{error:+7.3f}" for error in errors)
    return told(row, f"{name:<32} {workload.unique_blocks:>8,} unique, pool {pool:>7,}: {shown} points")


def memory_row() -> dict[str, Any]:
    tracemalloc.start()
    what_if = WhatIf(10_000, 16, SAMPLED)
    for first in range(0, 100_000, 500):
        what_if.add(mixed(np.arange(first, first + 500, dtype=np.uint64)), 8000, 0, float(first))
    what_if.report(0.0)
    mebibytes = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    row = {"peak_mebibytes": round(mebibytes, 2), "bar": MEBIBYTES, "passed": mebibytes <= MEBIBYTES}
    return told(row, f"peak memory {mebibytes:.2f} MiB")


def cpu_row(block_size: int, tokens: int, full: bool) -> dict[str, Any]:
    found = statistics.median(cpu_time(block_size, tokens, full) for _ in range(5))
    bar = MICROSECONDS + PER_1000_TOKENS * tokens / 1000
    row: dict[str, Any] = {"block_size": block_size, "tokens": tokens, "sample": "full" if full else "few"}
    row |= {"microseconds": round(found, 1), "bar": bar, "passed": found <= bar}
    return told(
        row, f"blocks of {block_size}, {tokens:>6,} tokens, sample {row['sample']}: {found:7.1f} us of {bar:.1f}"
    )


def cpu_time(block_size: int, tokens: int, full: bool) -> float:
    """Return the mean of hashing and adding a prompt, in us, after the first one of each conversation."""
    draw, what_if = np.random.default_rng(0), WhatIf(20_000, block_size, SAMPLED)
    texts = [draw.integers(0, 50_000, tokens).astype(np.int32) for _ in range(SESSIONS)]
    for batch in range(40 * full):
        what_if.add(mixed(np.arange(20_000, dtype=np.uint64) + np.uint64(20_000 * batch)), 1, 0, 0.0)
    prompts = []
    for at in range(SESSIONS + (2000 if full else 200)):
        texts[at % SESSIONS][tokens // 2 + draw.integers(tokens // 2) :] += 1  # the rest is new
        prompts.append(texts[at % SESSIONS].copy())
    for at, prompt in enumerate(prompts):
        if at == SESSIONS:
            begin = time.thread_time()
        what_if.add(prefix_ids(prompt, block_size, b"key"), tokens, 0, at / 10)
    return 1e6 * (time.thread_time() - begin) / (len(prompts) - SESSIONS)


def told(row: dict[str, Any], line: str) -> dict[str, Any]:
    print(f"  {line}: {'met' if row['passed'] else 'MISSED'}", flush=True)
    return row


# ---- lint


def lint_rows(megabytes: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Print and return one row for each check of lint."""
    yield shown("faults found", len(FAULTS), sum(map(is_right, FAULTS.values())), "of {bar}")
    yield shown("clean logs without findings", len(CLEAN), sum(is_right(LOGS[name]) for name in CLEAN), "of {bar}")
    used = lint_of_a_file(megabytes)
    yield shown(f"CPU of {megabytes} MB", BARS["cpu_s"], used["cpu_s"], "s, {bar} at most")
    yield shown(f"memory of {megabytes} MB", BARS["rss_mb"], used["rss_mb"], "MB, {bar} at most")
    yield from live_rows(repeats)


def shown(name: str, bar: float, found: float, text: str) -> dict[str, Any]:
    """Print a figure beside its bar, which is a maximum or the only right value, and return it as a row."""
    passed = found <= bar if "most" in text else found == bar
    print(f"  {name:<28} {found:>8,.1f} {text.format(bar=bar)} {'met' if passed else 'MISSED'}")
    return {"name": name, "bar": bar, "found": round(found, 2), "passed": passed}


def is_right(fault: Fault) -> bool:
    """Whether lint has the findings of a log, and no other."""
    found = [(each.rule, each.place, each.tokens, each.requests) for each in lint(fault.requests).findings]
    return found == fault.findings()


# ---- a large file


def lint_of_a_file(megabytes: int) -> dict[str, float]:
    """Return CPU seconds and peak resident memory of `radixkv-replay lint` for a log of so many MB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with path.open("w") as file:
            for line in lines():
                file.write(line)
                if file.tell() >= megabytes * 1e6:
                    break
        done = subprocess.run([sys.executable, "-c", CHILD, path], capture_output=True, text=True, check=True)
    used: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return used


def lines() -> Iterator[str]:
    """Write sessions of 8 to 40 turns as `serve --record-text` does, six at a time."""
    _, _, _, change = TABLE["request id"]
    for seed in count():
        rng = Random(seed)
        for at, base in enumerate(plain_log(rng, [rng.randint(8, 40) for _ in range(6)])):
            it = version_of(base, number(at, base) if base.session < "s2" else "", change)
            fields = {"timestamp": it.timestamp, "session": f"{seed}.{it.session}", "output_length": 60}
            yield json.dumps({**fields, "messages": it.messages, "tools": it.tools}) + "\n"


# ---- the live part


def live_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """Compare the requests of each log with a new memory of conversations."""
    answers = [answer for _ in range(repeats) for fault in LOGS.values() for answer in compared(fault)]
    yield shown("wrong live answers", 0, sum(not right for right, _ in answers), "of {bar}")
    known = statistics.median(seconds for _, seconds in answers if seconds)
    yield shown("live part", BARS["live_us"], known * 1e6, "us a request, {bar} at most")


def compared(fault: Fault) -> Iterator[tuple[bool, float]]:
    """Return whether the answer to each request is right, and its seconds; 0 in a new conversation."""
    index = BreakIndex(64 << 20)
    for at, it in enumerate(fault.requests):
        messages, tools = json.loads(json.dumps([it.messages, it.tools]))  # a server has just read them
        begin = time.perf_counter()
        found = index.compared(it.namespace, messages, tools, it.session).found
        seconds = time.perf_counter() - begin
        yield (found and (found.part, found.rule)) in fault.allowed(at), seconds * (it.turn > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_traces(parser)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the large log (default: 100)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the live part (default: 5)")
    arguments = parser.parse_args()
    curves, lints = curve_rows(arguments.traces), [*lint_rows(arguments.megabytes, arguments.repeats)]
    print(json.dumps({"benchmark": "what_if", "curve": curves, "lint": lints}))
    if not all(row["passed"] for row in [*curves, *lints]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
