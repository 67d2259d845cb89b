"""Compare the token hit rates of predictive eviction and LRU on two recorded traces.

    python benchmarks/eviction.py [--traces DIR] [--half 1|2]

The traces and the model of serving are those of `trace_lru.py`. The clock shows the trace's times, and each close
carries the reason of the turn's end and the number of generated tokens. Without the full traces the package's samples
are replayed. Seconds are CPU time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from pathlib import Path
from typing import Any

from radixkv.cache import Hint, PrefixCache
from radixkv_traces.formats import TraceRequest, read, sample

SHARES = (0.01, 0.025, 0.05, 0.10, 0.25, 0.50)
TRACES = {"mooncake_conversation_512.jsonl": 512, "cc_agent_dev_512.jsonl": 512}
SAMPLES = {"conversation": 512, "cc_agent": 64}


def hit_rate(requests: list[TraceRequest], capacity: int, policy: str, block_tokens: int) -> float:
    now = 0.0
    cache = PrefixCache(capacity, 1, policy, clock=lambda: now)
    numbers: dict[int, int] = {}
    hit = asked = 0
    for request in requests:
        now = request.timestamp / 1000
        chain = array("i", [numbers.setdefault(block, len(numbers)) for block in request.blocks])
        sequence = cache.open(chain)
        sequence.extend(chain[sequence.length : capacity])
        sequence.commit()
        hit += min(sequence.cached_length * block_tokens, request.input_length)
        asked += request.input_length
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
    return hit / asked


def run(name: str, requests: list[TraceRequest], block_tokens: int) -> list[dict[str, Any]]:
    unique = len({block for request in requests for block in request.blocks})
    print(f"{name}: {len(requests):,} requests, {unique:,} unique blocks of {block_tokens} tokens")
    rows = []
    for share in SHARES:
        for policy in ("lru", "predictive"):
            capacity = max(1, int(unique * share))
            begin = time.process_time()
            rate = hit_rate(requests, capacity, policy, block_tokens)
            spent = time.process_time() - begin
            print(f"  {share:>6.1%} {capacity:>8,} blocks {policy:>10}  hit rate {rate:.4f}  {spent:5.2f} s")
            rows.append({"trace": name, "share": share, "policy": policy, "hit_rate": round(rate, 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).resolve().parents[2] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=folder, help="folder with the full traces")
    parser.add_argument("--half", type=int, choices=(1, 2), help="replay only this half of each trace")
    options = parser.parse_args()
    sources = [(name, options.traces / name, size) for name, size in TRACES.items()]
    if not all(path.is_file() for _, path, _ in sources):
        sources = [(name, sample(name), size) for name, size in SAMPLES.items()]
    rows = []
    for name, source, size in sources:
        requests = list(read(source))
        middle = len(requests) // 2
        part = {None: requests, 1: requests[:middle], 2: requests[middle:]}[options.half]
        rows += run(name, part, size)
    print(json.dumps({"benchmark": "eviction", "half": options.half, "rows": rows}))


if __name__ == "__main__":
    main()
