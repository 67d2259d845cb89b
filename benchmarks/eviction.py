"""Compare the token hit rates of predictive eviction and LRU on two recorded traces.

    python benchmarks/eviction.py [--traces DIR] [--half 1|2]

The traces and the model of serving are those of `trace_lru.py`. The clock shows the trace's times, and each close
carries the reason of the turn's end and the number of generated tokens. Without DIR the package's samples are replayed.
Seconds are CPU time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from trace_lru import add_traces, sources

from radixkv_traces.formats import TraceRequest, read
from radixkv_traces.simulate import replay
from radixkv_traces.workload import prepare

SHARES = (0.01, 0.025, 0.05, 0.10, 0.25, 0.50)


def run(name: str, requests: list[TraceRequest], block_tokens: int) -> list[dict[str, Any]]:
    workload = prepare(requests, block_tokens)
    print(f"{name}: {len(requests):,} requests, {workload.unique_blocks:,} unique blocks of {block_tokens} tokens")
    rows = []
    for share in SHARES:
        for policy in ("lru", "predictive"):
            result = replay(workload, max(1, int(workload.unique_blocks * share)), policy)
            rate, capacity = result.token_hit_rate, result.capacity_blocks
            print(f"  {share:>6.1%} {capacity:>8,} blocks {policy:>10}  hit rate {rate:.4f}  {result.seconds:5.2f} s")
            rows.append({"trace": name, "share": share, "policy": policy, "hit_rate": round(rate, 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_traces(parser)
    parser.add_argument("--half", type=int, choices=(1, 2), help="replay only this half of each trace")
    options = parser.parse_args()
    rows = []
    for name, source, size in sources(options.traces):
        requests = list(read(source))
        middle = len(requests) // 2
        part = {None: requests, 1: requests[:middle], 2: requests[middle:]}[options.half]
        rows += run(name, part, size)
    print(json.dumps({"benchmark": "eviction", "half": options.half, "rows": rows}))


if __name__ == "__main__":
    main()
