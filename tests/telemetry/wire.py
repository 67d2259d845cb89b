"""Records of every kind, drawn by Hypothesis, and small hand-made ones."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from radixkv.telemetry.protocol import MOST_POOL
from radixkv.telemetry.records import (
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
    drawable,
)
from radixkv.telemetry.what_if import SIZES, WhatIfCurve, WhatIfReport

FACTS = EngineFacts(
    "e-1", 4242, 1000.0, "0.1.0", "tiny", "cpu", "float32", "torch", "lru", 64, 16, 4096, 2048, 64, 2048, 512
)


def node(number: int, parent: int = 0, blocks: tuple[int, ...] = (0, 1), **other: object) -> NodeRecord:
    return NodeRecord(number, parent, 0, 16, blocks, 0, 0, 0, 0, 0, False, 1.0, 2.0, **other)  # type: ignore[arg-type]


def request(number: int, phase: str = "decode", **other: object) -> RequestRecord:
    return RequestRecord(number, phase, None, None, 0, 1, 64, 32, 16, 48, 0, 3, 0, False, 1.0, **other)  # type: ignore[arg-type]


def eviction(number: int, wanted_again: float | None = None) -> EvictionRecord:
    return EvictionRecord(number, 5.0, 7, 0, 16, 1, 2.5, 0, True, "prompt", wanted_again)


COUNT = st.integers(0, 2**63 - 1)
TIME = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=20).map(drawable)
RUNS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**20)), max_size=4).map(
    lambda runs: tuple(number for run in runs for number in run)
)
HEAD = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
PRIORITY = st.integers(-(2**63) + 1, 2**63 - 1)


def records(kind: type) -> st.SearchStrategy:
    """Any record of a kind, drawn from its annotations; some fields have a range of their own."""
    own = {
        "head": HEAD,
        "preempted_ms": HEAD,
        "priority": PRIORITY,
        "blocks": COUNT if kind is EvictionRecord else RUNS,
    }
    own |= {"num_blocks": st.integers(1, MOST_POOL), "host_blocks": st.integers(0, MOST_POOL)}
    own |= {"block_size": st.integers(1, 2**63 - 1)}
    return st.builds(kind, **{name: own.get(name, _any(hint)) for name, hint in get_type_hints(kind).items()})


def _any(hint: object) -> st.SearchStrategy:
    plain = {int: COUNT, float: TIME, str: TEXT, bool: st.booleans(), type(None): st.none()}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return st.one_of(*(_any(part) for part in get_args(hint) if part is not ...))


IDS = st.lists(COUNT, max_size=5).map(tuple)
CURVES = st.builds(WhatIfCurve, COUNT, COUNT, COUNT, st.tuples(*[COUNT] * len(SIZES)))
REPORTS = st.builds(WhatIfReport, COUNT, CURVES, CURVES, COUNT, st.lists(TEXT, max_size=2).map(tuple))
CHANGES = st.builds(
    Changes,
    time=TIME,
    reset=st.booleans(),
    stats=st.dictionaries(TEXT, TIME | COUNT, max_size=5),
    nodes=st.lists(records(NodeRecord), max_size=3).map(tuple),
    gone_nodes=IDS,
    sequences=st.lists(records(SequenceRecord), max_size=3).map(tuple),
    gone_sequences=IDS,
    requests=st.lists(records(RequestRecord), max_size=3).map(tuple),
    sessions=st.lists(records(SessionRecord), max_size=3).map(tuple),
    evictions=st.lists(records(EvictionRecord), max_size=3).map(tuple),
    next_victims=st.none() | IDS,
    what_if=st.none() | REPORTS.map(WhatIfReport.as_fields),
)
