"""The torch backend equals the reference to 1e-12 in float64, with shared runs, windows and scattered blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import plan, torch_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from tests.attention.batches import Batch, BlocksFirst, fill, random_batch

SHAPES = [LayerShape(1, 8, 8), LayerShape(2, 8, 8), LayerShape(3, 4, 6), LayerShape(2, 6, 4)]
SETTINGS = settings(max_examples=200, deadline=None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    return random_batch(
        draw(st.integers(0, 10**9)),
        block_size=draw(st.sampled_from([1, 2, 3, 16])),
        shape=draw(st.sampled_from(SHAPES)),
        group=draw(st.sampled_from([1, 2, 3])),
        sequences=draw(st.integers(0, 7)),
        decode=draw(st.booleans()),
        adjacent=draw(st.booleans()),
        kind=draw(st.sampled_from([KVStore, KVStore, BlocksFirst])),
        kv_dtype=draw(st.sampled_from(["auto", "auto", "float16", "int8"])),
    )


def attend(batch: Batch, window: int | None = None, min_saving: int = 1, **options: object) -> torch.Tensor:
    work = plan.build(
        batch.tables,
        batch.kv_lengths,
        batch.query_lengths,
        window,
        block_size=batch.store.block_size,
        min_saving=min_saving,
    )
    attend = batch.store.format.attending(partial(torch_backend.attend, batch.store))
    return attend(0, batch.query, work, **options)


windows = st.sampled_from([None, None, 1, 2, 7, 16, 100])
softcaps = st.sampled_from([None, None, 1.5])


@given(batches(), windows, softcaps, st.booleans(), st.sampled_from([1, 16, 256]))
@SETTINGS
def test_equals_the_reference(
    batch: Batch, window: int | None, softcap: float | None, with_sinks: bool, min_saving: int
) -> None:
    sinks = torch.randn(len(batch.query), dtype=torch.float64) if with_sinks else None
    options = {"scale": 0.4, "softcap": softcap, "sinks": sinks}
    output = attend(batch, window, min_saving, **options)
    torch.testing.assert_close(output, batch.expected_output(window=window, **options), rtol=0, atol=1e-12)


@given(batches())
@settings(max_examples=60, deadline=None)
def test_along_the_tree_equals_sequence_by_sequence(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "VIEW_BLOCKS", 2)  # tails that overlap in memory
        flat = attend(batch, min_saving=10**9, scale=0.4)
    torch.testing.assert_close(attend(batch, min_saving=1, scale=0.4), flat, rtol=0, atol=1e-12)


@given(batches(), windows, softcaps)
@settings(max_examples=60, deadline=None)
def test_the_open_arithmetic_cuts_rows_and_changes_nothing(
    batch: Batch, window: int | None, softcap: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "SCORE_CELLS", 50)
        patch.setattr(torch_backend, "TAIL_CELLS", 50)
        patch.setattr(torch_backend, "VIEW_BLOCKS", 2)
        patch.setattr(batch.store.format, "piece", 5)  # keys are expanded piece by piece
        patch.setattr(plan, "BAND", 64)
        output = attend(batch, window, scale=0.4, softcap=softcap)
    torch.testing.assert_close(
        output, batch.expected_output(scale=0.4, window=window, softcap=softcap), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("window", [None, 33])
def test_other_dtypes_come_close(dtype: torch.dtype, tolerance: float, decode: bool, window: int | None) -> None:
    shape = LayerShape(2, 16, 16)
    batch = random_batch(1, block_size=16, shape=shape, group=3, sequences=6, decode=decode, adjacent=True)
    store = KVStore([shape], batch.store.num_blocks, 16, dtype=dtype)
    store.keys[0].copy_(batch.store.keys[0])
    store.values[0].copy_(batch.store.values[0])
    narrow = Batch(store, batch.tables, batch.kv_lengths, batch.query_lengths, batch.query.to(dtype))
    output = attend(narrow, window, scale=0.25)
    assert output.dtype == dtype
    expected_output = batch.expected_output(scale=0.25, window=window)
    torch.testing.assert_close(output.double(), expected_output, rtol=0, atol=tolerance)


def test_layers_have_shapes_of_their_own_and_share_one_list() -> None:
    shapes = [LayerShape(1, 8, 8), LayerShape(2, 4, 6), LayerShape(1, 8, 8)]
    store = KVStore(shapes, 12, 4, dtype=torch.float64)
    tables, kv, queries = [[3, 1, 7], [3, 1, 5], [9]], [12, 10, 2], [1, 3, 1]
    fill(store, tables, kv)
    work = plan.build(tables, kv, queries, block_size=4, min_saving=1)
    for layer, shape in enumerate(shapes):
        query = torch.randn(4, 5, shape.key_dim, dtype=torch.float64)
        one = KVStore([shape], 12, 4, dtype=torch.float64)
        one.keys[0].copy_(store.keys[layer])
        one.values[0].copy_(store.values[layer])
        expected_output = Batch(one, tables, kv, queries, query).expected_output(scale=0.5)
        torch.testing.assert_close(
            torch_backend.attend(store, layer, query, work, scale=0.5), expected_output, rtol=0, atol=1e-12
        )


def test_works_in_and_out_of_inference_mode_on_one_list() -> None:
    batch = random_batch(3, block_size=16, shape=LayerShape(2, 8, 8), group=2, sequences=5, decode=True, adjacent=False)
    work = plan.build(batch.tables, batch.kv_lengths, batch.query_lengths, block_size=16, min_saving=1)
    with torch.inference_mode():
        inside = torch_backend.attend(batch.store, 0, batch.query, work, scale=0.4)
    outside = torch_backend.attend(batch.store, 0, batch.query, work, scale=0.4)
    assert torch.equal(inside, outside)


def test_the_same_step_gives_the_same_bits() -> None:
    batch = random_batch(4, block_size=16, shape=LayerShape(2, 8, 8), group=3, sequences=6, decode=False, adjacent=True)
    assert torch.equal(attend(batch, scale=0.4), attend(batch, scale=0.4))


def test_a_query_laid_out_as_models_do_is_read_right() -> None:
    batch = random_batch(5, block_size=16, shape=LayerShape(2, 8, 8), group=3, sequences=6, decode=True, adjacent=True)
    models = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    work = plan.build(batch.tables, batch.kv_lengths, batch.query_lengths, block_size=16)
    output = torch_backend.attend(batch.store, 0, models, work, scale=0.4)
    torch.testing.assert_close(output, batch.expected_output(scale=0.4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 50])
def test_where_the_blocks_lie_changes_no_bit_if_all_are_gathered(window: int | None) -> None:
    """Compare decodes and chunks over runs of blocks with the same KV in other blocks; nothing is shared."""
    shape, tables, kv, queries = LayerShape(2, 8, 8), [[*range(20)], [*range(20, 45)]], [307, 400], [1, 130]
    query = torch.randn(6, 131, 8)
    outputs = []
    for order in ([*range(60)], [*range(12), *range(59, 11, -1)]):  # a run, then scattered blocks
        store = KVStore([shape], 60, 16, always_gather=True)
        moved = [[order[block] for block in table] for table in tables]
        generator = torch.Generator().manual_seed(1)
        for block in order:
            for pool in (store.keys[0], store.values[0]):
                pool[:, block] = torch.randn(2, 16, 8, generator=generator)
        work = plan.build(moved, kv, queries, window, block_size=16, min_saving=plan.NEVER_SHARE)
        outputs.append(torch_backend.attend(store, 0, query, work, scale=0.4))
    assert torch.equal(outputs[0], outputs[1])
