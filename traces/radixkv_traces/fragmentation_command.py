"""`radixkv-replay fragmentation`: how much of a memory holds tokens, for each way to reserve it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.cli import add_trace, kv_bytes_per_token, load, name_of, parse_capacity, positive, table
from radixkv_traces.fragmentation import Fragmentation, fragmentation

_SLABS = 32  # slabs in the default memory


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    about = "simulate the memory wasted by slabs, buddy blocks and pages on a trace; loads no model"
    parser = commands.add_parser(
        "fragmentation", help=about, description=about.capitalize() + ".", parents=[common],
        epilog="Requests run in the order of their times while they fit in the memory; prefixes are not shared.",
    )  # fmt: skip
    parser.set_defaults(module="radixkv_traces.fragmentation_command")
    add_trace(parser)
    pool = parser.add_argument_group("memory")
    pool.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens of a slab; default: the longest request with its answer",
    )
    pool.add_argument(
        "--memory", metavar="SIZE", help=f"size: tokens (500ktok), or bytes (16GB) with --model; default {_SLABS} slabs"
    )
    pool.add_argument(
        "--block-sizes",
        type=_sizes,
        default=[8, 16, 32, 64, 128],
        metavar="LIST",
        help="page sizes; default 8,16,32,64,128",
    )
    pool.add_argument(
        "--model", metavar="NAME", help="model that defines the bytes of a token: a folder, a config.json, or a name"
    )
    pool.add_argument("--kv-bytes", type=positive, metavar="N", help="bytes of KV for each token, instead of --model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Replay the lengths under each scheme, and print the result."""
    workload = load(arguments)
    lengths = [(request.input_length, request.output_length) for request in workload.requests]
    slab = arguments.max_length or max(prompt + max(1, output) for prompt, output in lengths)
    rows = fragmentation(lengths, _memory(arguments, slab), slab, arguments.block_sizes)
    summary = {
        "trace": name_of(arguments.trace),
        "requests": len(lengths),
        "left_out": rows[0].left_out,
        "max_length": slab,
        "longest": max(prompt + max(1, output) for prompt, output in lengths),
    }
    if arguments.json:
        each = [{**asdict(row), "used_of_reserved": row.used_of_reserved} for row in rows]
        print(json.dumps({**summary, "memory_tokens": rows[0].memory_tokens, "rows": each}))
    else:
        print(_text(summary, rows))
    return 0


def _memory(arguments: argparse.Namespace, slab: int) -> int:
    if arguments.memory is None:
        return _SLABS * slab
    if arguments.memory.strip().endswith("%"):
        raise InvalidInput(f"memory {arguments.memory!r}: allowed are tokens (500ktok), or bytes (16GB) with --model")
    kv_bytes = arguments.kv_bytes or (kv_bytes_per_token(arguments.model) if arguments.model else None)
    return parse_capacity(arguments.memory, 0, 1, kv_bytes).blocks


def _text(summary: dict[str, Any], rows: list[Fragmentation]) -> str:
    head = (
        f"{summary['trace']}: {summary['requests']:,} requests of at most {summary['longest']:,} tokens, "
        f"in a memory of {rows[0].memory_tokens:,} tokens, with slabs of {summary['max_length']:,}"
    )
    columns = ("reserved as", "used", "reserved, empty", "unreserved", "sequences", "most", "preemptions", "refused")
    lines = [_cells(row) for row in rows]
    parts = [head, table(columns, lines)]
    left_out, served = summary["left_out"], summary["requests"] - summary["left_out"]
    if left_out:
        parts.append(
            f"{left_out:,} of {summary['requests']:,} requests are in no row: "
            "under at least one scheme each would not fit even alone."
        )
    if not served:
        parts.append("No request is left: give a larger --max-length or --memory.")
    elif not all(row.steps for row in rows):
        parts.append("Rows without figures had room for all remaining requests at once: give a smaller --memory.")
    return "\n\n".join(parts)


def _cells(row: Fragmentation) -> list[str]:
    name = row.scheme if row.block_size is None else f"{row.scheme}, {row.block_size}"
    if not row.steps:
        return [name, "", "", "", "", f"{row.most_sequences:,}", "", f"{row.refused:,}"]
    return [
        name,
        f"{row.used:.1%}",
        f"{row.reserved_unused:.1%}",
        f"{row.unreserved:.1%}",
        f"{row.sequences:,.1f}",
        f"{row.most_sequences:,}",
        f"{row.preemptions:,}",
        f"{row.refused:,}",
    ]


def _sizes(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]
