"""Records with typical values for tests: a test names only the values that matter to it."""

from __future__ import annotations

from typing import Any

from radixkv.telemetry.records import EvictionRecord, NodeRecord, RequestRecord, SequenceRecord, SessionRecord
from radixkv.telemetry.what_if import WhatIfCurve, WhatIfReport

STATES = {
    "cache.state_rows": 8.0,
    "cache.state_rows_used": 3.0,
    "cache.state_slots": 1200.0,
    "cache.state_slots_used": 1100.0,
    "cache.evicted_states": 17.0,
}
"""Gauges of a hybrid model."""


HOST_BLOCKS = 40
HOST = {
    "cache.host_free_blocks": 15.0,
    "cache.host_nodes": 6.0,
    "cache.offloaded_blocks": 300.0,
    "cache.loaded_tokens": 1600.0,
    "cache.host_evicted_blocks": 12.0,
    "host_tokens": 1600.0,
}
"""Gauges and counters of an engine with a host tier of HOST_BLOCKS blocks."""
DISK = {
    "disk.slots": 2000.0,
    "disk.records": 500.0,
    "disk.read_bytes_per_s": 1.25e9,
    "disk.failed_reads": 1.0,
    "disk.damaged_records": 2.0,
}
"""Gauges and counters of an engine with a disk cache."""


CURVE = WhatIfCurve(400, 100_000, 52_000, (30_000, 57_000, 61_000, 83_000, 88_000, 90_000, 91_000))
WHAT_IF = WhatIfReport(64, CURVE, CURVE, 3, ("another policy evicts",))
"""A curve that is far from the measured rate, with the reason."""


def request(**values: Any) -> RequestRecord:
    """A finished request."""
    usual: dict[str, Any] = {
        "number": 1,
        "phase": "finished",
        "session": 1,
        "namespace": None,
        "priority": 0,
        "streams": 1,
        "prompt_tokens": 100,
        "max_tokens": 50,
        "cached_tokens": 60,
        "computed_tokens": 40,
        "recomputed_tokens": 0,
        "output_tokens": 20,
        "preemptions": 0,
        "coalesced": False,
        "submitted": 1000.0,
        "admitted": 1000.1,
        "first_token": 1000.3,
        "ended": 1001.0,
        "finish": "stop",
    }
    return RequestRecord(**usual | values)


def session(**values: Any) -> SessionRecord:
    """An open session after three turns."""
    usual: dict[str, Any] = {
        "number": 1,
        "namespace": None,
        "requests": 3,
        "live": 0,
        "tokens": 400,
        "prompt_tokens": 700,
        "cached_tokens": 500,
        "output_tokens": 90,
        "started": 990.0,
        "used": 1000.0,
    }
    return SessionRecord(**usual | values)


def eviction(**values: Any) -> EvictionRecord:
    """An eviction without regret."""
    usual: dict[str, Any] = {
        "number": 1,
        "time": 1000.0,
        "node": 5,
        "start": 0,
        "tokens": 32,
        "blocks": 2,
        "idle_s": 60.0,
        "hits": 0,
        "gone": False,
        "pressure": "to make room for 4 blocks when 0 were free",
    }
    return EvictionRecord(**usual | values)


def node(**values: Any) -> NodeRecord:
    """A cached node without holders."""
    usual: dict[str, Any] = {
        "id": 2,
        "parent": 1,
        "start": 0,
        "tokens": 32,
        "blocks": (0, 2),
        "holders": 0,
        "locks": 0,
        "pins": 0,
        "hits": 1,
        "priority": 0,
        "demoted": False,
        "born": 980.0,
        "used": 995.0,
        "head": (5, 6, 7),
    }
    return NodeRecord(**usual | values)


def sequence(**values: Any) -> SequenceRecord:
    """An open sequence with one private block."""
    usual: dict[str, Any] = {
        "id": 1,
        "request": 1,
        "index": 0,
        "node": 2,
        "length": 40,
        "cached": 32,
        "blocks": (2, 1),
        "opened": 999.0,
    }
    return SequenceRecord(**usual | values)
