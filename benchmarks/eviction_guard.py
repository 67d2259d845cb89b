"""Compare predictive eviction with LRU on many short workloads, to find its worst cases.

    python benchmarks/eviction_guard.py [--traces DIR] [--set ALLOWANCE=0.05 ...] [--short]

Each case is one workload at one capacity, a share of its unique blocks. The groups are two recorded traces and their
halves, random slices of them, the package's samples with and without times, made-up workloads of up to 2,500 requests,
and made-up short traces of few agents. Without DIR the groups of full traces are left out; `--short` leaves them out
too. `--set` replaces constants of `radixkv.cache.predictive.lru_baseline`. A summary of each group shows the mean gain
in points of token hit rate, the worst case, and the number of cases below -0.1 points. In short traces one request may
be half a point, so the worst case is also shown without the largest loss of one request. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean

from radixkv.cache.predictive import lru_baseline
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.simulate import replay
from radixkv_traces.workload import Workload, prepare

SHARES = (0.01, 0.025, 0.05, 0.10, 0.25, 0.50)
FEW = (0.025, 0.10, 0.25)
TRACES = {"conversation": "mooncake_conversation_512.jsonl", "agents": "cc_agent_dev_512.jsonl"}
SAMPLES = {"conversation": 512, "cc_agent": 64, "recording": 16}
SLICES = 15  # of each trace
COUNT = 2500  # requests of a made-up workload

Case = tuple[str, str, Workload, tuple[float, ...]]  # group, name, workload, shares
Requests = list[TraceRequest]


def full_traces(folder: Path) -> Iterator[Case]:
    for name, file in TRACES.items():
        requests = list(read(folder / file))
        middle = len(requests) // 2
        yield "traces", name, prepare(requests, 512), SHARES
        yield "halves", f"{name}, first half", prepare(requests[:middle], 512), SHARES
        yield "halves", f"{name}, second half", prepare(requests[middle:], 512), SHARES
        draw = Random(name)
        for _ in range(SLICES):
            size = draw.choice((200, 300, 500, 1000, 2000))
            start = draw.randrange(len(requests) - size)
            yield "slices", f"{name}, {size} from {start}", prepare(requests[start : start + size], 512), FEW


def samples() -> Iterator[Case]:
    for name, size in SAMPLES.items():
        requests = list(read(sample(name)))
        yield "samples", name, prepare(requests, size), SHARES[1:]
        untimed = [replace(each, timestamp=0.0) for each in requests]
        yield "samples", f"{name}, no times", prepare(untimed, size), SHARES[1:]


def made_up() -> Iterator[Case]:
    for name, make in PATTERNS.items():
        yield "made up", name, prepare(make(Random(name)), 16), SHARES
    for kind in KINDS:
        made = list(islice(generate(KINDS[kind], COUNT, 7, rate=0.2), COUNT))
        yield "made up", kind, prepare(made, 64), SHARES
    chats, agents, rags = (list(generate(KINDS[kind], 90, 5, rate=0.2)) for kind in ("chat", "agent", "rag"))
    yield "made up", "chat and agent", prepare(mixed(chats, agents), 64), SHARES
    yield "made up", "rag and agent", prepare(mixed(rags, agents), 64), SHARES
    yield "made up", "chat, then agent", prepare(after(chats, agents), 64), SHARES


def short_agents() -> Iterator[Case]:
    for sessions in (4, 8, 16, 32):
        for rate in (0.02, 0.2):
            made = list(islice(generate(KINDS["agent"], sessions, sessions, rate=rate), 700))
            yield "short agents", f"{sessions} agents, {rate} a second", prepare(made, 64), SHARES


def mixed(one: Requests, other: Requests) -> Requests:
    renamed = [replace(each, blocks=array("q", (block + (1 << 40) for block in each.blocks))) for each in other]
    return sorted([*one, *renamed], key=lambda each: each.timestamp)


def after(one: Requests, other: Requests) -> Requests:
    last = max(each.timestamp for each in one)
    return [*one, *(replace(each, timestamp=each.timestamp + last) for each in mixed([], other))]


def chain(*blocks: int, at: float) -> TraceRequest:
    return TraceRequest(at * 1000, 16 * len(blocks), 20, array("q", blocks), stop="end_turn", block_tokens=16)


def scan(draw: Random) -> Requests:
    return [chain(*range(20 * i, 20 * i + 20), at=i) for i in range(COUNT)]


def loop(draw: Random) -> Requests:
    return [chain(*range(20 * (i % 100), 20 * (i % 100) + 20), at=i) for i in range(COUNT)]


def noisy_loop(draw: Random) -> Requests:
    numbers = [i % 100 if draw.random() < 0.7 else 100 + i for i in range(COUNT)]
    return [chain(*range(20 * n, 20 * n + 20), at=i) for i, n in enumerate(numbers)]


def zipf(draw: Random) -> Requests:
    weights = [1 / (rank + 1) for rank in range(1000)]
    return [chain(n * 10, *range(n * 10 + 1, n * 10 + 9), at=i)
            for i, n in enumerate(draw.choices(range(1000), weights, k=COUNT))]  # fmt: skip


def shifting_zipf(draw: Random) -> Requests:
    weights = [1 / (rank + 1) for rank in range(1000)]
    names = [name + i // 50 * 7 for i, name in enumerate(draw.choices(range(1000), weights, k=COUNT))]
    return [chain(*range(10 * n, 10 * n + 9), at=i) for i, n in enumerate(names)]


def random_walk(draw: Random) -> Requests:
    at, found = 0, []
    for i in range(COUNT):
        at += draw.randint(-3, 3)
        found.append(chain(*range(10 * (at % 500), 10 * (at % 500) + 10), at=i))
    return found


def stack_distance(draw: Random) -> Requests:
    """Return requests whose reuse distance is log-normal, which no trait explains."""
    stack: list[int] = []
    found = []
    for i in range(COUNT):
        depth = int(draw.lognormvariate(3.5, 1.5))
        name = stack.pop(-1 - depth) if depth < len(stack) and draw.random() < 0.7 else i
        stack.append(name)
        found.append(chain(*range(10 * name, 10 * name + 10), at=i))
    return found


def flipping(draw: Random) -> Requests:
    """Return phases of 250 requests: a loop of new sessions that return, then a scan that looks like it."""
    found, fresh = [], 1000
    for i in range(COUNT):
        name = i % 40 + 40 * (i // 500)
        if i // 250 % 2:
            fresh, name = fresh + 1, fresh
        found.append(chain(*range(20 * name, 20 * name + 20), at=i))
    return found


def retries(draw: Random) -> Requests:
    found: Requests = []
    for i in range(COUNT):
        name = draw.randrange(max(1, len(found))) if draw.random() < 0.1 else i
        found.append(chain(*range(15 * name, 15 * name + 15), at=i * 2.0))
        if draw.random() < 0.3:
            found.append(replace(found[-1], timestamp=i * 2000.0 + 500))
    return found[:COUNT]


def bursts(draw: Random) -> Requests:
    """Return sessions that grow in bursts of turns, then pause for long, and return with a chance of one half."""
    names, found = list(range(60)), []
    for i in range(COUNT):
        at = draw.randrange(60)
        if draw.random() < 0.02:
            names[at] = 1000 + i
        turns = 1 + i % 12
        found.append(chain(*range(100 * names[at], 100 * names[at] + 4 * turns), at=i * 1.5))
    return found


PATTERNS = {
    "scan": scan, "loop": loop, "noisy loop": noisy_loop, "Zipf": zipf, "shifting Zipf": shifting_zipf,
    "random walk": random_walk, "stack distance": stack_distance, "flipping": flipping, "retries": retries,
    "bursts": bursts,
}  # fmt: skip


def cases(traces: Path | None) -> Iterator[Case]:
    if traces is not None:
        yield from full_traces(traces)
    yield from samples()
    yield from made_up()
    yield from short_agents()


def compared(workload: Workload, capacity: int) -> dict[str, float]:
    """Return both hit rates, the gain in points, and the largest loss of one request in points."""
    lru, ours = (replay(workload, capacity, policy) for policy in ("lru", "predictive"))
    gains = [
        workload.hit_tokens(i, mine) - workload.hit_tokens(i, other)
        for i, (mine, other) in enumerate(zip(ours.hits, lru.hits, strict=True))
    ]
    gain, largest = (100 * tokens / max(1, lru.input_tokens) for tokens in (sum(gains), min(0, *gains)))
    rates = {"lru": round(lru.token_hit_rate, 5), "predictive": round(ours.token_hit_rate, 5)}
    return {**rates, "gain": round(gain, 3), "largest": round(largest, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with the full traces")
    parser.add_argument("--short", action="store_true", help="leave out the full traces")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=X", help="a constant of the guard")
    options = parser.parse_args()
    for each in options.set:
        name, _, value = each.partition("=")
        assert hasattr(lru_baseline, name), f"there is no constant {name}"
        setattr(lru_baseline, name, float(value))
    rows = []
    for group, name, workload, shares in cases(None if options.short else options.traces):
        for share in shares:
            row = compared(workload, max(1, int(workload.unique_blocks * share)))
            rows.append({"group": group, "name": name, "share": share, **row})
            rates = f"{row['lru']:.4f} -> {row['predictive']:.4f}"
            print(
                f"{group:>12} {name:<28} {share:>6.1%}  {rates}  {row['gain']:+6.2f} {row['largest']:+6.2f}", flush=True
            )
    for group in [*dict.fromkeys(row["group"] for row in rows), None]:
        chosen = [row for row in rows if group in (None, row["group"])]
        gains, others = [row["gain"] for row in chosen], [row["gain"] - row["largest"] for row in chosen]
        below, above = sum(gain < -0.1 for gain in gains), sum(gain > 1 for gain in gains)
        print(f"{group or 'all':>12} {len(gains)} cases: mean {mean(gains):+.2f} points, worst {min(gains):+.2f} "
              f"({min(others):+.2f} without its largest loss of one request), "
              f"{below} below -0.1, {above} above +1")  # fmt: skip
    print(json.dumps({"benchmark": "eviction_guard", "set": options.set, "rows": rows}))


if __name__ == "__main__":
    main()
