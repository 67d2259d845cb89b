"""KV on the device, in enough copies that their rotation exceeds every cache, and our attention over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import attention, reference
from radixkv_kernels.attention import kinds

from .device import Device
from .shapes import BLOCK, GUARD, Batch, HeadShape, kv_bytes

TOLERANCE = 1e-2
"""|output - reference| / |reference|: rounding to bfloat16 gives about 3e-3, a wrong key much more."""

CHECKED = 6
"""Sequences of a batch that are compared with the reference, the first and the last among them."""

CHECKED_ROWS = 64
"""Query rows of a chunk that are compared, its last and so its longest."""


class Mismatch(Exception):
    """The output of a timed call differs from the reference."""


class Pools:
    """`copies` of one layer's KV as an engine lays it out on a GPU: random numbers, NaN in unused blocks."""

    def __init__(self, shape: HeadShape, num_blocks: int, copies: int, device: Device) -> None:
        self.shape, self.device = shape, device
        layer = LayerShape(shape.kv_heads, shape.dim, shape.dim)
        self.store = KVStore([layer] * copies, num_blocks, BLOCK, device=device.torch, dtype=device.dtype)
        torch.manual_seed(0)
        for pool in (*self.store.keys, *self.store.values):
            pool.normal_()
            pool[:, :GUARD] = torch.nan
            pool[:, -1] = torch.nan

    def __len__(self) -> int:
        return len(self.store.keys)

    def of(self, copy: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [kv_heads, blocks, BLOCK, dim] each."""
        return self.store.keys[copy], self.store.values[copy]

    def query(self, rows: int) -> Tensor:
        """[heads, rows, dim], laid out as a model's projections leave it."""
        generator = torch.Generator(self.device.torch).manual_seed(1)
        shape = rows, self.shape.heads, self.shape.dim
        made = torch.randn(shape, generator=generator, device=self.device.torch, dtype=torch.float32)
        return made.to(self.device.dtype).transpose(0, 1)


def copies_for(shape: HeadShape, tokens: int, rotate: int, most: int) -> int:
    """Return pools that take `rotate` bytes together, at least one and at most `most`."""
    return max(1, min(most, -(-rotate // kv_bytes(shape, tokens))))


class Attention:
    """Our kernels over pools, along the tree of a batch or, if not `tree`, sequence by sequence."""

    def __init__(self, pools: Pools, batch: Batch, query: Tensor, *, tree: bool = True) -> None:
        self._pools, self._batch, self._query = pools, batch, query
        shape, device = pools.shape, pools.device
        min_saving = plan.MIN_SAVING if tree else plan.NEVER_SHARE
        work = plan.build(batch.tables, batch.kv, batch.queries, block_size=BLOCK, min_saving=min_saving)
        self.read_tokens = work.read_tokens
        self.step = attention.plan(
            work,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            chosen=kinds(shape.dim, shape.dim, device.dtype, generation=device.generation, shared=device.shared),
            device=device.torch,
            processors=device.processors,
        )

    def run(self, copy: int) -> Tensor:
        """[rows, heads, dim] over one of the pools."""
        return attention.attend(self._query, *self._pools.of(copy), self.step, scale=self._pools.shape.scale)

    def calls(self, copies: int | None = None) -> list[Callable[[], object]]:
        """One call for each pool, or for the first few."""
        return [lambda copy=copy: self.run(copy) for copy in range(copies or len(self._pools))]

    def error(self) -> float:
        """How far off the first pool's output is; raises Mismatch if it is too far."""
        return error(lambda: self.run(0), self._pools, self._batch, self._query)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill unwritten memory from torch with NaN while this is open, so that rows that were not written show."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def error(run: Callable[[], Tensor], pools: Pools, batch: Batch, query: Tensor) -> float:
    """The relative error of an output [rows, heads, dim] over the first pool; raises Mismatch if it is too large.

    Compares some sequences, and of a chunk the last rows, in float64 on the numbers as they are stored.
    """
    with poisoned():
        output = run()
    if not bool(torch.isfinite(output).all()):
        raise Mismatch("the output has rows that were never written, or NaN")
    difference = square = 0.0
    for sequence in _sampled(len(batch.tables)):
        rows, expected = truth(pools, batch, query, sequence)
        difference += float((output[rows].double() - expected).square().sum())
        square += float(expected.square().sum())
    found = float(np.sqrt(difference / square))
    if not found <= TOLERANCE:
        raise Mismatch(f"the output is off by {found:.2g} of the reference, more than {TOLERANCE:g}")
    return found


def truth(pools: Pools, batch: Batch, query: Tensor, sequence: int) -> tuple[slice, Tensor]:
    """Return the last rows of one sequence: their place in the output, and the reference in float64."""
    end = sum(batch.queries[: sequence + 1])
    count = min(CHECKED_ROWS, batch.queries[sequence])
    table = torch.from_numpy(batch.tables[sequence].astype(np.int64)).to(query.device)
    key, value = (pool[:, table].double() for pool in pools.of(0))
    own, lengths = [range(len(table))], ([batch.kv[sequence]], [count])
    rows = slice(end - count, end)
    return rows, reference.attend(query[:, rows].double(), key, value, own, *lengths, scale=pools.shape.scale)


def _sampled(count: int) -> list[int]:
    """Up to CHECKED of `count`, evenly spread."""
    return sorted({round(i * (count - 1) / (CHECKED - 1)) for i in range(CHECKED)})
