"""Launch attention over block tables, along a work list, in Triton: plain, split, cascade and tree decode, and chunks.

`kinds` chooses the kinds of tile for a head size and a GPU. `plan` cuts a work list into tiles on the device, once per
step, and `attend` launches the kernels for one layer. Arguments are not checked: callers have validated them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor

from radixkv_kernels import launches
from radixkv_kernels import tiles as tiling
from radixkv_kernels.launches import Bound, Launcher
from radixkv_kernels.triton_kernels import attend_tiles, merge_partials, spread_heads
from radixkv_kernels.work_list import Int32, WorkList


@dataclass(frozen=True)
class Kind:
    """One kind of tile, and how it is compiled: `rows` stacked query rows, `keys` per iteration."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int  # programs that a processor is given

    @property
    def shape(self) -> tiling.Shape:
        """The rows and keys, which the tiling needs."""
        return tiling.Shape(self.rows, self.keys)


AMD = 0
"""The `generation` of AMD GPUs in `kinds`: a processor has 64 KiB of shared memory, and wide warps."""

PASSES_WEIGHTS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
"""Whether Triton gives attention's weights shared memory of their own (3.6 and 3.7), or that of the queries (3.9)."""

RESERVED = 1024
"""Bytes of shared memory that CUDA takes for each program, in addition to those of the kernel."""


@cache
def kinds(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    generation: int = 9,
    shared: int = 0,
    stored: torch.dtype | None = None,
) -> tuple[Kind, ...]:
    """Return the kinds of tile for heads of this size: for private tails, for few rows, and for many rows and prefills.

    Products are computed in `dtype`; pools are `stored` in another one, or as codes in int8.
    `generation` is the major number of a GPU's compute capability. From 9 to 11, products read their operands from
    shared memory, which leaves registers for larger tiles. `shared` is the number of bytes of shared memory that a
    processor has; 0 takes the usual number of the generation. All kinds compile without spills and fit `resident` times
    into a processor (`make kernels`); they are not yet chosen by speed.
    """
    if torch.version.hip is not None:
        generation = AMD
    shared = shared or _SHARED.get(generation, 100) << 10
    size, half = max(key_dim, value_dim), dtype.itemsize <= 2
    if generation == AMD:
        shapes = _amd(size) if half else ((16, 16, 8, 2), (32, 16, 8, 2))
    elif not half:
        shapes = _float32(size, generation, shared)
    elif _reads_shared(generation):
        shapes = _hopper(size, generation, coded=stored == torch.int8)
    else:
        shapes = _ampere(size, shared)
    found = []
    for shape in shapes:
        kind = Kind(*shape, resident=1)
        needed = shared_bytes(kind, key_dim, value_dim, dtype, generation, stored) + RESERVED
        # A processor has registers for eight warps of any kernel.
        resident = 1 if generation == AMD else max(1, min(8 // kind.warps, shared // needed))
        found.append(replace(kind, resident=resident))
    return tuple(found)


def shared_bytes(
    kind: Kind, key_dim: int, value_dim: int, dtype: torch.dtype, generation: int, stored: torch.dtype | None = None
) -> int:
    """Return the most bytes of shared memory that a program of this kind takes: keys, values and queries.

    Numbers of another dtype are copied ahead as they are stored, and converted in registers. Operands that a product
    reads from shared memory are then written there again. Sums of codes are joined there, when all keys are read.
    Triton before 3.9 passes weights from one product's registers to the other's through memory of their own.
    """
    stored = stored or dtype
    values = head_parts(value_dim, PAIRS if stored == torch.int8 else LEAST)
    key, value = sum(head_parts(key_dim)), sum(values)
    from_shared = _reads_shared(generation) and kind.rows >= 64
    buffers = kind.stages if from_shared and stored == dtype else kind.stages - 1
    again = stored != dtype and (from_shared or dtype.itemsize == 4)
    converted = kind.keys * max(key, value) * dtype.itemsize if again else 0
    joined = 4 * kind.rows * values[0] if stored == torch.int8 else 0
    barriers = 2048 if from_shared and generation >= 10 else 0
    padded = kind.keys + (dtype.itemsize == 4)
    weights = kind.rows * padded * dtype.itemsize if PASSES_WEIGHTS and not from_shared else 0
    held = buffers * kind.keys * (key + value) * stored.itemsize
    return max(joined, held + converted + kind.rows * key * dtype.itemsize + barriers + weights)


_SHARED = {AMD: 64, 8: 164, 9: 228, 10: 228, 11: 228}
"""KiB of shared memory of a processor, by generation; GPUs for desktops have 100."""

_Shapes = tuple[tuple[int, int, int, int], ...]
"""The rows, keys, warps and stages of each kind."""


def _reads_shared(generation: int) -> bool:
    """Return whether products of 64 rows and more read their operands from shared memory."""
    return 9 <= generation <= 11


def _float32(size: int, generation: int, shared: int) -> _Shapes:
    """Return small tiles: NVIDIA's GPUs multiply float32 without tensor cores, from registers."""
    small, spills = shared < 164 << 10, generation >= 10 or shared < 164 << 10
    narrow = 64 if small else 96 if spills else 128  # larger heads spill with eight warps
    tails = (16, 16, 8 if size <= narrow else 16, 2)
    if size <= 64:
        return (tails, (32, 16, 8, 3))
    return (tails, (32, 16, 8 if spills and 128 <= size <= 192 else 16, 2))


def _hopper(size: int, generation: int, *, coded: bool) -> _Shapes:
    """Return tiles for generations 9 to 11; from 10 on, products need more warps or fewer keys to fit."""
    if size > 128:
        sharers = (16, 32, 4, 3), (64, 32, 8, 2)
        return sharers if coded else (*sharers, (128, 32, 8, 2))  # codes are converted in registers, and would spill
    in_parts = 64 < size < 128
    tails = (16, 16 if coded else 32, 4, 4) if in_parts else (16, 64, 4, 3)
    if generation >= 10:
        return (tails, (64, 32 if in_parts else 64, 8, 3), (128, 32, 8, 3))
    return (tails, (64, 32, 4, 4) if in_parts else (64, 64, 4, 3), (128, 64, 8, 3))


def _ampere(size: int, shared: int) -> _Shapes:
    """Return tiles for products from registers: generation 8, and 12 and above."""
    large = shared >= 164 << 10
    if size > 128:
        tails = (16, 64, 4, 2) if large else (16, 32, 4, 3 if size > 192 else 2)
        return (tails, (64, 32, 8, 2))
    tails = (16, 64, 4, 3) if size <= 64 else (16, 32, 4, 4 if large else 3)
    sharers = (64, 32, 8 if 64 < size < 128 else 4, 3) if large or size > 64 else (64, 16, 4, 4)
    return (tails, sharers, (128, 32, 8, 3))


def _amd(size: int) -> _Shapes:
    if size > 128:
        return ((16, 32, 4, 2), (64, 32, 8, 2))
    tails = (16, 64, 4, 3) if size <= 64 else (16, 32, 4, 3)
    return (tails, (64, 32, 4, 3), (128, 32, 8, 3))


LOG2_E = math.log2(math.e)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether this process interprets kernels instead of compiling them."""

AT_ONCE = 16
"""Partials that a merge loads together."""

MERGES_AT_ONCE = 8
"""Programs of the merge that a processor is given: a recorded step launches as many even if no row has partials."""


NUMBERS = 1024
"""Numbers that one program of `spread_heads` rotates."""

LEAST = 16
"""Numbers of a part of a head, at least: of a product's columns."""

PAIRS = 32
"""The same for values in 8 bits, which are read in pairs."""


def head_parts(dim: int, least: int = LEAST) -> tuple[int, int]:
    """Split a head's size into a power of two and the rest, both as the kernels load them; the rest may be 0.

    >>> head_parts(128), head_parts(80), head_parts(192), head_parts(5)
    ((128, 0), (64, 16), (128, 64), (16, 0))
    """
    main = max(least, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return main, 0 if rest <= 0 else max(least, triton.next_power_of_2(rest))


@dataclass(frozen=True)
class Addresses:
    """Where the arrays of a plan are."""

    tiles: tuple[int, ...]
    rows: tuple[int, ...]
    merges: tuple[int, ...]
    joined: int  # all bits of all addresses: a multiple of 16 if all of them are


@dataclass(frozen=True, eq=False)
class TilePlan:
    """A step's tiles on a device, for layers of one head shape; made once per step, used by each layer."""

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

    @cached_property
    def addresses(self) -> Addresses:
        """The addresses of all arrays, which do not move."""
        tiles, rows, merges = (tuple(each.data_ptr() for each in some) for some in (self.tiles, self.rows, self.merges))
        return Addresses(tiles, rows, merges, joined=reduce(or_, (*tiles, *rows, *merges)))


def cut(
    work: WorkList, *, heads: int, kv_heads: int, chosen: tuple[Kind, ...], processors: int, split: int | None = None
) -> tiling.Tiles:
    """Cut `work` into tiles on the host, with the arguments of `plan`."""
    shapes = tuple(kind.shape for kind in chosen)
    return tiling.build(work, shapes, heads // kv_heads, spread=spread(processors, kv_heads, chosen), split=split)


def spread(processors: int, kv_heads: int, chosen: tuple[Kind, ...]) -> tuple[float, ...]:
    """Return the tiles of each kind that run at once: a tile is one program's work for each kv head."""
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
    pinned: Callable[[int, torch.dtype], Tensor] | None = None,
) -> TilePlan:
    """Cut `work` into tiles and send them to `device`, which has `processors` processors, in one copy.

    With `split`, keys are cut into parts of about `split` keys in every step; else the step is balanced. The copy runs
    while the host goes on if `pinned` allocates host memory that allows it.
    """
    tiles = cut(work, heads=heads, kv_heads=kv_heads, chosen=chosen, processors=processors, split=split)
    lists = [tiles.block_ids, tiles.row_ids, tiles.positions, tiles.merge_rows, tiles.merge_offset, tiles.merge_ids]
    there = _upload([*lists, *tiles.kinds], device, pinned)
    return TilePlan(
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


def _upload(
    arrays: list[Int32], device: torch.device, pinned: Callable[[int, torch.dtype], Tensor] | None
) -> tuple[Tensor, ...]:
    """Copy all arrays at once, each on a boundary of 64 bytes, so that kernels may load 16 bytes at a time."""
    lengths = [-(-len(array) // 16) * 16 for array in arrays]
    starts = [0, *itertools.accumulate(lengths)]
    joined = pinned(starts[-1], torch.int32) if pinned else torch.empty(starts[-1], dtype=torch.int32)
    for array, start in zip(arrays, starts[:-1], strict=True):
        joined.numpy()[start : start + len(array)] = array
    there = joined.to(device, non_blocking=True)
    return tuple(there[start : start + len(array)] for array, start in zip(arrays, starts[:-1], strict=True))


Order = Callable[[Sequence[Callable[[], None]]], None]
"""Calls functions that each launch one kind of tile, in any streams: kinds write to different memory.

When it returns, the present stream must be after all of them, and each must be after the stream's work of before.
"""


def in_turn(kinds: Sequence[Callable[[], None]]) -> None:
    """Launch the kinds of tile one after the other in the present stream."""
    for launch in kinds:
        launch()


def attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    step: TilePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    order: Order = in_turn,
) -> Tensor:
    """Attention of query [heads, T, dk], the rows of all sequences in turn -> [T, heads, dv], in the query's dtype.

    The pools are [kv_heads, blocks, block_size, dk or dv] in any order of memory that keeps a head's numbers of one
    token together; `sinks` is [heads]. Products are computed in the query's dtype. With `scales` of keys and values,
    [kv_heads, blocks, block_size, 1] in the order of the pools, these hold codes of rotated heads. Writes to `output`
    if it is given. `order` launches the kinds of tile. Costs one launch for each kind in the step, one for the merge,
    two for rotations, and `step.num_partials * heads * (dv + 1)` floats; with `scales` also the output in float32.
    """
    heads, rows, _ = query.shape
    if output is None:
        output = query.new_empty(rows, heads, value_pool.shape[3])
    assert query.stride(2) == key_pool.stride(3) == value_pool.stride(3) == output.stride(2) == 1
    for pool, each in zip((key_pool, value_pool), scales, strict=bool(scales)):
        assert pool.stride() == (*(pool.shape[3] * stride for stride in each.stride()[:3]), 1)
    result = output
    if scales:
        output = torch.empty_like(output, dtype=torch.float32)
        query = _spread(query.transpose(0, 1), query.new_empty(rows, heads, key_pool.shape[3]), 1 / HEADROOM)
        query, scale = query.transpose(0, 1), scale * HEADROOM
    call = _Call(query, key_pool, value_pool, step, scale, softcap, sinks, output, scales)
    order([partial(call.launch, index) for index, count in enumerate(step.counts) if count])
    if step.num_merges:
        call.merge()
    return _spread(output, result) if scales else output


SPREAD_HEADS = Launcher(spread_heads)

HEADROOM = 16.0
"""The divisor of rotated queries, which a rotation of 128 numbers grows by up to 11.3: so they fit into float16."""


def _spread(source: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate heads [T, heads, dim] as the stored ones are rotated, times `factor`; returns `target`."""
    tokens, heads, dim = source.shape
    padded = triton.next_power_of_2(dim)
    at_once = max(1, NUMBERS // padded)
    if tokens:
        SPREAD_HEADS(
            -(-tokens * heads // at_once),
            (source, target),
            (tokens * heads,),
            (*source.stride()[:2], *target.stride()[:2]),
            {"HEADS": heads, "DIM": dim, "DIM_PADDED": padded, "AT_ONCE": at_once, "FACTOR": factor},
            num_warps=2,
        )
    return target


_BOUND: dict[tuple[Any, ...], dict[Kind | None, Bound]] = {}
"""Bound launches of each kind of tile, and under None that of the merge, by all that they depend on."""


class _Call:
    """One call of `attend`: launches its kernels, bound if they were launched for such arguments before."""

    def __init__(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        step: TilePlan,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        output: Tensor,
        scales: Sequence[Tensor],
    ) -> None:
        """Allocate the partials, in one piece: all outputs, then all log-sum-exps, on a boundary of 16 bytes."""
        heads, dv = query.shape[0], value_pool.shape[3]
        self._step, self._scale, self._softcap, self._heads = step, scale, softcap, heads
        self._offset = -(-step.num_partials * heads * dv // 4) * 4
        partials = query.new_empty(self._offset + step.num_partials * heads, dtype=torch.float32)
        self._tensors = query, key_pool, value_pool, sinks, output, partials
        self._scales = scales or (key_pool, value_pool)
        device = launches.device()
        self._bound: dict[Kind | None, Bound] | None = None
        if device is not None:
            self._bind(device)

    def _bind(self, device: int) -> None:
        """Find the launches that are bound for such arguments, unless an address is not aligned."""
        step = self._step
        query, key_pool, value_pool, sinks, output, partials = self._tensors
        q, k, v = query.data_ptr(), key_pool.data_ptr(), value_pool.data_ptr()
        s, o, p = q if sinks is None else sinks.data_ptr(), output.data_ptr(), partials.data_ptr()
        ks, vs = (each.data_ptr() for each in self._scales)
        if (q | k | v | ks | vs | s | o | p | step.addresses.joined) % launches.ALIGNMENT:
            return
        key = (
            device, step.block_size, step.window, self._scale, self._softcap,
            self._heads, query.dtype, query.stride(), output.dtype, output.stride(), sinks is not None and sinks.dtype,
            key_pool.dtype, key_pool.shape, key_pool.stride(), value_pool.dtype, value_pool.shape, value_pool.stride(),
        )  # fmt: skip
        bound = _BOUND.get(key)
        if bound is None:
            bound = launches.remember(_BOUND, key, {})
        self._bound, self._device, self._addresses = bound, device, (q, k, v, ks, vs, s, o, p, p + 4 * self._offset)

    def launch(self, index: int) -> None:
        """Launch all tiles of one kind."""
        step = self._step
        kind = step.kinds[index]
        programs = step.processors * kind.resident
        bound = None if self._bound is None else self._bound.get(kind)
        if bound is not None:
            *first, s, o, p, lse = self._addresses
            bound(self._device, programs, *first, step.addresses.tiles[index], *step.addresses.rows, s, o, p, lse)
            return
        query, key_pool, value_pool, sinks, output, partials = self._tensors
        softcap, dk, dv = self._softcap, key_pool.shape[3], value_pool.shape[3]
        scaled = key_pool.dtype == torch.int8
        (dk0, dk1), (dv0, dv1) = head_parts(dk), head_parts(dv, PAIRS if scaled else LEAST)
        self._keep(kind, launches.first(
            attend_tiles,
            (programs,),
            (
                query, key_pool, value_pool, *self._scales, step.tiles[index], *step.rows,
                query if sinks is None else sinks, output, partials, partials[self._offset :],
            ),
            (
                self._scale * LOG2_E if softcap is None else 2 * self._scale / softcap * LOG2_E,
                0.0 if softcap is None else softcap * LOG2_E,
                step.window or 0,
                *query.stride()[:2], *key_pool.stride()[:3], *value_pool.stride()[:3], *output.stride()[:2],
            ),
            {
                "KV_HEADS": key_pool.shape[0],
                "GROUP": self._heads // key_pool.shape[0],
                "DK": dk,
                "DV": dv,
                "DK0": dk0,
                "DK1": dk1,
                "DV0": dv0,
                "DV1": dv1,
                "BLOCK_SIZE": step.block_size,
                "ROWS": kind.rows,
                "KEYS": kind.keys,
                "WINDOWED": step.window is not None,
                "CAPPED": softcap is not None,
                "SINKS": sinks is not None,
                "SCALED": scaled,
                "WIDE": _reach(key_pool) > 2**31 or _reach(value_pool) > 2**31,
                "UPCAST": INTERPRETED and (query.dtype == torch.bfloat16 or scaled),
            },
            num_warps=kind.warps,
            num_stages=kind.stages,
        ))  # fmt: skip

    def merge(self) -> None:
        """Merge the partials of all rows that have more than one partial, or none."""
        step = self._step
        programs = min(step.num_merges * self._heads, step.processors * MERGES_AT_ONCE)
        bound = None if self._bound is None else self._bound.get(None)
        if bound is not None:
            *_, s, o, p, lse = self._addresses
            bound(self._device, programs, p, lse, *step.addresses.merges, s, o)
            return
        *_, value_pool, sinks, output, partials = self._tensors
        dv = value_pool.shape[3]
        self._keep(None, launches.first(
            merge_partials,
            (programs,),
            (partials, partials[self._offset :], *step.merges, partials if sinks is None else sinks, output),
            output.stride()[:2],
            {
                "HEADS": self._heads,
                "DV": dv,
                "DV_PADDED": triton.next_power_of_2(dv),
                "AT_ONCE": AT_ONCE,
                "SINKS": sinks is not None,
            },
        ))  # fmt: skip

    def _keep(self, kind: Kind | None, bound: Bound | None) -> None:
        """Remember a bound launch, if this call's arguments are those that it assumes."""
        if self._bound is not None and bound is not None:
            self._bound[kind] = bound


def _reach(pool: Tensor) -> int:
    """Return one more than the offset of a pool's last number."""
    return 1 + sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
