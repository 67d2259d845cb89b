"""Measure the order of waiting requests: hits and waits of a replay, and turns between tenants of a live engine.

    python benchmarks/wait_queue.py [--parts replay tenants] [--traces DIR] [--seconds 60]

  replay   The rows of docs/scheduling.md: the made-up agents, and with DIR the traces of `trace_lru`. A simulated queue
           serves them by "fcfs", by "longest-prefix" without a bound on the wait, and with max_delay=10. Small changes
           of time reorder whole sessions, so hits are means over RATES times the prefill rate. Bars: at each rate the
           longest wait with max_delay=10 is at most 10 s longer than that of "fcfs". On the coding agents it keeps half
           of the hits that "longest-prefix" gains over "fcfs".
  tenants  The bundled model. One tenant always has requests with long replies, another one sends short requests, one at
           a time: at once (frequent), or within a second after a long reply (rare), to two streams; and to 64 streams
           while 300 requests wait (crowd). Bar: with two streams, the output tokens per step are 0.97 times those
           without turns: both send to one namespace, so requests wait by arrival. Runs in the order A, B, B, A.

A step takes as long as 95% of the steps in the same run. Tokens per CPU second have no bar: other work on the machine
changes them by a quarter. Ends in one JSON line; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from operator import sub
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from radixkv import Engine, SamplingParams
from radixkv.engine.scheduler import Plan
from radixkv.errors import EngineClosed
from radixkv_traces.formats import read
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.simulate_queue import QueueResult, Service, replay_queue
from radixkv_traces.workload import Workload, prepare

RATES = (0.9, 0.95, 1.0, 1.05, 1.1)
DELAY = 10.0
WARM_UP = 2.0  # seconds until all streams run
ORDERS = (("fcfs", DELAY), ("longest-prefix", inf), ("longest-prefix", DELAY))  # with max_delay
AGENTS, CONVERSATION, MADE = "cc_agent_dev_512.jsonl", "mooncake_conversation_512.jsonl", "made-up agents"
ROWS = (  # trace, prompt tokens per second, share of the unique blocks
    (AGENTS, 100_000, 0.025),
    (AGENTS, 30_000, 0.025),
    (AGENTS, 30_000, 0.05),
    (MADE, 20_000, 0.025),
    (CONVERSATION, 40_000, 0.025),
)
Bar = Callable[[bool, str], None]


def main() -> int:
    """Run the chosen parts; return the exit status."""
    parts = {"replay": replay, "tenants": tenants}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), help="default: all")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with the full traces")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run with a live engine (default 60)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    missed: list[str] = []

    def bar(met: bool, text: str) -> None:
        print(f"  {'met' if met else 'MISSED'}: {text}", flush=True)
        if not met:
            missed.append(text)

    found = {part: parts[part](options, bar) for part in options.parts}
    print(json.dumps({"benchmark": "wait_queue", **found, "missed": missed}))
    return 1 if missed else 0


def replay(options: argparse.Namespace, bar: Bar) -> list[dict[str, Any]]:
    """Replay each row that has its trace."""
    loaded = {MADE: prepare(generate(KINDS["agent"], 100, 7, rate=0.2), 64)}
    if options.traces is not None:
        loaded |= {name: prepare(read(options.traces / name), 512) for name in (AGENTS, CONVERSATION)}
    return [_replay_row(loaded[row[0]], *row, bar) for row in ROWS if row[0] in loaded]


def _replay_row(workload: Workload, name: str, rate: int, share: float, bar: Bar) -> dict[str, Any]:
    print(f"{name}, {rate:,} prompt tokens per second, pool {share:.1%}", flush=True)
    found: dict[tuple[str, float], list[QueueResult]] = {}
    for order, delay in ORDERS:
        speeds = [Service(rate * factor, max_delay=delay) for factor in RATES]
        capacity = max(1, int(workload.unique_blocks * share))
        found[order, delay] = [replay_queue(workload, capacity, "lru", order, each) for each in speeds]
    hits = [mean(each.token_hit_rate for each in results) for results in found.values()]
    rows = [
        _summary(*key, hit, results[RATES.index(1.0)]) for hit, (key, results) in zip(hits, found.items(), strict=True)
    ]
    fcfs, free, bound = hits
    kept = round((bound - fcfs) / (free - fcfs), 3)
    first, _, delayed = ([max(each.waits) for each in results] for results in found.values())
    longer = max(map(sub, delayed, first))
    bar(longer <= DELAY, f"the longest wait with max_delay=10 is {longer:+.1f} s beside the longest of fcfs")
    bar(name != AGENTS or kept >= 0.5, f"max_delay=10 keeps {kept:.0%} of the gain of longest-prefix")
    return {"trace": name, "prefill_rate": rate, "pool": share, "kept": kept, "rows": rows}


def _summary(order: str, delay: float, hits: float, result: QueueResult) -> dict[str, Any]:
    """Return the mean hit rate over all rates, and the figures at the rate itself."""
    waits = dict(zip(("p50", "p99", "max"), np.percentile(result.waits, (50, 99, 100)).round(2).tolist(), strict=True))
    here = round(result.token_hit_rate, 4)
    print(f"  {order:<14} max_delay {delay:<4} hits {hits:.4f} (here {here:.4f}), waits {waits}")
    return {"order": order, "max_delay": delay, "hit_rate": round(hits, 4), "hit_rate_here": here, "wait_s": waits}


class Load:
    """Clients of one engine, a thread each: some for long replies, one for short ones."""

    def __init__(self, seconds: float, **settings: Any) -> None:
        """Load the bundled model."""
        self._engine = Engine.load("tiny", monitor=False, **settings)
        self._seconds, self._rng = seconds, random.Random(0)
        self._over, self._long_ended = threading.Event(), threading.Event()
        self._ttfts: list[float] = []
        self._begins: list[float] = []  # of steps, in seconds

    def run(self, namespaces: tuple[str, str], long_clients: int, reply: int, *, rare: bool) -> dict[str, float]:
        """Keep `long_clients` requests for replies of up to `reply` tokens in the engine, beside one short request."""
        clients = [threading.Thread(target=self._long, args=(namespaces[0], reply)) for _ in range(long_clients)]
        clients.append(threading.Thread(target=self._short, args=(namespaces[1], rare)))
        scheduler = self._engine.core.scheduler
        scheduler.schedule = partial(self._timed, scheduler.schedule)  # type: ignore[method-assign]
        for each in clients:
            each.start()
        time.sleep(WARM_UP)
        before, cpu = self._engine.stats(), time.process_time()
        time.sleep(self._seconds)
        after, cpu = self._engine.stats(), time.process_time() - cpu
        self._engine.close()
        self._over.set()
        self._long_ended.set()
        for each in clients:
            each.join()
        p50, p99 = np.percentile(self._ttfts, (50, 99)).tolist()
        steps, tokens = np.diff(self._begins), after.output_tokens - before.output_tokens
        found = {"tokens_per_step": tokens / (after.steps - before.steps), "tokens_per_cpu_s": tokens / cpu}
        found |= {"ttft_p50_s": p50, "ttft_p99_s": p99, "ttft_max_s": max(self._ttfts)}
        found |= {"step_p95_s": float(np.percentile(steps, 95)), "step_mean_s": float(steps.mean())}
        counts = {"short_requests": len(self._ttfts)}
        return counts | {name: round(value, 4) for name, value in found.items()}

    def _timed(self, schedule: Callable[..., Plan], **options: bool) -> Plan:
        self._begins.append(time.perf_counter())
        return schedule(**options)

    def _long(self, namespace: str, reply: int) -> None:
        while self._ask(namespace, self._rng.randint(reply // 2, reply)) is not None:
            self._long_ended.set()

    def _short(self, namespace: str, rare: bool) -> None:
        while (ttft := self._ask(namespace, 2)) is not None:
            self._ttfts.append(ttft)
            self._long_ended.clear()
            if rare and self._long_ended.wait():
                self._over.wait(self._rng.random())

    def _ask(self, namespace: str, tokens: int) -> float | None:
        """Return the seconds to the first token; None if the engine was closed."""
        prompt = [self._rng.randrange(5, 500) for _ in range(24)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        try:
            return self._engine.submit(prompt, params, namespace=namespace).result().usage.ttft_s
        except EngineClosed:
            return None


def tenants(options: argparse.Namespace, bar: Bar) -> dict[str, Any]:
    """Measure two tenants with two streams, and with 64."""
    found: dict[str, Any] = {}
    for kind in ("rare", "frequent"):
        runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for turns in (False, True, True, False):
            load = Load(options.seconds, num_blocks=1024, max_sequences=2)
            runs[turns].append(load.run(("long", "short" if turns else "long"), 3, 600, rare=kind == "rare"))
            print(f"tenants, short requests {kind}, {'' if turns else 'no '}turns: {runs[turns][-1]}", flush=True)
        with_turns, without = (mean(each["tokens_per_step"] for each in runs[turns]) for turns in (True, False))
        bar(with_turns / without >= 0.97, f"throughput {with_turns / without:.3f} times that without turns")
        found[kind] = {"turns": runs[True], "no turns": runs[False], "throughput": round(with_turns / without, 3)}
    load = Load(options.seconds, num_blocks=4096, max_sequences=64)
    found["crowd"] = load.run(("many", "few"), 364, 400, rare=False)
    print(f"crowd: {found['crowd']}")
    return found


if __name__ == "__main__":
    sys.exit(main())
