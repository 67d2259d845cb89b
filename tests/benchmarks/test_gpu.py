"""The arithmetic, the adapters and the verdicts of benchmarks/gpu; test_gpu_smoke.py runs its kernels."""

# ruff: noqa: E402  (the benchmark's modules import Triton, which is looked for before)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import bars, peers, shapes  # in the folder of the benchmarks, not installed
from gpu.device import Device
from gpu.pools import Mismatch, Pools, error, truth
from gpu.result import Row

CPU = Device(torch.device("cpu"), "test", 2, 9, 0, 1 << 16, True)
HEADS = shapes.HeadShape("test", 4, 2, 8)


# ---- shapes

lengths = st.integers(1, 70)
batches = st.one_of(
    st.builds(shapes.private, st.integers(1, 4), lengths, scattered=st.booleans()),
    st.builds(shapes.shared, st.integers(1, 4), st.integers(1, 4).map(lambda n: n * shapes.BLOCK), lengths),
    st.builds(
        shapes.two_level,
        *[st.integers(1, 3)] * 2,
        *[st.integers(1, 3).map(lambda n: n * shapes.BLOCK)] * 2,
        lengths,
    ),
    st.builds(
        shapes.comb, st.integers(1, 4), st.integers(1, 3).map(lambda n: n * shapes.BLOCK), st.integers(1, 2), lengths
    ),
    st.builds(shapes.chunk, lengths, st.integers(0, 70)),
)


@given(batches)
@settings(max_examples=40, deadline=None)
def test_a_batch_is_counted_as_it_is(batch: shapes.Batch) -> None:
    keys = {
        (int(table[i // shapes.BLOCK]), i % shapes.BLOCK)
        for table, n in zip(batch.tables, batch.kv, strict=True)
        for i in range(n)
    }
    assert batch.unique_tokens == len(keys)
    assert all(shapes.GUARD <= block < batch.num_blocks - 1 for block, _ in keys)  # guards on both sides
    assert batch.flat_tokens == sum(batch.kv)
    pairs = sum(
        1 for kv, n in zip(batch.kv, batch.queries, strict=True) for q in range(kv - n, kv) for _ in range(q + 1)
    )
    assert batch.visible == pairs
    assert shapes.flops(HEADS, batch) == pairs * HEADS.heads * HEADS.dim * 2 * 2


@given(batches.filter(lambda batch: bool(batch.levels)))
@settings(max_examples=30, deadline=None)
def test_a_cascade_reads_what_the_tables_say(batch: shapes.Batch) -> None:
    """FlashInfer's levels, read back as its documentation says, give each sequence its keys in order."""
    found: list[list[int]] = [[] for _ in batch.tables]
    for edges, starts, indices, last in peers.cascade(batch):
        assert (edges[0], edges[-1]) == (0, len(batch.tables))
        for index in range(len(edges) - 1):
            blocks = indices[starts[index] : starts[index + 1]].tolist()
            slots = [block * shapes.BLOCK + slot for block in blocks for slot in range(shapes.BLOCK)]
            slots = slots[: len(slots) - shapes.BLOCK + int(last[index])]
            for sequence in range(int(edges[index]), int(edges[index + 1])):
                found[sequence] += slots
    for slots, table_, n in zip(found, batch.tables, batch.kv, strict=True):
        assert slots == [int(table_[i // shapes.BLOCK]) * shapes.BLOCK + i % shapes.BLOCK for i in range(n)]


# ---- pools and checks


def attended(pools: Pools, batch: shapes.Batch, query: torch.Tensor) -> torch.Tensor:
    return torch.cat([truth(pools, batch, query, index)[1] for index in range(len(batch.tables))]).to(query.dtype)


def test_a_check_notices_a_wrong_key_a_missing_row_and_a_guard() -> None:
    batch = shapes.private(2, 40)
    pools = Pools(HEADS, batch.num_blocks, 1, CPU)
    query = pools.query(2)
    right = attended(pools, batch, query)
    assert error(lambda: right, pools, batch, query) < 1e-2
    wrong = right.clone()
    wrong[1, 0] += 0.05
    with pytest.raises(Mismatch, match="off by"):
        error(lambda: wrong, pools, batch, query)
    with pytest.raises(Mismatch, match="never written"):
        error(lambda: torch.empty_like(right), pools, batch, query)
    assert torch.isnan(pools.store.keys[0][:, 0]).all()
    assert torch.isnan(pools.store.values[0][:, -1]).all()


# ---- results


def parts_of(rows: dict[str, list[Row]]) -> dict[str, Any]:
    return {name: {"status": "measured", "reason": "", "says": "", "rows": each} for name, each in rows.items()}


def all_met() -> dict[str, list[Row]]:
    """Rows that meet every bar, at full size."""
    sizes = shapes.FULL
    tree = shapes.shared(*shapes.BAR_TREE).name
    decode = [
        {"case": f"{b} x {c}", "shape": s.name, "batch": b, "context": c, "layout": how, "us": us, "share": 0.9}
        for s, b, c in sizes.decodes()
        for how, us in (("paged", 10.2), ("contiguous", 10.0))
    ]
    ratios = {
        "FlashInfer decode": 1.2,
        "FlashInfer decode, tensor cores": 1.1,
        "vLLM Triton": 1.3,
        "SGLang Triton": 1.3,
    }
    found = [
        {"case": str(case), "shape": s.name, "peer": name, "kind": "decode", "ratio": ratio}
        for s in sizes.shapes
        for case in sizes.peers
        for name, ratio in ratios.items()
    ]
    found += [
        {"case": str(case), "shape": s.name, "peer": "FlashInfer cascade", "kind": "tree", "ratio": 1.0}
        for s in sizes.shapes
        for case in range(2)
    ]
    return {
        "decode": decode,
        "tree": [
            {"case": tree, "shape": shapes.LLAMA_8B.name, "mode": mode, "us": us, "speedup": 5.5}
            for mode, us in (("tree", 55.0), ("flat", 400.0))
        ],
        "peers": found,
        "chunks": [{"case": str(i), "of_sdpa": 0.7} for i in range(9)],
        "engine": [
            {"case": "first 1000 steps after the load", "stalls": 0, "eager_steps": 0},
            {"case": "comb of 5 x 16, 5 decode", "eager_steps": 0},
            *({"case": "sampling", "mode": mode, "over_greedy": 1.05} for mode in ("greedy", "top_p", "penalties")),
            *({"case": f"step {i}", "mode": "tree", "of_floor": 1.2} for i in range(3)),
        ],
        "profiles": [{"case": "engine", "what": "decode step, a layer", "launches": 10.0}],
    }


def states(rows: dict[str, list[Row]]) -> dict[str, str]:
    return {bar["name"]: bar["state"] for bar in bars.judge(parts_of(rows), shapes.FULL)}


def test_bars_are_met_when_all_cases_meet_them() -> None:
    assert set(states(all_met()).values()) == {"met"}


@pytest.mark.parametrize(
    ("bar", "part", "field", "value"),
    [
        ("decode_bandwidth", "decode", "share", 0.84),
        ("paged", "decode", "us", 10.6),
        ("tree_us", "tree", "us", 61.0),
        ("tree_speedup", "tree", "speedup", 4.9),
        ("flashinfer_cascade", "peers", "ratio", 0.99),
        ("chunks", "chunks", "of_sdpa", 0.64),
        ("engine_step", "engine", "of_floor", 1.26),
        ("stalls", "engine", "stalls", 1),
        ("eager_steps", "engine", "eager_steps", 1),
        ("penalties", "engine", "over_greedy", 1.2),
        ("launches", "profiles", "launches", 12.0),
    ],
)
def test_one_case_too_slow_misses_a_bar_and_one_without_a_number_leaves_it_unmeasured(
    bar: str, part: str, field: str, value: float
) -> None:
    for number, state in ((value, "missed"), (None, "unmeasured")):
        rows = all_met()
        row = [row for row in rows[part] if field in row][-1 if part in ("peers", "chunks", "engine") else 0]
        row[field] = number
        found = states(rows)
        assert found.pop(bar) == state
        others = {"paged"} if bar == "decode_bandwidth" else set()
        assert {name for name, other in found.items() if other != "met"} <= others


@pytest.mark.parametrize(("bar", "peer"), [("vllm", "vLLM Triton"), ("sglang", "SGLang Triton")])
def test_a_peer_that_failed_in_one_case_leaves_its_bar_unmeasured(bar: str, peer: str) -> None:
    rows = all_met()
    failed = next(row for row in rows["peers"] if row["peer"] == peer)
    del failed["ratio"]
    failed["failed"] = "out of memory"
    verdict = next(each for each in bars.judge(parts_of(rows), shapes.FULL) if each["name"] == bar)
    assert verdict["state"] == "unmeasured"
    assert "out of memory" in verdict["why"]
