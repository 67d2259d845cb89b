"""Token hit rates of plain LRU on two recorded traces, beside what an independent simulation of the same model found.

    python benchmarks/trace_lru.py [--traces DIR]

The traces are Mooncake's conversation trace (12,031 requests; github.com/kvcache-ai/Mooncake,
`conversation_trace.jsonl`) and 80 coding-agent sessions (5,421 requests; github.com/callanjfox/kv-cache-tester), both
in 512-token blocks. Requests are served one at a time in file order by the real PrefixCache
(`radixkv_traces.simulate.replay`); capacities are shares of a trace's unique blocks. A row passes within 0.002 of
what is expected: block-granular eviction does, evicting whole nodes falls short by up to 7 points. Without the full
traces the package's samples are replayed, which have nothing to compare with. Seconds are CPU time of the replay,
cache and JSON included once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay, unique_blocks

SHARES = (0.01, 0.025, 0.05, 0.10, 0.25, 0.50)
EXPECTED = {
    "mooncake_conversation_512.jsonl": (0.054, 0.101, 0.200, 0.284, 0.360, 0.370),
    "cc_agent_dev_512.jsonl": (0.222, 0.556, 0.855, 0.944, 0.965, 0.966),
}
SAMPLES = {"conversation": 512, "cc_agent": 64}
TOLERANCE = 0.002


def run(
    name: str, requests: list[TraceRequest], block_tokens: int, expected: tuple[float, ...]
) -> list[dict[str, Any]]:
    unique = unique_blocks(requests)
    print(f"{name}: {len(requests):,} requests, {unique:,} unique blocks of {block_tokens} tokens")
    rows = []
    for i, share in enumerate(SHARES):
        begin = time.process_time()
        result = replay(requests, max(1, int(unique * share)), "lru", block_tokens)
        spent = time.process_time() - begin
        rate = result.token_hit_rate
        row = {"trace": name, "share": share, "capacity": result.capacity_blocks, "hit_rate": round(rate, 4)}
        verdict = ""
        if expected:
            row["expected"] = expected[i]
            row["passed"] = abs(rate - expected[i]) <= TOLERANCE
            verdict = f"expected {expected[i]:.3f}: {'met' if row['passed'] else 'MISSED'}"
        print(
            f"  {share:>6.1%} {result.capacity_blocks:>8,} blocks  hit rate {rate:.4f} "
            f"{result.evicted_blocks:>11,} blocks evicted {spent:6.2f} s  {verdict}".rstrip()
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=beside, help="folder with the full traces")
    folder: Path = parser.parse_args().traces
    rows = []
    for name, expected in EXPECTED.items():
        if (folder / name).is_file():
            rows += run(name, list(read(folder / name)), 512, expected)
    if not rows:
        print(f"{folder} has neither {' nor '.join(EXPECTED)}: the shipped samples instead, nothing to compare with.")
        for name, block_tokens in SAMPLES.items():
            rows += run(name, list(read(sample(name))), block_tokens, ())
    print(json.dumps({"benchmark": "trace_lru", "tolerance": TOLERANCE, "rows": rows}))
    if not all(row.get("passed", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
