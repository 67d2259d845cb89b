"""Call the attention kernels in tests: a batch in small tiles, an output full of NaN, and the expected output."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import attention, reference
from radixkv_kernels.attention import Kind
from tests.attention.batches import Batch, BlocksFirst, fill

SMALL = (Kind(16, 16, 4, 1, 1), Kind(32, 16, 4, 1, 2), Kind(64, 32, 4, 1, 1))
"""Tiles with many edges, at little cost."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with KV and queries in another dtype, in the same memory order."""
    store = type(batch.store)(batch.store.layers, batch.store.num_blocks, batch.store.block_size, dtype=dtype)
    store.keys[0].copy_(batch.store.keys[0])
    store.values[0].copy_(batch.store.values[0])
    return dataclasses.replace(batch, store=store, query=batch.query.to(dtype))


def expected_output(batch: Batch, **options: object) -> Tensor:
    """Return the reference in float64, on the numbers as the store rounds them."""
    pools = batch.store.keys[0].double(), batch.store.values[0].double()
    lengths = batch.tables, batch.kv_lengths, batch.query_lengths
    return reference.attend(batch.query.double(), *pools, *lengths, **options)  # type: ignore[arg-type]


def attend(
    batch: Batch,
    window: int | None = None,
    *,
    min_saving: int = 1,
    kinds: tuple[Kind, ...] = SMALL,
    split: int | None = None,
    processors: int = 3,
    max_shared_rows: int | None = None,
    **options: object,
) -> Tensor:
    work = plan.build(
        batch.tables,
        batch.kv_lengths,
        batch.query_lengths,
        window,
        block_size=batch.store.block_size,
        min_saving=min_saving,
        max_shared_rows=max_shared_rows,
    )
    heads, kv_heads = len(batch.query), batch.store.layers[0].kv_heads
    step = attention.plan(
        work, heads=heads, kv_heads=kv_heads, chosen=kinds, device=CPU, processors=processors, split=split
    )
    shape = batch.query.shape[1], heads, batch.store.layers[0].value_dim
    output = torch.full(shape, torch.nan, dtype=batch.query.dtype)
    pools = batch.store.keys[0], batch.store.values[0]
    return attention.attend(batch.query, *pools, step, output=output, **options)  # type: ignore[arg-type]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def separate(
    kv_lengths: list[int],
    query_lengths: list[int],
    *,
    shape: LayerShape = LayerShape(2, 16, 16),  # noqa: B008  (frozen)
    group: int = 3,
    block_size: int = 16,
    kind: type[KVStore] = BlocksFirst,
    seed: int = 0,
) -> Batch:
    """Return sequences that share nothing, in float32, with blocks in reverse; all other slots hold NaN."""
    counts = [-(-length // block_size) for length in kv_lengths]
    free = iter(range(sum(counts), 0, -1))  # block 0 is unused: masked loads go there
    tables = [[next(free) for _ in range(count)] for count in counts]
    store = kind([shape], sum(counts) + 1, block_size, dtype=torch.float32)
    fill(store, tables, kv_lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(query_lengths), shape.kv_heads * group, shape.key_dim, generator=generator)
    return Batch(store, tables, kv_lengths, query_lengths, query.transpose(0, 1))
