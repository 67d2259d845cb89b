"""`radixkv-replay simulate --host`: sizes of the host tier, and their part of each row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.cli import MAX_BLOCKS, Capacity, parse_capacity
from radixkv_traces.simulate import ReplayResult

HOST_COLUMNS = ("from host", "written", "read")
"""The columns of a table with host tiers: a hit rate, and blocks."""


def add_host(pools: Any) -> None:
    """Add the option to the group of options of the pools."""
    pools.add_argument(
        "--host", metavar="LIST",
        help="sizes of a tier in host memory, in addition to rows without it: multiples of the capacity (2x), or as "
        "for --capacity. clairvoyant is then one pool of both sizes",
    )  # fmt: skip


def host_sizes(
    host: str | None, capacity: Capacity, unique_blocks: int, block_tokens: int, kv_bytes: int | None
) -> list[Capacity | None]:
    """Return the sizes of the host tier for one capacity, first None for a device alone. Raises InvalidInput."""
    texts = [] if host is None else host.split(",")
    return [None, *(_size(each, capacity, unique_blocks, block_tokens, kv_bytes) for each in texts)]


def _size(text: str, capacity: Capacity, unique_blocks: int, block_tokens: int, kv_bytes: int | None) -> Capacity:
    """Parse a size of the host tier.

    >>> _size("2.5x", Capacity("10%", 100), 1000, 512, None)
    Capacity(text='2.5x', blocks=250)
    """
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX]\s*", text)) is None:
        try:
            return parse_capacity(text, unique_blocks, block_tokens, kv_bytes)
        except InvalidInput as error:
            raise InvalidInput(f"--host: {error}; or a multiple of the capacity (2x)") from error
    blocks = int(capacity.blocks * float(match[1]))
    if not 1 <= blocks <= MAX_BLOCKS:
        raise InvalidInput(
            f"--host {text.strip()!r}: {blocks:,} blocks for a capacity of {capacity.blocks:,}; allowed are 1 to "
            f"{MAX_BLOCKS:,}"
        )
    return Capacity(text.strip(), blocks)


def host_fields(host: Capacity | None, result: ReplayResult) -> dict[str, Any]:
    """Return the fields that `--host` adds to a row of JSON; None where a policy has no tiers."""
    traffic, bound = result.host, host is not None and result.host is None
    nothing = None if bound else 0
    return {
        "host": None if host is None else host.text,
        "host_blocks": result.host_blocks,
        "host_hit_tokens": None if bound else result.host_hit_tokens,
        "written_blocks": nothing if traffic is None else traffic.written_blocks,
        "read_blocks": nothing if traffic is None else traffic.read_blocks,
    }


def host_cells(row: Mapping[str, Any]) -> list[str]:
    """Format the cells of HOST_COLUMNS."""
    if row["host_hit_tokens"] is None:
        return ["", "", ""]
    rate = row["host_hit_tokens"] / row["input_tokens"] if row["input_tokens"] else 0.0
    return [f"{rate:.4f}", f"{row['written_blocks']:,}", f"{row['read_blocks']:,}"]


def row_name(row: Mapping[str, Any]) -> str:
    """Return the policy of a row, with its host tier if it has one: the name of a line in a picture, or of a column.

    >>> row_name({"policy": "lru", "host": "2x"}), row_name({"policy": "lru"})
    ('lru, host 2x', 'lru')
    """
    return f"{row['policy']}, host {row['host']}" if row.get("host") else str(row["policy"])
