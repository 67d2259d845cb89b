"""`radixkv-replay simulate`: policies side by side on one trace, with or without lower tiers, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

from radixkv.cache import POLICIES
from radixkv.cli.entry_point import AddCommand, table
from radixkv.errors import InvalidInput
from radixkv_traces.cli import (
    MAX_BLOCKS,
    Capacity,
    Progress,
    add_kv_bytes,
    add_trace,
    interrupted_by_signals,
    kv_bytes_of,
    load,
    name_of,
    parse_capacity,
)
from radixkv_traces.saved_results import row_name
from radixkv_traces.simulate import BOUNDS, ReplayResult, check_policy, replay
from radixkv_traces.simulate_detail import GROUPINGS, by_group, curve, over_time
from radixkv_traces.simulate_queue import Service, add_queue, queue_rows, queue_text, service_of
from radixkv_traces.workload import Workload

_POLICIES = "lru,clairvoyant"  # the default
_INTERRUPTED = "Interrupted: these are the results so far."
_GAP = 0.001  # of hit rate between LRU and the optimum; below it, the closed share of the gap is noise
_COSTS = ("evicted blocks", "regret tokens", "seconds")  # the last columns
_GROUPS_SHOWN = 20  # rows of a table; JSON has all


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    about = "simulate hit rates of cache sizes and eviction policies on a trace; loads no model"
    parser = add_command(
        "simulate", about, __name__,
        epilog="Requests run one at a time, in the order of their times, through the real prefix cache; only prompts "
        "enter. Ctrl-C prints the results so far.",
    )  # fmt: skip
    add_trace(parser)
    pools = parser.add_argument_group("pools")
    pools.add_argument(
        "--capacity", default="2.5%,10%,50%", metavar="LIST",
        help="sizes: shares of the trace's unique blocks (2.5%%), blocks (4096), tokens (500ktok) or, with a model, "
        "bytes (16GB); default 2.5%%,10%%,50%%",
    )  # fmt: skip
    pools.add_argument(
        "--policy", default=_POLICIES, metavar="LIST",
        help=f"policies: {', '.join([*sorted(POLICIES), *BOUNDS])}; default lru,clairvoyant",
    )  # fmt: skip
    pools.add_argument(
        "--hints", metavar="LIST",
        help="add rows of each policy with hints: returns (of tool calls), end (of sessions, an oracle), returns+end",
    )  # fmt: skip
    add_kv_bytes(pools)
    add_tiers(pools)
    add_queue(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument(
        "--curve",
        action="store_true",
        default=None,
        help="add LRU rates at 1/4 to 8 times each capacity, and without limit",
    )
    shown.add_argument("--by", choices=GROUPINGS, help="add a row for each session, tenant or stop reason")
    shown.add_argument(
        "--json", action="store_true", help="print one JSON object: rows, occupancy and hit rate over time"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate each policy at each capacity, and print the results."""
    hints = [] if arguments.hints is None else [f"+{each.strip()}" for each in arguments.hints.split(",")]
    names = [each.strip() for each in arguments.policy.split(",")]
    policies = [name + each for name in names for each in ("", *([] if name in BOUNDS else hints))]
    for policy in policies:
        check_policy(policy)
    service = service_of(arguments)
    kv_bytes = kv_bytes_of(arguments)
    workload = load(arguments)
    if workload.lengths_only:
        raise InvalidInput(
            f"{arguments.trace}: this trace has lengths only, so nothing is known about shared prefixes: use it with "
            "fragmentation or run"
        )
    capacities = [
        parse_capacity(each, workload.unique_blocks, workload.block_tokens, kv_bytes)
        for each in arguments.capacity.split(",")
    ]
    if arguments.order is not None:
        return _run_with_queue(arguments, workload, capacities, policies, service)
    pools = _pools(arguments, workload, capacities, kv_bytes)
    tiers = [tier for tier in TIERS if getattr(arguments, tier) is not None]
    with interrupted_by_signals() as stop:
        found = list(_replays(workload, pools, policies))
        doubled = {} if tiers else _doubled(workload, found)
    rows = [_row(workload, each, result, arguments.by) for each, result in found]
    for row, (each, result) in zip(rows, found, strict=True):
        row["token_hit_rate_twice"] = doubled.get((row["policy"], row["capacity_blocks"]))
        for tier in tiers:
            row |= tier_fields(tier, each, result)
    _compare(rows)
    finished = len(found) == len(pools) * len(policies) and (
        bool(tiers) or all(row["token_hit_rate_twice"] is not None for row in rows)
    )
    summary = _summary(arguments.trace, workload, finished=finished)
    summary |= {"curve": {each.text: curve(workload, each.blocks) for each in capacities}} if arguments.curve else {}
    print(json.dumps({**summary, "rows": rows}) if arguments.json else _text(summary, rows, arguments.by))
    return 0 if summary["finished"] and all(row["finished"] for row in rows) else stop.status


def _pools(
    arguments: argparse.Namespace, workload: Workload, capacities: Sequence[Capacity], kv_bytes: int | None
) -> list[Pools]:
    """Return all sizes to simulate: of each capacity without lower tiers first. Raises InvalidInput."""
    if arguments.disk is not None and arguments.host is None:
        raise InvalidInput("--disk needs a tier in host memory: --host")
    units = workload.unique_blocks, workload.block_tokens, kv_bytes

    def with_tier(tier: str, above: Pools) -> list[Pools]:
        texts = [] if getattr(arguments, tier) is None else getattr(arguments, tier).split(",")
        sizes = [_size(each, tier, above.device, *units) for each in texts]
        return [above, *(Pools(above.device, above.lower | {tier: size}) for size in sizes)]

    with_host = [each for device in capacities for each in with_tier("host", Pools(device, {}))]
    return [pools for each in with_host for pools in (with_tier("disk", each) if each.lower else [each])]


def _run_with_queue(
    arguments: argparse.Namespace,
    workload: Workload,
    capacities: Sequence[Capacity],
    policies: Sequence[str],
    service: Service,
) -> int:
    """Simulate each policy with each order of waiting requests, and print hit rates and waits."""
    for option in ("by", "curve", "hints", *TIERS):
        if getattr(arguments, option) is not None:
            raise InvalidInput(f"--{option} needs a replay without a queue: leave out --order")
    if arguments.policy == _POLICIES:
        policies = [policy for policy in policies if policy not in BOUNDS]
    orders = [each.strip() for each in arguments.order.split(",")]
    with interrupted_by_signals() as stop:
        rows = list(queue_rows(workload, capacities, policies, orders, service))
    finished = len(rows) == len(capacities) * len(policies) * len(orders) and all(row["finished"] for row in rows)
    summary = _summary(arguments.trace, workload, finished=finished)
    parts = [_head(summary), queue_text(service, rows), *([] if finished else [_INTERRUPTED])]
    said = {**summary, "service": asdict(service), "rows": rows}
    print(json.dumps(said) if arguments.json else "\n\n".join(parts))
    return 0 if finished else stop.status


@dataclass(frozen=True, slots=True)
class Pools:
    """The sizes of one simulation: the device's, and those of the lower tiers that it has."""

    device: Capacity
    lower: dict[str, Capacity]

    def __str__(self) -> str:
        return ", ".join([self.device.text, *(f"{tier} {size.text}" for tier, size in self.lower.items())])


def _replays(
    workload: Workload, pools: Sequence[Pools], policies: Sequence[str]
) -> Iterator[tuple[Pools, ReplayResult]]:
    """Replay every policy at all sizes, until Ctrl-C or SIGTERM."""
    for sizes in pools:
        blocks = {f"{tier}_blocks": size.blocks for tier, size in sizes.lower.items()}
        for policy in policies:
            try:
                with Progress(f"{policy} at {sizes}") as progress:
                    result = replay(workload, sizes.device.blocks, policy, progress=progress, **blocks)
            except KeyboardInterrupt:  # before its first request
                return
            yield sizes, result
            if not result.finished:
                return


def _doubled(workload: Workload, found: Sequence[tuple[Pools, ReplayResult]]) -> dict[tuple[str, int], float]:
    """Return the token hit rate of each policy at twice each capacity, until Ctrl-C or SIGTERM.

    A capacity that was replayed already is not replayed again.
    """
    rates = {(each.policy, each.capacity_blocks): each.token_hit_rate for _, each in found if each.finished}
    doubled = {}
    for policy, blocks in list(rates):
        twice = policy, min(2 * blocks, max(blocks, workload.unique_blocks))
        if twice not in rates:
            try:
                with Progress(f"{policy} at twice {blocks:,} blocks") as progress:
                    result = replay(workload, twice[1], policy, progress=progress)
            except KeyboardInterrupt:  # before its first request
                break
            if not result.finished:
                break
            rates[twice] = result.token_hit_rate
        doubled[policy, blocks] = rates[twice]
    return doubled


def _row(workload: Workload, sizes: Pools, result: ReplayResult, grouping: str | None) -> dict[str, Any]:
    moments = over_time(workload, result)
    row: dict[str, Any] = {
        "policy": result.policy,
        "capacity": sizes.device.text,
        "capacity_blocks": result.capacity_blocks,
        "token_hit_rate": result.token_hit_rate,
        "gap_closed": None,
        "requests": result.requests,
        "input_tokens": result.input_tokens,
        "hit_tokens": result.hit_tokens,
        "evicted_blocks": result.evicted_blocks,
        "regret_tokens": result.regret_tokens,
        "seconds": round(result.seconds, 4),
        "finished": result.finished,
        "occupancy": [[moment.seconds, moment.cached_blocks] for moment in moments],
        "hit_rates": [[moment.seconds, round(moment.token_hit_rate, 6)] for moment in moments],
    }
    if grouping is not None:
        names = ("requests", "input_tokens", "hit_tokens", "token_hit_rate")
        groups = by_group(workload, result, grouping)
        row["by"] = [{grouping: each.name, **{name: getattr(each, name) for name in names}} for each in groups]
    return row


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add the share of the gap between LRU and the clairvoyant optimum that each policy closes, where both were run."""
    rates = {(*map(row.get, SIZES), row["policy"]): row["token_hit_rate"] for row in rows if row["finished"]}
    for row in rows:
        lru, best = (rates.get((*map(row.get, SIZES), policy), nan) for policy in ("lru", "clairvoyant"))
        if best - lru > _GAP and row["finished"] and row["policy"] != "infinite":
            row["gap_closed"] = (row["token_hit_rate"] - lru) / (best - lru)


def _summary(trace: str, workload: Workload, *, finished: bool) -> dict[str, Any]:
    tokens = workload.input_tokens
    hits = sum(workload.hit_tokens(index, known) for index, known in enumerate(workload.known))
    return {
        "trace": name_of(trace),
        "requests": len(workload.requests),
        "input_tokens": tokens,
        "block_tokens": workload.block_tokens,
        "unique_blocks": workload.unique_blocks,
        "infinite_token_hit_rate": hits / tokens if tokens else 0.0,
        "finished": finished,
    }


def _head(summary: dict[str, Any]) -> str:
    return (
        f"{summary['trace']}: {summary['requests']:,} requests, {summary['input_tokens']:,} prompt tokens, "
        f"{summary['unique_blocks']:,} unique blocks of {summary['block_tokens']:,} tokens; "
        f"an infinite cache would hit {summary['infinite_token_hit_rate']:.1%}"
    )


def _text(summary: dict[str, Any], rows: list[dict[str, Any]], grouping: str | None) -> str:
    tiers = [tier for tier in TIERS if any(tier in row for row in rows)]
    found = [column for tier in tiers for column in TIERS[tier]] or ["2x memory"]
    sizes = [f"{tier} blocks" for tier in tiers]
    columns = ("capacity", "blocks", *sizes, "policy", "hit rate", *found, "gap closed", *_COSTS)
    lines = [_cells(row) for row in rows]
    parts = [_head(summary), table(columns, lines, left=(0, columns.index("policy")))]
    if grouping is not None and rows:
        parts += _groups(rows, grouping)
    if "curve" in summary:
        curves = [[name, *(f"{rate:.4f}" for rate in each.values())] for name, each in summary["curve"].items()]
        sizes = [f"x {size}" for size in next(iter(summary["curve"].values()))]
        parts.append(table(["lru curve", *sizes], curves, left=(0,)))
    if not summary["finished"] or not all(row["finished"] for row in rows):
        parts.append(_INTERRUPTED)
    return "\n\n".join(parts)


def _cells(row: dict[str, Any]) -> list[str]:
    rate, twice = f"{row['token_hit_rate']:.4f}", row["token_hit_rate_twice"]
    tiers = [tier for tier in TIERS if tier in row]
    return [
        row["capacity"],
        f"{row['capacity_blocks']:,}",
        *(f"{row[f'{tier}_blocks']:,}" for tier in tiers),
        row["policy"],
        rate if row["finished"] else f"{rate} of {row['requests']:,} requests",
        *([cell for tier in tiers for cell in tier_cells(tier, row)] or ["" if twice is None else f"{twice:.4f}"]),
        "" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}",
        f"{row['evicted_blocks']:,}",
        f"{row['regret_tokens']:,}",
        f"{row['seconds']:.2f}",
    ]


def _groups(rows: list[dict[str, Any]], grouping: str) -> Iterator[str]:
    """Return a table for each capacity: a row for each session (or tenant, ...), a column for each policy and tier."""
    for capacity in dict.fromkeys(row["capacity"] for row in rows):
        chosen = [row for row in rows if row["capacity"] == capacity]
        groups = chosen[0]["by"]
        rates = [{group[grouping]: group["token_hit_rate"] for group in row["by"]} for row in chosen]
        lines = [
            [group[grouping] or "(none)", f"{group['requests']:,}", f"{group['input_tokens']:,}"]
            + [f"{each[group[grouping]]:.4f}" if group[grouping] in each else "" for each in rates]
            for group in groups[:_GROUPS_SHOWN]
        ]
        columns = (f"{grouping} at {capacity}", "requests", "prompt tokens", *map(row_name, chosen))
        more = len(groups) - _GROUPS_SHOWN
        yield table(columns, lines, left=(0,)) + (f"\nand {more:,} more: --json has them" if more > 0 else "")


# ---- the lower tiers

TIERS = {"host": ("from host", "written", "read"), "disk": ("from disk", "disk written", "disk read", "w/hit")}
"""The columns of a table for each tier: a hit rate, blocks, and tokens written for each token that hits in any tier."""

SIZES = ("capacity", *TIERS)


def add_tiers(pools: Any) -> None:
    """Add the options to the group of options of the pools."""
    pools.add_argument(
        "--host", metavar="LIST",
        help="sizes of a tier in host memory, in addition to rows without it: multiples of the capacity (2x), or as "
        "for --capacity. clairvoyant is then one pool of all sizes",
    )  # fmt: skip
    pools.add_argument("--disk", metavar="LIST", help="sizes of a disk below the host, in the same forms")


def _size(
    text: str, tier: str, capacity: Capacity, unique_blocks: int, block_tokens: int, kv_bytes: int | None
) -> Capacity:
    """Parse a size of a lower tier. Raises InvalidInput.

    >>> _size("2.5x", "host", Capacity("10%", 100), 1000, 512, None)
    Capacity(text='2.5x', blocks=250)
    """
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX]\s*", text)) is None:
        try:
            return parse_capacity(text, unique_blocks, block_tokens, kv_bytes)
        except InvalidInput as error:
            raise InvalidInput(f"--{tier}: {error}; or a multiple of the capacity (2x)") from error
    blocks = int(capacity.blocks * float(match[1]))
    if not 1 <= blocks <= MAX_BLOCKS:
        raise InvalidInput(
            f"--{tier} {text.strip()!r}: {blocks:,} blocks for a capacity of {capacity.blocks:,}; allowed are 1 to "
            f"{MAX_BLOCKS:,}"
        )
    return Capacity(text.strip(), blocks)


def tier_fields(tier: str, sizes: Pools, result: ReplayResult) -> dict[str, Any]:
    """Return the fields that the option of a tier adds to a row of JSON; None where a policy has no tiers."""
    size, traffic = sizes.lower.get(tier), getattr(result, tier)
    fields: dict[str, Any] = dict.fromkeys(_names(tier), None if size else 0)
    if traffic is not None:
        per_hit = traffic.written_blocks * result.block_tokens / max(result.hit_tokens, 1)
        found = getattr(result, f"{tier}_hit_tokens"), traffic.written_blocks, traffic.read_blocks, round(per_hit, 4)
        fields = dict(zip(_names(tier), found, strict=True))
    return {tier: size and size.text, f"{tier}_blocks": getattr(result, f"{tier}_blocks"), **fields}


def tier_cells(tier: str, row: Mapping[str, Any]) -> list[str]:
    """Format the cells of the columns of a tier."""
    hit, written, read, per_hit = (row[name] for name in _names(tier))
    if hit is None:
        return [""] * len(TIERS[tier])
    cells = [f"{hit / max(row['input_tokens'], 1):.4f}", f"{written:,}", f"{read:,}", f"{per_hit:.3f}"]
    return cells[: len(TIERS[tier])]


def _names(tier: str) -> list[str]:
    """Return the names of the figures of a tier in a row of JSON; the host's were the first ones."""
    prefix = "" if tier == "host" else f"{tier}_"
    return [f"{tier}_hit_tokens", *(f"{prefix}{each}" for each in ("written_blocks", "read_blocks", "written_per_hit"))]
