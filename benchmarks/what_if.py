"""Measure the curve of pool sizes: its errors against exact replays of LRU, its memory, and its CPU time.

    python benchmarks/what_if.py [--traces DIR]

The traces are the package's samples, four kinds of `radixkv-replay generate`, and with --traces the two full traces of
`benchmarks/trace_lru.py`. A pool has 2.5% or 10% of a trace's unique blocks. Each of the six sizes of its curve is
replayed through the real cache, and the share of hit tokens may differ by 2 points, and by 0.1 points for a trace of
less than 8,192 blocks.
Memory is the peak of a curve that has met 100,000 blocks. CPU time is the mean of hashing a request's tokens and adding
it, while all blocks are sampled (`few`) and while the sample is full (`full`). It may take 30 us a request and 25 us
for each 1,000 tokens. The last line is JSON; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from trace_lru import add_traces, sources

from radixkv.telemetry.what_if import SIZES, WhatIf, mixed, prefix_ids
from radixkv_traces.formats import read
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.simulate import replay
from radixkv_traces.simulate_detail import curve
from radixkv_traces.workload import Workload, prepare

SHARES = (0.025, 0.10)
SAMPLED = 8192
POINTS, POINTS_EXACT = 2.0, 0.1
MEBIBYTES = 4
MICROSECONDS, PER_1000_TOKENS = 30, 25
GENERATED = 4000  # requests of each kind of `generate`
SESSIONS = 50  # conversations that take turns while CPU time is measured


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
    draw, what_if = np.random.default_rng(0), WhatIf(20_000, block_size, SAMPLED)
    texts = [draw.integers(0, 50_000, tokens).astype(np.int32) for _ in range(SESSIONS)]
    for number in range(40 * full):
        what_if.add(mixed(np.arange(20_000, dtype=np.uint64) + np.uint64(20_000 * number)), 1, 0, 0.0)
    prompts = []
    for number in range(2000 if full else 200):
        texts[number % SESSIONS][tokens // 2 + draw.integers(tokens // 2) :] += 1  # the rest is new
        prompts.append(texts[number % SESSIONS].copy())
    begin = time.thread_time()
    for number, prompt in enumerate(prompts):
        what_if.add(prefix_ids(prompt, block_size, b"key"), tokens, 0, number / 10)
    found = 1e6 * (time.thread_time() - begin) / len(prompts)
    bar = MICROSECONDS + PER_1000_TOKENS * tokens / 1000
    row: dict[str, Any] = {"block_size": block_size, "tokens": tokens, "sample": "full" if full else "few"}
    row |= {"microseconds": round(found, 1), "bar": bar, "passed": found <= bar}
    return told(
        row, f"blocks of {block_size}, {tokens:>6,} tokens, sample {row['sample']}: {found:7.1f} us of {bar:.1f}"
    )


def told(row: dict[str, Any], line: str) -> dict[str, Any]:
    print(f"  {line}: {'met' if row['passed'] else 'MISSED'}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_traces(parser)
    rows = curve_rows(parser.parse_args().traces)
    print(json.dumps({"benchmark": "what_if", "curve": rows}))
    if not all(row["passed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
