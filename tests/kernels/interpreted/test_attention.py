"""The attention kernels equal the reference on random trees, tables, lengths and heads, in the interpreter.

Free slots hold NaN, and so do outputs before they are written.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import attention, reference
from tests.attention.batches import Batch, BlocksFirst, random_batch
from tests.kernels.interpreted.attending import CPU, SMALL, TOLERANCE, attend, cast, close, expected_output

DTYPES = list(TOLERANCE)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    dims = draw(st.sampled_from([(64, 64), (80, 80), (20, 8), (96, 48), (8, 5)]))
    batch = random_batch(
        draw(st.integers(0, 10**9)),
        block_size=draw(st.sampled_from([1, 3, 16, 32, 64])),
        shape=LayerShape(draw(st.sampled_from([1, 2])), *dims),
        group=draw(st.sampled_from([1, 3, 4, 8])),
        sequences=draw(st.integers(0, 4)),
        decode=draw(st.booleans()),
        adjacent=draw(st.booleans()),
        kind=draw(st.sampled_from([KVStore, BlocksFirst])),
    )
    return cast(batch, draw(st.sampled_from(DTYPES)))


windows = st.sampled_from([None, None, 1, 2, 7, 16, 40])


@given(batches(), windows, st.sampled_from([None, 1.5]), st.booleans(), st.sampled_from([None, 1, 32]))
@settings(max_examples=30, deadline=None)
def test_equals_the_reference(
    batch: Batch, window: int | None, softcap: float | None, with_sinks: bool, split: int | None
) -> None:
    sinks = torch.randn(len(batch.query)).to(batch.query.dtype) if with_sinks else None
    output = attend(batch, window, split=split, scale=0.3, softcap=softcap, sinks=sinks)
    wide = None if sinks is None else sinks.double()
    expected = expected_output(batch, scale=0.3, window=window, softcap=softcap, sinks=wide)
    assert output.dtype == batch.query.dtype
    close(output, expected, batch.query.dtype)


def long(lengths: list[int], seed: int = 0) -> Batch:
    """Decode over private contexts; the first is the same with any others after it."""
    store = BlocksFirst([LayerShape(2, 16, 16)], 400, 16, dtype=torch.float32)
    tables, at = [], 0
    for length in lengths:
        tables.append(list(range(at, at - (-length // 16))))
        at += len(tables[-1])
    for pool in (store.keys[0], store.values[0]):
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))
    query = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(seed + 1)).transpose(0, 1)
    return Batch(store, tables, lengths, [1] * len(lengths), query)


def test_a_fixed_split_gives_a_row_the_same_bits_in_any_batch_on_any_device() -> None:
    options = {"min_saving": plan.NEVER_SHARE, "split": 32, "scale": 0.3}
    alone = attend(long([130]), **options)  # type: ignore[arg-type]
    for processors in (1, 5):
        among = attend(long([130, 17, 200]), processors=processors, **options)  # type: ignore[arg-type]
        assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("split", [None, 32])
def test_scores_and_sinks_of_any_size_stay_finite(split: int | None) -> None:
    batch = long([90])
    for sink in (-1e4, 1e4):
        sinks = torch.full((6,), sink)
        output = attend(batch, split=split, scale=300.0, sinks=sinks)
        close(output, expected_output(batch, scale=300.0, sinks=sinks.double()), torch.float32)
        capped = attend(batch, split=split, scale=300.0, sinks=sinks, softcap=30.0)
        close(capped, expected_output(batch, scale=300.0, sinks=sinks.double(), softcap=30.0), torch.float32)


def test_blocks_beyond_two_gigabytes_are_reached() -> None:
    """A pool of four gigabytes, of which only touched pages exist: 32-bit offsets would overflow."""
    count = (1 << 31) // (16 * 64) + 4
    big = torch.empty(count, 1, 16, 64, dtype=torch.float16).transpose(0, 1)
    tables = [[0, count - 1, count - 2], [0, count - 3]]
    for block in {block for table in tables for block in table}:
        big[:, block] = torch.randn(16, 64).half()
    query = torch.randn(2, 7, 64).half()
    work = plan.build(tables, [40, 20], [1, 6], block_size=16, min_saving=1)
    step = attention.plan(work, heads=2, kv_heads=1, chosen=SMALL, device=CPU, processors=2)
    output = attention.attend(query, big, big, step, scale=0.1)
    used = [[0, 1, 2], [0, 3]]
    pool = big[:, [0, count - 1, count - 2, count - 3]].double()
    expected = reference.attend(query.double(), pool, pool, used, [40, 20], [1, 6], scale=0.1)
    close(output, expected, torch.float16)


def test_no_rows_give_no_rows() -> None:
    batch = long([])
    assert attend(batch, scale=1.0).shape == (0, 6, 16)
