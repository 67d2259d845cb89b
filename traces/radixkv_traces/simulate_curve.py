"""The curve of a trace: hit rates of LRU pools of other sizes, by the code that a running engine has."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import numpy as np

from radixkv.cli.entry_point import table
from radixkv.telemetry.what_if import SIZES, WhatIf, WhatIfCurve, mixed
from radixkv_traces.cli import Capacity
from radixkv_traces.workload import Workload


def curve(workload: Workload, pool_blocks: int) -> WhatIfCurve:
    """Return the curve of a pool of this size, in which only prompts enter, as in `simulate.replay`. O(blocks)."""
    what_if = WhatIf(pool_blocks, workload.block_tokens, computed_tokens=0)
    for request, now in zip(workload.requests, workload.times, strict=True):
        numbers = np.frombuffer(request.blocks, np.int32).astype(np.uint64)
        what_if.add(mixed(numbers), request.input_length, cached_tokens=0, now=now)
    return what_if.report(0.0).since_load


def curve_rows(workload: Workload, capacities: Iterable[Capacity]) -> list[dict[str, Any]]:
    """Return the hit rates at each capacity for JSON: "2" is twice the capacity, and "inf" has no limit.

    Each capacity takes one pass over the trace.
    """
    rows = []
    for each in capacities:
        rates = zip(SIZES, curve(workload, each.blocks).hit_rates, strict=True)
        named = {f"{size:g}": rate for size, rate in rates}
        rows.append({"capacity": each.text, "capacity_blocks": each.blocks, "hit_rates": named})
    return rows


def curve_text(rows: Iterable[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    columns = ["lru curve", "blocks", *(f"{size:g}x" if size < inf else "no limit" for size in SIZES)]
    cells = [
        [row["capacity"], f"{row['capacity_blocks']:,}", *(f"{rate:.4f}" for rate in row["hit_rates"].values())]
        for row in rows
    ]
    return table(columns, cells, left=(0,))
