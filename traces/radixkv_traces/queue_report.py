"""`radixkv-replay simulate --order`: hit rates and waits of each order of waiting requests."""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np

from radixkv.config import ORDERS
from radixkv_traces.cli import Capacity, Progress, positive, table
from radixkv_traces.simulate_queue import QueueResult, Service, replay_queue
from radixkv_traces.workload import Workload


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulated queue."""
    queue = parser.add_argument_group("queue", "with --order, requests take time and wait for each other")
    queue.add_argument(
        "--order", metavar="LIST", help=f"orders of waiting requests: {', '.join(ORDERS)} (default: no request waits)"
    )
    queue.add_argument(
        "--prefill-rate", type=float, default=20000.0, metavar="N",
        help="prompt tokens per second that are computed (default 20000)",
    )  # fmt: skip
    queue.add_argument(
        "--decode-rate", type=float, default=50.0, metavar="N", help="tokens per second of each answer (default 50)"
    )
    queue.add_argument(
        "--max-sequences", type=positive, default=64, metavar="N", help="requests that run at once (default 64)"
    )


def service_of(arguments: argparse.Namespace) -> Service:
    """Return the speed that the options state. Raises InvalidInput."""
    return Service(arguments.prefill_rate, arguments.decode_rate, arguments.max_sequences)


def queue_rows(
    workload: Workload,
    capacities: Sequence[Capacity],
    policies: Sequence[str],
    orders: Sequence[str],
    service: Service,
) -> Iterator[dict[str, Any]]:
    """Simulate each policy at each capacity in each order, until Ctrl-C or SIGTERM."""
    for capacity, policy, order in product(capacities, policies, orders):
        try:
            with Progress(f"{policy}, {order} at {capacity.text}") as progress:
                result = replay_queue(workload, capacity.blocks, policy, order, service, progress)
        except KeyboardInterrupt:  # before its first request
            return
        yield _row(capacity, result)
        if not result.finished:
            return


def queue_text(service: Service, rows: Sequence[dict[str, Any]]) -> str:
    """Return the speed of the engine, and a table with a row for each replay."""
    said = asdict(service)
    head = (
        f"{said['prefill_rate']:,.0f} prompt tokens per second, {said['decode_rate']:,.0f} tokens per second of each "
        f"answer, {said['max_sequences']:,} requests at once"
    )
    columns = ("capacity", "blocks", "policy", "order", "hit rate", "wait p50", "p99", "TTFT p50", "p99", "duration")
    lines = [
        [row["capacity"], f"{row['capacity_blocks']:,}", row["policy"], row["order"], f"{row['token_hit_rate']:.4f}"]
        + [f"{(row[name] or {}).get(each, 0.0):,.2f} s" for name in ("wait_s", "ttft_s") for each in ("p50", "p99")]
        + [f"{row['duration_s']:,.0f} s"]
        for row in rows
    ]
    return head + "\n\n" + table(columns, lines, left=(0, 2, 3))


def _row(capacity: Capacity, result: QueueResult) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "order": result.order,
        "capacity": capacity.text,
        "capacity_blocks": result.capacity_blocks,
        "token_hit_rate": result.token_hit_rate,
        "requests": len(result.ttfts),
        "input_tokens": result.input_tokens,
        "hit_tokens": result.hit_tokens,
        "wait_s": _percentiles(result.waits),
        "ttft_s": _percentiles(result.ttfts),
        "duration_s": round(result.duration, 3),
        "seconds": round(result.seconds, 4),
        "finished": result.finished,
    }


def _percentiles(values: array[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    found = {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}
