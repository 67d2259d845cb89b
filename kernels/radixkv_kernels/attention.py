"""Attention over block tables, along a work list, in Triton: plain, split, cascade and tree decode, and chunks.

Knows how to launch the kernels. Does not know stores, models or the tree, nor which kinds of tile suit which heads
(`kinds`), and does not check what it is given: whoever calls has.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from radixkv_kernels import tiles as tiling
from radixkv_kernels.attention_kernels import attend_tiles, merge_partials
from radixkv_kernels.kinds import Kind as Kind
from radixkv_kernels.kinds import kinds as kinds
from radixkv_kernels.work_list import Int32, WorkList

LOG2_E = math.log2(math.e)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether this process interprets kernels instead of compiling them."""

AT_ONCE = 16
"""Partials that a merge loads together."""


def parts(dim: int) -> tuple[int, int]:
    """A head's size as a power of two and the rest, both as the kernels load them; the rest may be 0.

    >>> parts(128), parts(80), parts(192), parts(5)
    ((128, 0), (64, 16), (128, 64), (16, 0))
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return main, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


@dataclass(frozen=True, eq=False)
class Plan:
    """A step's tiles on a device, for layers of one head shape; made once per step, followed by each layer."""

    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]  # tiles of each kind
    tiles: tuple[Tensor, ...]  # by kind
    rows: tuple[Tensor, ...]  # block_ids, row_ids, positions
    merges: tuple[Tensor, ...]  # merge_rows, merge_offset, merge_ids
    num_merges: int
    num_partials: int
    block_size: int
    window: int | None
    processors: int


def cut(
    work: WorkList,
    *,
    heads: int,
    kv_heads: int,
    chosen: tuple[Kind, ...],
    processors: int,
    split: int | None = None,
) -> tiling.Tiles:
    """Tiles for `work`, on the host; as `plan`."""
    shapes = tuple(kind.shape for kind in chosen)
    return tiling.build(work, shapes, heads // kv_heads, spread=spread(processors, kv_heads, chosen), split=split)


def spread(processors: int, kv_heads: int, chosen: tuple[Kind, ...]) -> tuple[float, ...]:
    """Tiles of each kind that so many processors work on at once: each tile is one program's for each kv head."""
    return tuple(processors * kind.resident / kv_heads for kind in chosen)


def plan(
    work: WorkList,
    *,
    heads: int,
    kv_heads: int,
    chosen: tuple[Kind, ...],
    device: torch.device,
    processors: int,
    split: int | None = None,
) -> Plan:
    """Tiles for `work` on `device`, which has so many `processors`, in one copy.

    `split` cuts keys into parts of about so many, whatever else is in the step; else the step is balanced.
    """
    tiles = cut(work, heads=heads, kv_heads=kv_heads, chosen=chosen, processors=processors, split=split)
    lists = [tiles.block_ids, tiles.row_ids, tiles.positions, tiles.merge_rows, tiles.merge_offset, tiles.merge_ids]
    there = _upload([*lists, *tiles.kinds], device)
    return Plan(
        kinds=chosen,
        counts=tuple(tiles.num_tiles(kind) for kind in range(len(chosen))),
        tiles=there[6:],
        rows=there[:3],
        merges=there[3:6],
        num_merges=tiles.num_merges,
        num_partials=tiles.num_partials,
        block_size=work.block_size,
        window=work.window,
        processors=processors,
    )


def _upload(arrays: list[Int32], device: torch.device) -> tuple[Tensor, ...]:
    """All arrays in one copy, each on a boundary of 64 bytes, so that kernels may load 16 bytes at a time."""
    lengths = [-(-len(array) // 16) * 16 for array in arrays]
    starts = [0, *itertools.accumulate(lengths)]
    joined = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts[:-1], strict=True):
        joined.numpy()[start : start + len(array)] = array
    there = joined.to(device, non_blocking=True)
    return tuple(there[start : start + len(array)] for array, start in zip(arrays, starts[:-1], strict=True))


def attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    step: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Attention of query [heads, T, dk], the rows of all sequences in turn -> [T, heads, dv], in the query's dtype.

    The pools are [kv_heads, blocks, block_size, dk or dv] in any order of memory that keeps a head's numbers of one
    token together; `sinks` is [heads]. Writes to `output` if it is given. One launch for each kind of tile that the
    step has, and one for the merge; takes `step.num_partials * heads * (dv + 1)` floats beside.
    """
    heads, rows, _ = query.shape
    if output is None:
        output = query.new_empty(rows, heads, value_pool.shape[3])
    assert query.stride(2) == key_pool.stride(3) == value_pool.stride(3) == output.stride(2) == 1
    partial = query.new_empty(step.num_partials, heads, value_pool.shape[3], dtype=torch.float32)
    lse = query.new_empty(step.num_partials, heads, dtype=torch.float32)
    for kind, tiles, count in zip(step.kinds, step.tiles, step.counts, strict=True):
        if count:
            _launch(kind, tiles, query, key_pool, value_pool, step, scale, softcap, sinks, output, partial, lse)
    if step.num_merges:
        _merge(step, partial, lse, sinks, output)
    return output


def _launch(
    kind: Kind,
    tiles: Tensor,
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    step: Plan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    output: Tensor,
    partial: Tensor,
    lse: Tensor,
) -> None:
    """All tiles of one kind."""
    kv_heads, dk, dv = key_pool.shape[0], key_pool.shape[3], value_pool.shape[3]
    (dk0, dk1), (dv0, dv1) = parts(dk), parts(dv)
    attend_tiles[(step.processors * kind.resident,)](
        query,
        key_pool,
        value_pool,
        tiles,
        *step.rows,
        query if sinks is None else sinks,
        output,
        partial,
        lse,
        scale * LOG2_E if softcap is None else 2 * scale / softcap * LOG2_E,
        0.0 if softcap is None else softcap * LOG2_E,
        step.window or 0,
        *query.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        *output.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=query.shape[0] // kv_heads,
        DK=dk,
        DV=dv,
        DK0=dk0,
        DK1=dk1,
        DV0=dv0,
        DV1=dv1,
        BLOCK_SIZE=step.block_size,
        ROWS=kind.rows,
        KEYS=kind.keys,
        WINDOWED=step.window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        WIDE=_reach(key_pool) > 2**31 or _reach(value_pool) > 2**31,
        UPCAST=INTERPRETED and key_pool.dtype == torch.bfloat16,
        num_warps=kind.warps,
        num_stages=kind.stages,
    )


def _reach(pool: Tensor) -> int:
    """One more than the offset of a pool's last number."""
    return 1 + sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))


def _merge(step: Plan, partial: Tensor, lse: Tensor, sinks: Tensor | None, output: Tensor) -> None:
    """All rows that have more than one partial, or none."""
    heads, dv = output.shape[1:]
    merge_partials[(step.num_merges, heads)](
        partial,
        lse,
        *step.merges,
        partial if sinks is None else sinks,
        output,
        *output.stride()[:2],
        HEADS=heads,
        DV=dv,
        DV_PADDED=triton.next_power_of_2(dv),
        AT_ONCE=AT_ONCE,
        SINKS=sinks is not None,
    )
