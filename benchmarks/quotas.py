"""Show that shares keep the hit rate of one namespace while another one floods the pool.

    python benchmarks/quotas.py [--blocks 400] [--flood 1,4,16]

Both namespaces send made-up chats (`radixkv-replay generate chat`). In the flood they begin 1, 4 and 16 times as often.
The real cache serves the requests in the order of their times. The table has the hit rates of the quiet namespace alone
in a pool of the size of its share, and of both in the whole pool, without shares and with one half for each. Everything
is seeded, so the numbers repeat on every machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter
from collections.abc import Hashable, Iterable

from radixkv.cache import POLICIES, Hint, PrefixCache
from radixkv_traces.formats import TraceRequest
from radixkv_traces.generate import chat, generate

SESSIONS = 60  # of the quiet namespace
RATE = 0.05  # of its sessions, a second
BLOCK = 64  # tokens
SHARE = 0.5


def workload(flood: int) -> list[tuple[str, TraceRequest]]:
    """The requests of both namespaces by time; those of the flood as long as the quiet ones last."""
    quiet = [("quiet", each) for each in generate(chat, SESSIONS, 1, rate=RATE, block_tokens=BLOCK)]
    end = quiet[-1][1].timestamp
    loud = generate(chat, SESSIONS * flood, 2, rate=RATE * flood, block_tokens=BLOCK)
    others = [("loud", each) for each in loud if each.timestamp <= end]
    return list(heapq.merge(quiet, others, key=lambda pair: pair[1].timestamp))


def hit_rates(
    requests: Iterable[tuple[str, TraceRequest]], blocks: int, policy: str, limits: dict[Hashable, float] | None = None
) -> dict[str, float]:
    """Serve all requests from one cache; return the share of blocks that were hits, by namespace."""
    now = [0.0]
    cache = PrefixCache(blocks, 1, policy, clock=lambda: now[0], namespace_limits=limits)
    asked, hits = Counter[str](), Counter[str]()
    for namespace, request in requests:
        now[0] = request.timestamp / 1000
        chain = request.blocks
        with cache.open(chain, namespace) as sequence:
            room = cache.free_blocks + cache.evictable_for(namespace)
            sequence.extend(chain[sequence.length : sequence.length + room])
            sequence.commit()
            asked[namespace] += len(chain)
            hits[namespace] += sequence.cached_length
            sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
    cache.check()
    return {namespace: hits[namespace] / asked[namespace] for namespace in asked}


def rows(blocks: int, floods: Iterable[int]) -> list[dict[str, object]]:
    """Return one row for each policy and flood."""
    found: list[dict[str, object]] = []
    limits: dict[Hashable, float] = {"quiet": SHARE, "loud": SHARE}
    for flood in floods:
        requests = workload(flood)
        quiet = [pair for pair in requests if pair[0] == "quiet"]
        for policy in POLICIES:
            alone = hit_rates(quiet, int(blocks * SHARE), policy)
            without, shared = (hit_rates(requests, blocks, policy, each) for each in (None, limits))
            found.append(
                {
                    "flood": flood,
                    "policy": policy,
                    "quiet, alone in its share": round(alone["quiet"], 4),
                    "quiet, no shares": round(without["quiet"], 4),
                    "quiet, shares": round(shared["quiet"], 4),
                    "loud, no shares": round(without["loud"], 4),
                    "loud, shares": round(shared["loud"], 4),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=400, help="blocks of the pool (default 400)")
    parser.add_argument("--flood", default="1,4,16", help="sessions of the flood, in units of the quiet ones")
    options = parser.parse_args()
    found = rows(options.blocks, map(int, options.flood.split(",")))
    print("| " + " | ".join(found[0]) + " |")
    for row in found:
        print(
            "| " + " | ".join(f"{each:.3f}" if isinstance(each, float) else str(each) for each in row.values()) + " |"
        )
    print(json.dumps({"benchmark": "quotas", "blocks": options.blocks, "rows": found}))


if __name__ == "__main__":
    main()
