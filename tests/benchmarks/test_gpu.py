"""The arithmetic, the adapters and the verdicts of benchmarks/gpu; test_gpu_smoke.py runs its kernels."""

# ruff: noqa: E402  (the benchmark's modules import Triton, which is looked for before)

from __future__ import annotations

import json
import subprocess
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

from gpu import bars, peers, run, shapes  # in the folder of the benchmarks, not installed
from gpu.device import Device
from gpu.pools import Mismatch, Pools, error, truth
from gpu.profiles import difference, table
from gpu.result import Ceilings, Row

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


def _played(monkeypatch: pytest.MonkeyPatch, lasts: dict[str, float]) -> list[tuple[str, float]]:
    """Parts that measure one row and take the given seconds of a virtual clock, by default 10."""
    now, played = [1000.0], []

    def part(part: run.PartOf, order: run.Order, ceilings: Ceilings, path: Path) -> str:
        played.append((part.name, part.budget_s * order.stretch))
        named = dict.fromkeys(("shape", "mode", "peer", "kind", "layout"), "made up")
        path.write_text(json.dumps({"row": {"case": "copy", **named, "tb_s": 4.0}}) + '\n{"end": {}}\n')
        now[0] += lasts.get(part.name, 10.0)
        if now[0] > 2000:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(run, "_here", part)
    monkeypatch.setattr(run, "_found", lambda order: ("", {"name": "made up", "slug": "made-up"}))
    monkeypatch.setattr(run.time, "time", lambda: now[0])
    return played


ALL = run.Order(tuple(part.name for part in run.PARTS), False, True, None, 1.0)


def test_all_parts_together_keep_to_their_time_whatever_each_of_them_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    played = _played(monkeypatch, {"ceilings": 50.0, "decode": 130.0, "tree": 75.0, "chunks": 90.0, "engine": 160.0})
    found = run.whole(ALL, lambda text: None, lambda result: None)
    assert dict(played)["engine"] == run.WHOLE_S - 345 - run.START_S
    assert dict(played)["profiles"] == run.WHOLE_S - 505 - run.START_S
    assert found["parts"]["peers"]["status"] == "measured"
    played = _played(monkeypatch, {"ceilings": 50.0, "decode": 130.0, "tree": 75.0, "chunks": 290.0})
    found = run.whole(ALL, lambda text: None, lambda result: None)
    assert [name for name, _ in played] == ["ceilings", "decode", "tree", "chunks"]
    assert found["parts"]["engine"]["reason"] == "the time of all parts together was used up"


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


# ---- peers, as files of a folder


VLLM = """
import torch
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.made_up import gather

torch.finfo(current_platform.fp8_dtype())
assert not envs.VLLM_BATCH_INVARIANT


def unified_attention(
    *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D, num_par_softmax_segments,
    softmax_segm_output, softmax_segm_max, softmax_segm_expsum,
):
    assert k.is_contiguous() and causal and max_seqlen_q == 1 and max_seqlen_k == int(seqused_k.max())
    for row, length in enumerate(seqused_k.tolist()):
        assert cu_seqlens_q[row] == row
        own = (cache[block_table[row]].flatten(0, 1)[:length] for cache in (k, v))
        out[row] = gather(q[row], *own, softmax_scale)
"""
GATHER = """
import torch


def gather(q, k, v, scale):
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * scale, 1)
    return torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
"""
SGLANG = """
import logging
from sglang.kernels.ops.attention.made_up import gather
from sglang.srt.environ import envs
from sglang.srt.utils import get_device_core_count, is_hip

assert not is_hip() and get_device_core_count() == 2


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, sm_scale,
    k_scale, v_scale,
):
    assert attn_logits.shape[2] == max_kv_splits and num_kv_splits.tolist() == [3] * len(q)
    for row in range(len(q)):
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        o[row] = gather(q[row], k_buffer[slots], v_buffer[slots], sm_scale)
"""
SPLITS = """
class _Launch:
    def __getitem__(self, grid):
        return lambda splits, *arguments, **options: splits.fill_(3)


get_num_kv_splits_triton = _Launch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Made-up kernels where those of vLLM and SGLang would be, with an `__init__` that must not run."""
    vllm, sglang = tmp_path / "vllm/v1/attention/ops", tmp_path / "sglang/kernels/ops/attention"
    for place in (vllm, sglang):
        place.mkdir(parents=True)
        (place / "made_up.py").write_text(GATHER)
        (place / "__init__.py").write_text("raise ImportError('a whole engine')")
    (vllm / "triton_unified_attention.py").write_text(VLLM)
    (sglang / "decode_attention.py").write_text(SGLANG)
    (sglang / "metadata.py").write_text(SPLITS)
    return tmp_path


@pytest.mark.parametrize("batch", [shapes.private(3, 40), shapes.shared(3, 32, 21)], ids=lambda batch: batch.name)
@pytest.mark.parametrize("which", ["vllm", "sglang"])
def test_a_peer_gets_keys_and_tables_in_the_layout_that_it_reads(folder: Path, which: str, batch: shapes.Batch) -> None:
    peer = peers.VllmTriton(folder) if which == "vllm" else peers.SglangTriton(folder, 2, early=False)
    pools = Pools(HEADS, batch.num_blocks, 2, CPU)
    query = pools.query(batch.rows)
    calls = peer.calls(pools, batch, query)
    assert len(calls) == 2
    assert error(calls[0], pools, batch, query) < 1e-2
    assert not torch.equal(calls[0](), calls[1]())  # another pool, other numbers


class _Wrapper:
    """FlashInfer's wrapper, by its documentation: pages [blocks, kv_heads, BLOCK, dim], runs given by `plan`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        assert "HND" in arguments

    def plan(self, starts: Any, indices: Any, last: Any, heads: int, *sizes: Any, **options: Any) -> None:
        self.runs = [
            (indices[a:b].long(), int((b - a - 1) * shapes.BLOCK + n))
            for a, b, n in zip(starts[:-1], starts[1:], last, strict=True)
        ]
        self.scale = options["sm_scale"]

    def run(self, query: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gather: dict[str, Any] = {}
        exec(GATHER, gather)
        key, value = (pool.transpose(1, 2) for pool in kv)
        rows = [
            gather["gather"](q, *(x[blocks].flatten(0, 1)[:n] for x in (key, value)), self.scale)
            for q, (blocks, n) in zip(query, self.runs, strict=True)
        ]
        return torch.stack(rows)


def test_flashinfers_decode_gets_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made = type("flashinfer", (), {"BatchDecodeWithPagedKVCacheWrapper": _Wrapper})
    monkeypatch.setitem(sys.modules, "flashinfer", made)  # type: ignore[arg-type]
    batch = shapes.shared(3, 32, 21)
    pools = Pools(HEADS, batch.num_blocks, 1, CPU)
    query = pools.query(3)
    calls = peers.FlashInferDecode(tensor_cores=True).calls(pools, batch, query)
    assert error(calls[0], pools, batch, query) < 1e-2


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


def test_kernels_of_a_step_are_a_difference() -> None:
    long, short = {"a": (40, 400.0), "b": (2, 9.0)}, {"a": (8, 80.0), "b": (2, 9.0)}
    found = table(difference(long, short), 32)
    assert (found["launches"], found["kernel_us"]) == (1.0, 10.0)
    assert [kernel["kernel"] for kernel in found["top"]] == ["a"]


@pytest.mark.long
def test_without_a_gpu_everything_is_skipped_with_a_reason_and_nothing_is_written(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    before = sorted((ROOT / "docs" / "results").iterdir())
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu"), "--here"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["reason"] == "torch sees no GPU here"
    assert set(line["parts"].values()) == {"skipped"}
    assert len(line["parts"]) == 7
    assert set(line["bars"].values()) == {"unmeasured"}
    assert sorted((ROOT / "docs" / "results").iterdir()) == before
