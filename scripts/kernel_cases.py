"""The heads and features for which `compile_kernels` compiles the Triton kernels, and the calls that launch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from radixkv_kernels import attention, blocks, layers, sampling
from radixkv_kernels.attention import Kind, kinds
from radixkv_kernels.work_list import WorkList

KINDS = ("tails", "sharers", "chunks")
"""Launches of attention, by kind of tile: private tails, few rows, many rows and prefills."""


@dataclass(frozen=True)
class Case:
    """Heads of one model, and the features of its attention."""

    name: str
    key_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    wide: bool = False
    vocab: int | None = None  # for which the draw of tokens is compiled
    stored: torch.dtype | None = None  # of the pools, if not `dtype`; int8 with scales


def _everywhere() -> list[Case]:
    """Return each head size in each dtype, with all features; group sizes and block sizes alternate."""
    found: list[Case] = []
    for size, dims in enumerate(((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))):
        for turn, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            sharing, heads, kv_heads = (("mha", 16, 16), ("gqa", 32, 8), ("mqa", 8, 1))[(size + turn) % 3]
            block_size = (16, 32, 64)[(size + 2 * turn) % 3]
            name = f"{sharing} {dims[0]}/{dims[1]}, {('bf16', 'fp16', 'fp32')[turn]}, block {block_size}, all features"
            found.append(Case(name, *dims, heads, kv_heads, dtype, block_size, window=512, softcap=30.0, sinks=True))
    return found


CASES = [
    Case("gqa 128", 128, 128, 32, 8, vocab=128_256),
    Case("gqa 128, 64-bit offsets", 128, 128, 32, 8, wide=True),
    Case("gqa 128, block 32", 128, 128, 28, 4, block_size=32),
    Case("gqa 128, block 64, fp16", 128, 128, 64, 8, torch.float16, 64),
    Case("mha 64", 64, 64, 12, 12, vocab=50_257),  # no multiple of 16, so its rows are not aligned
    Case("gqa 64, window, sinks", 64, 64, 64, 8, window=128, sinks=True),
    Case("mha 80", 80, 80, 32, 32),
    Case("mha 96, window", 96, 96, 32, 32, torch.float16, window=2048),
    Case("mqa 128", 128, 128, 32, 1),
    Case("gqa 256, window, softcap", 256, 256, 8, 4, window=4096, softcap=50.0),
    Case("gqa 256, 64-bit offsets", 256, 256, 8, 4, wide=True),
    Case("192/128", 192, 128, 16, 16),
    Case("gqa 128, fp32", 128, 128, 32, 8, torch.float32),
    Case("gqa 256, fp32", 256, 256, 8, 4, torch.float32),
    *(Case(f"gqa {dim}, int8", dim, dim, 32, 8, stored=torch.int8) for dim in (64, 80, 128, 256)),
    Case("gqa 128, fp16, int8", 128, 128, 32, 8, torch.float16, stored=torch.int8),
    Case("gqa 128, fp32, int8", 128, 128, 32, 8, torch.float32, stored=torch.int8),
    Case("gqa 128, fp32 in fp16", 128, 128, 32, 8, torch.float32, stored=torch.float16),
    *_everywhere(),
]

_HOPPER = {
    "gqa 128": {"tails", "sharers", "chunks", "merge", "write", "copy", "norm", "rotate", "silu", "draw"},
    "gqa 64, window, sinks": {"tails"},
    "mha 80": {"chunks"},
    "mha 96, window": {"sharers"},
    "gqa 256, window, softcap": {"tails"},
    "192/128": {"sharers"},
    "gqa 128, 64-bit offsets": {"tails"},
    "gqa 128, int8": {"tails", "chunks", "write", "rotate", "spread"},
}
_AMPERE = {
    "gqa 128": {"tails", "sharers", "chunks", "merge", "write", "copy", "norm", "rotate", "silu"},
    "mha 96, window": {"sharers"},
    "gqa 256, window, softcap": {"tails"},
    "gqa 128, int8": {"tails"},
}
_DESKTOP = {"gqa 128": {"tails"}, "gqa 256, window, softcap": {"sharers"}}

PINNED = {"sm_80": _AMPERE, "sm_89": {"gqa 128": {"tails"}}, "sm_90": _HOPPER, "sm_120": _DESKTOP}
"""The launches that the tests compile, by GPU and case: those whose registers or shared memory are scarce."""


@dataclass(frozen=True)
class Launch:
    """A wrapper's call, and the kind of tile that it launches, if it is attention's."""

    call: Callable[[], object]
    kind: Kind | None = None
    kernel: str | None = None  # the one to look at, if there are several


def launches(case: Case, generation: int, shared: int) -> dict[str, Launch]:
    """Return the wrappers' calls, by name, with the kinds of tile of a GPU; the arguments are those of `kinds`."""
    key_pool, value_pool = _pool(case, case.key_dim), _pool(case, case.value_dim)
    scales = [_pool(case, 1, torch.float16) for _ in range(2)] if case.stored == torch.int8 else []
    query = torch.zeros(2, case.heads, case.key_dim, dtype=case.dtype).transpose(0, 1)
    new = [
        torch.zeros(2, case.kv_heads, dim, dtype=case.dtype).transpose(0, 1) for dim in (case.key_dim, case.value_dim)
    ]
    sinks = torch.zeros(case.heads, dtype=case.dtype) if case.sinks else None

    def attend(kind: Kind, rows: int = 1) -> object:
        work = _one_tile(case)
        if rows > 1:  # a second row that reads nothing, for the merge
            work = WorkList(**{**vars(work), "positions": np.zeros(rows, np.int32)})
        step = attention.plan(
            work, heads=case.heads, kv_heads=case.kv_heads, chosen=(kind,), device=torch.device("cpu"), processors=132
        )
        return attention.attend(
            query[:, :rows], key_pool, value_pool, step,
            scale=0.1, softcap=case.softcap, sinks=sinks, scales=scales,
        )  # fmt: skip

    chosen = kinds(case.key_dim, case.value_dim, case.dtype, generation=generation, shared=shared, stored=case.stored)
    found = {
        name: Launch(lambda kind=kind: attend(kind), kind, "attend_tiles")  # type: ignore[misc]
        for name, kind in zip(KINDS, chosen, strict=False)
        if kind.rows >= case.heads // case.kv_heads
    }
    if scales:
        found["spread"] = Launch(lambda: attend(chosen[-1]), kernel="spread_heads")
    found["merge"] = Launch(lambda: attend(chosen[-1], rows=2), kernel="merge_partials")
    found["write"] = Launch(lambda: blocks.write(*new, key_pool, value_pool, torch.zeros(2, dtype=torch.int64), scales))
    pairs = torch.zeros(2, 2, dtype=torch.int64)
    found["copy"] = Launch(lambda: blocks.copy(blocks.regions([key_pool, value_pool]), pairs))
    if case.vocab:
        found["draw"] = Launch(partial(_draw, case.vocab))
    return found | (_fused(case, key_pool, value_pool, scales) if case.key_dim == case.value_dim else {})


def _draw(vocab: int) -> object:
    """Launch the draw of two rows' tokens."""
    logits, integers, floats = torch.zeros(2, vocab), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    best, temperature, least = floats
    return sampling.draw(logits, best, *integers, temperature, torch.ones(2, dtype=torch.float64), least)


def _fused(
    case: Case, key_pool: torch.Tensor, value_pool: torch.Tensor, scales: list[torch.Tensor]
) -> dict[str, Launch]:
    """Return the calls of the operators of fused layers, with norms of heads."""
    dim, slots = case.key_dim, torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(2, (case.heads + 2 * case.kv_heads) * dim, dtype=case.dtype)
    hidden, residual = torch.zeros(2, 2, case.heads * dim, dtype=case.dtype).unbind(0)
    angles, weights = torch.zeros(2, 2, dim, dtype=case.dtype), torch.zeros(2, dim, dtype=case.dtype)

    def rotate() -> object:
        return layers.rotate_and_write(
            rows, case.heads, key_pool, value_pool, slots, scales,
            cosines=angles[0], sines=angles[1], query_weight=weights[0], key_weight=weights[1], epsilon=1e-6,
        )  # fmt: skip

    found = {
        "norm": Launch(lambda: layers.add_norm(hidden, residual[0], 1e-6, residual)),
        "silu": Launch(lambda: layers.silu_multiply(torch.zeros(2, 8 * case.heads * dim, dtype=case.dtype))),
    }
    return found | ({"rotate": Launch(rotate)} if not scales or dim.bit_count() == 1 else {})


def _one_tile(case: Case) -> WorkList:
    """Return a work list of one item that one row reads."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return WorkList(
        case.block_size, case.window, zero, zero, one, zero, one, one.astype(bool), zero, zero, zero,
        np.array([0, 1], np.int32), zero,
    )  # fmt: skip


def _pool(case: Case, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return [kv_heads, blocks, block_size, dim] in a GPU's layout; it is never written, so it takes no memory."""
    count = 3 + (1 << 31) // (case.kv_heads * case.block_size * dim) if case.wide else 2
    dtype = dtype or case.stored or case.dtype
    return torch.empty(count, case.kv_heads, case.block_size, dim, dtype=dtype).transpose(0, 1)
