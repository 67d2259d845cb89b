"""Compiled attention of decodes and short chunks equals the reference, with the same bits alone and in a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.errors import InvalidInput
from radixkv.models import adapter, compiled_attention
from radixkv.models.compiled_attention import CompiledAttention
from radixkv.models.quantized import build, kernels
from tests.attention.batches import Batch, random_batch

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
FORMATS = ["auto", "float16", "int8"]
SHAPES = [LayerShape(1, 16, 16), LayerShape(2, 64, 64), LayerShape(3, 32, 80), LayerShape(2, 96, 48)]


def narrow(batch: Batch) -> Batch:
    """The same batch in float32; slots without numbers hold NaN."""
    store = batch.store
    same = KVStore(store.layers, store.num_blocks, store.block_size, kv_dtype=store.format.name)
    for ours, given_ in zip(same.tensors, store.tensors, strict=True):
        ours.copy_(given_)
    return dataclasses.replace(batch, store=same, query=batch.query.float())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    return random_batch(
        draw(st.integers(0, 10**9)),
        block_size=draw(st.sampled_from([1, 3, 16])),
        shape=draw(st.sampled_from(SHAPES)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        sequences=draw(st.integers(0, 7)),
        decode=draw(st.booleans()),
        adjacent=draw(st.booleans()),
        kv_dtype=draw(st.sampled_from(FORMATS)),
    )


def attend(
    batch: Batch, window: int | None = None, min_saving: int = 1, short_chunk: int = 1, **options: Any
) -> torch.Tensor:
    sizes = {"block_size": batch.store.block_size, "min_saving": min_saving, "short_chunk": short_chunk}
    work = plan.build(batch.tables, batch.kv_lengths, batch.query_lengths, window, **sizes)
    return CompiledAttention(batch.store).attend(0, batch.query, work, **options)


@given(
    batches(),
    st.sampled_from([None, None, 1, 7, 100]),
    st.sampled_from([None, None, 1.5]),
    st.booleans(),
    st.sampled_from([1, 16, plan.NEVER_SHARE]),
    st.sampled_from([1, compiled_attention.SHORT_CHUNK, 40]),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_reference(
    batch: Batch, window: int | None, softcap: float | None, with_sinks: bool, min_saving: int, short_chunk: int
) -> None:
    sinks = torch.randn(len(batch.query)) if with_sinks else None
    found = attend(narrow(batch), window, min_saving, short_chunk, scale=0.3, softcap=softcap, sinks=sinks)
    wide = None if sinks is None else sinks.double()
    expected = batch.expected_output(window=window, scale=0.3, softcap=softcap, sinks=wide)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def long_batch(lengths: list[int], shape: LayerShape = SHAPES[1], group: int = 3, kv_dtype: str = "auto") -> Batch:
    """Decodes of sequences with these lengths, in scattered blocks of 16."""
    blocks = [-(-length // 16) for length in lengths]
    draw = torch.Generator().manual_seed(5)
    ids = torch.randperm(sum(blocks), generator=draw).split(blocks)
    store = KVStore([shape], sum(blocks), 16, kv_dtype=kv_dtype)
    key, value = (torch.randn(shape.kv_heads, 16 * sum(blocks), dim, generator=draw) for dim in shape_dims(shape))
    store.write(0, torch.arange(16 * sum(blocks)), key, value)
    query = torch.randn(shape.kv_heads * group, len(lengths), shape.key_dim, generator=draw)
    return Batch(store, [each.tolist() for each in ids], lengths, [1] * len(lengths), query)


def shape_dims(shape: LayerShape) -> tuple[int, int]:
    return shape.key_dim, shape.value_dim


LENGTHS = [1, 511, 512, 513, 1500, 16]  # weights of 512 keys are computed at a time


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_long_contexts_equal_the_reference(kv_dtype: str) -> None:
    batch = long_batch(LENGTHS, kv_dtype=kv_dtype)
    store = KVStore(batch.store.layers, batch.store.num_blocks, 16, dtype=torch.float64, kv_dtype=kv_dtype)
    for ours, given_ in zip(store.tensors, batch.store.tensors, strict=True):
        ours.copy_(given_)
    wide = dataclasses.replace(batch, store=store, query=batch.query.double())
    found = attend(batch, scale=1.0)
    torch.testing.assert_close(found.double(), wide.expected_output(scale=1.0), rtol=0, atol=5e-6)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_threads(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = long_batch(LENGTHS, kv_dtype=kv_dtype)
    whole = attend(batch, scale=0.2)
    for row, (table, length) in enumerate(zip(batch.tables, batch.kv_lengths, strict=True)):
        alone = Batch(batch.store, [table], [length], [1], batch.query[:, row : row + 1])
        assert torch.equal(attend(alone, scale=0.2)[0], whole[row])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(torch.equal(attend(batch, scale=0.2), whole) for _ in range(5))


@pytest.mark.parametrize("rows", [2, 9, 16])
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_rows_of_short_chunks_have_the_bits_of_decodes(rows: int, window: int | None, kv_dtype: str) -> None:
    """Between them is a decode, and a chunk that is too long: torch computes it, and rotates all heads of int8 then."""
    lengths, queries = [16, 520, 1500, 700, 40], [rows, rows, 1, rows, 10 if kv_dtype == "int8" else 30]
    batch = long_batch(lengths, SHAPES[3], 7, kv_dtype)
    query = torch.randn(14, sum(queries), 96, generator=torch.Generator().manual_seed(2))
    whole = dataclasses.replace(batch, query_lengths=queries, query=query)
    found, row = attend(whole, window, plan.NEVER_SHARE, 16, scale=0.2, softcap=3.0), 0
    for table, length, count in zip(batch.tables, lengths, queries, strict=True):
        for end in range(length - count + 1, length + 1):
            alone = Batch(batch.store, [table], [end], [1], query[:, row : row + 1])
            decoded = attend(alone, window, scale=0.2, softcap=3.0)[0]
            if count <= 16:
                assert torch.equal(found[row], decoded)
            else:
                torch.testing.assert_close(found[row], decoded, rtol=0, atol=5e-6)
            row += 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_both_instruction_sets_give_the_same_bits(
    shape: LayerShape, softcap: float | None, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "avx512bw" not in build.cpu_features():
        pytest.skip("no AVX-512")
    library, found = kernels.kernels(), []
    for instructions in (1, 2):
        monkeypatch.setattr(library, "instructions", instructions)
        found.append(attend(long_batch(LENGTHS, shape, 7, kv_dtype), scale=0.2, softcap=softcap))
    assert torch.equal(*found)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_scores_far_apart_and_damaged_keys(kv_dtype: str) -> None:
    batch = long_batch([600, 600], kv_dtype=kv_dtype)
    assert attend(batch, scale=1e4).isfinite().all()
    stored = batch.store.key_parts[0].tensors[-1]  # of codes, the scales
    stored[:, batch.tables[0][36]] = torch.nan  # in the second piece of the first sequence
    damaged = attend(batch, scale=0.2)
    assert damaged[0].isnan().all() and damaged[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-40, 0.0])
def test_writes_match_the_store(kv_dtype: str, scale: float) -> None:
    shape = LayerShape(3, 32, 48)
    ours, own = (KVStore([shape, shape], 6, 4, kv_dtype=kv_dtype) for _ in range(2))
    slots = torch.tensor([17, 0, 9, 23])
    key, value = scale * torch.randn(4, 3, 32).transpose(0, 1), scale * torch.randn(3, 4, 96)[..., ::2]
    key[1, 2, 5], value[2, 0, 1], value[1, 3, 4], key[0, 1, 3] = torch.nan, torch.inf, -7e4, 65519
    CompiledAttention(ours).write(1, slots, key, value)
    own.write(1, slots, key, value)
    for mine, true in zip(ours.tensors, own.tensors, strict=True):
        if mine.dtype == torch.int8:  # a rotation adds in another order: a number between two codes may get the other
            assert (mine.int() - true.int()).abs().max() <= 1
            assert (mine == true).double().mean() > 0.99
        else:
            torch.testing.assert_close(mine, true, rtol=1e-3 if mine.shape[3] == 1 else 0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (LayerShape(1, 16, 16), torch.bfloat16, "not for bfloat16"),
        (LayerShape(1, 16, 24), torch.float32, "24 numbers"),
        (LayerShape(1, 528, 16), torch.float32, "528 numbers"),
    ],
)
def test_what_the_functions_cannot_serve(shape: LayerShape, dtype: torch.dtype, reason: str) -> None:
    assert reason in str(compiled_attention.obstacle([shape], dtype, torch.device("cpu")))


def test_without_a_compiler_attention_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "kernels", lambda: None)
    assert adapter.load("tiny", weights="int8").attention == "torch"
    with pytest.raises(InvalidInput, match="nothing is compiled on this machine"):
        adapter.load("/no/such/folder", attention="compiled")  # before anything is read
