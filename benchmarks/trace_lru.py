"""Compare the token hit rates of LRU, and of the optimum of any policy, with an independent simulation of two traces.

    python benchmarks/trace_lru.py [--traces DIR]

The traces are Mooncake's conversation trace (12,031 requests; github.com/kvcache-ai/Mooncake,
`conversation_trace.jsonl`) and 80 coding-agent sessions (5,421 requests; github.com/callanjfox/kv-cache-tester), both
in 512-token blocks. Requests are served one at a time in file order (`radixkv_traces.simulate.replay`): by the real
PrefixCache, and for the optimum by an exact model of its rules with all later requests as input. Capacities are shares
of a trace's unique blocks. A row passes within 0.002 of the expected rate: block-granular eviction does, evicting whole
nodes falls short by up to 7 points. Without DIR the package's samples are replayed, for which no expected rates exist.
Seconds are CPU time of one replay. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from radixkv_traces.formats import Source, TraceRequest, read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.workload import Workload, prepare

POLICIES = ("lru", "clairvoyant")
SHARES = (0.01, 0.025, 0.05, 0.10, 0.25, 0.50)
EXPECTED = {
    "mooncake_conversation_512.jsonl": {
        "lru": (0.054, 0.101, 0.200, 0.284, 0.360, 0.370),
        "clairvoyant": (0.245, 0.339, 0.374, 0.374, 0.374, 0.374),
    },
    "cc_agent_dev_512.jsonl": {
        "lru": (0.222, 0.556, 0.855, 0.944, 0.965, 0.966),
        "clairvoyant": (0.271, 0.711, 0.908, 0.960, 0.967, 0.967),
    },
}
SAMPLES = {"conversation": 512, "cc_agent": 64}
TOLERANCE = 0.002


def add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help=f"folder with the full traces: {', '.join(EXPECTED)} (default: replay the package's samples)",
    )  # fmt: skip


def sources(folder: Path | None) -> list[tuple[str, Source, int]]:
    """Return each trace's name, source and tokens per block; exit with a message if `folder` lacks one."""
    if folder is None:
        return [(name, sample(name), block_tokens) for name, block_tokens in SAMPLES.items()]
    if missing := [name for name in EXPECTED if not (folder / name).is_file()]:
        raise SystemExit(f"{folder}: no file {' and no file '.join(missing)}; leave --traces out for the samples")
    return [(name, folder / name, 512) for name in EXPECTED]


def run(
    name: str, requests: list[TraceRequest], block_tokens: int, expected: dict[str, tuple[float, ...]]
) -> list[dict[str, Any]]:
    workload = prepare(requests, block_tokens)
    print(f"{name}: {len(requests):,} requests, {workload.unique_blocks:,} unique blocks of {block_tokens} tokens")
    return [row(name, workload, policy, i, expected.get(policy)) for policy in POLICIES for i in range(len(SHARES))]


def row(name: str, workload: Workload, policy: str, index: int, expected: tuple[float, ...] | None) -> dict[str, Any]:
    share = SHARES[index]
    result = replay(workload, max(1, int(workload.unique_blocks * share)), policy)
    rate = result.token_hit_rate
    found = {"trace": name, "policy": policy, "share": share, "capacity": result.capacity_blocks}
    found |= {"hit_rate": round(rate, 4), "seconds": round(result.seconds, 3)}
    verdict = ""
    if expected is not None:
        found["expected"] = expected[index]
        found["passed"] = abs(rate - expected[index]) <= TOLERANCE
        verdict = f"expected {expected[index]:.3f}: {'met' if found['passed'] else 'MISSED'}"
    print(
        f"  {policy:<11} {share:>6.1%} {result.capacity_blocks:>8,} blocks  hit rate {rate:.4f} "
        f"{result.evicted_blocks:>11,} blocks evicted {result.seconds:6.2f} s  {verdict}".rstrip()
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_traces(parser)
    rows = []
    for name, source, block_tokens in sources(parser.parse_args().traces):
        rows += run(name, list(read(source)), block_tokens, EXPECTED.get(name, {}))
    print(json.dumps({"benchmark": "trace_lru", "tolerance": TOLERANCE, "rows": rows}))
    if not all(row.get("passed", True) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
