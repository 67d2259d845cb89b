"""The kernels write and read pools in 16 and 8 bits as the store and the torch backend do, in the interpreter.

Free slots hold NaN or, in 8 bits, codes whose scale is NaN. Every address is checked.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from radixkv.attention import plan, torch_backend, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import attention, blocks, layers
from tests.attention.batches import BlocksFirst
from tests.kernels.interpreted.attending import CPU, SMALL
from tests.kernels.interpreted.bounds import checked

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""In 16 bits, weights of codes are rounded to bfloat16, and the interpreter cuts their bits off."""

FORMATS = [("int8", torch.float32), ("int8", torch.float16), ("int8", torch.bfloat16), ("float16", torch.float32)]
SIZES = [(64, 64), (80, 48), (128, 256), (192, 16)]
ROWS = torch.tensor([5, 0, -1, 17, 9, 2, 30, 11, 3])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def store_of(name: str, dtype: torch.dtype, shape: LayerShape, kind: type[KVStore] = BlocksFirst) -> KVStore:
    """Return a store of twelve blocks of 16 tokens, whose numbers, or scales, are all NaN."""
    store = kind([shape], 12, 16, dtype=dtype, kv_dtype=name)
    for each in store.tensors:
        each.fill_(math.nan if each.is_floating_point() else 77)
    return store


def distance(one: KVStore, other: KVStore) -> tuple[int, int]:
    """Return the largest difference of two codes, and how many codes or numbers differ."""
    pairs = [pair for pair in zip(one.tensors, other.tensors, strict=True) if pair[0].dtype == torch.int8]
    apart = [(a.int() - b.int()).abs() for a, b in pairs]
    for a, b in zip(one.tensors, other.tensors, strict=True):
        if a.dtype != torch.int8:  # a NaN of the model may be an infinite scale or NaN
            assert torch.equal(a.isfinite(), b.isfinite())
            assert torch.equal(a[a.isfinite()], b[b.isfinite()])
    return max((int(each.max()) for each in apart), default=0), sum(int(each.count_nonzero()) for each in apart)


@pytest.mark.parametrize("dims", SIZES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_attention_equals_torch_over_the_same_bytes(name: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """A shared prefix, decodes and a chunk; with softcap and sinks, and for heads of 80 a window."""
    kind = BlocksFirst if dims[0] % 128 else KVStore
    store = store_of(name, dtype, LayerShape(2, *dims), kind)
    tables, kv_lengths, query_lengths = [[1, 2, 3, 4, 5], [1, 2, 3, 7], [8], [9, 10]], [78, 50, 3, 32], [1, 1, 1, 20]
    used = {block: max(0, length - 16 * place) for table, length in zip(tables, kv_lengths, strict=True)
            for place, block in enumerate(table)}  # fmt: skip
    slots = torch.tensor([16 * block + i for block, length in used.items() for i in range(min(16, length))])
    store.write(0, slots, *(torch.randn(2, len(slots), dim) for dim in dims))
    query = torch.randn(23, 6, dims[0]).to(dtype).transpose(0, 1)
    options = {"scale": 0.2, "softcap": 3.0, "sinks": torch.randn(6)}
    own = store.format.attending(partial(torch_backend.attend, store))
    keys, values, scales = triton_backend.pools(store, 0)
    window = None if dims[0] % 80 else 20
    work = plan.build(tables, kv_lengths, query_lengths, window, block_size=16, min_saving=1)
    step = attention.plan(work, heads=6, kv_heads=2, chosen=SMALL, device=CPU, processors=3)
    with checked():
        found = attention.attend(query, keys, values, step, scales=scales, **options)  # type: ignore[arg-type]
    expected = own(0, query.float(), work, **options)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_small_weights_of_small_values_keep_their_bits_in_float16() -> None:
    """A weight of 5e-5 times a scale of 2e-3 is between the two smallest numbers of float16."""
    store = store_of("int8", torch.float16, LayerShape(1, 16, 16))
    key, value = torch.zeros(1, 190, 16), 0.05 + 0.01 * torch.rand(1, 190, 16)
    key[0, 0, 0], value[0, 0] = 10, 0
    store.write(0, torch.arange(190), key, value)
    work = plan.build([list(range(12))], [190], [1], block_size=16)
    query = torch.zeros(1, 1, 16, dtype=torch.float16)
    query[..., 0] = 1
    found = triton_backend.attend(store, 0, query, work, scale=1.0)
    expected = store.gather(0, list(range(12)), 190)[1].sum(1) / (math.exp(10) + 189)
    assert (found[0].float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize(("largest_query", "value"), [(6000.0, 1.0), (1.0, 6000.0)])
def test_rotated_numbers_fit_float16(largest_query: float, value: float) -> None:
    """A rotation makes one number of 68,000 of 128 numbers of 6,000."""
    store = store_of("int8", torch.float16, LayerShape(1, 128, 128))
    store.write(0, torch.arange(32), torch.randn(1, 32, 128), torch.full((1, 32, 128), value))
    query = torch.full((1, 1, 128), largest_query, dtype=torch.float16)
    work = plan.build([[0, 1]], [32], [1], block_size=16)
    expected = store.format.attending(partial(torch_backend.attend, store))(0, query.float(), work, scale=1e-5)
    found = triton_backend.attend(store, 0, query, work, scale=1e-5)
    assert expected.isfinite().all()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dims", SIZES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_writes_store_what_the_store_does(name: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    ours, theirs = (store_of(name, dtype, LayerShape(3, *dims)) for _ in range(2))
    key, value = (torch.randn(9, 3, dim).to(dtype).transpose(0, 1) for dim in dims)
    key[0, 4], key[1, 3, 5], value[2, 4, 1], value[0, 1, 3] = 0, math.nan, math.inf, 6e4
    if name == "float16":
        value[1, 3, 7], key[2, 0, 3] = 7e4, -7e4
    keys, values, scales = triton_backend.pools(ours, 0)
    with checked():
        blocks.write(key, value, keys, values, ROWS, scales)
    kept = ROWS >= 0
    theirs.write(0, ROWS[kept], key[:, kept], value[:, kept])
    if name == "float16":
        for mine, true in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(mine.isnan(), true.isnan())
    most, count = distance(ours, theirs)
    assert most <= 1 and count <= 3  # sums in another order move a number across a boundary
    assert not all(each.isfinite().all() for each in ours.gather(0, [0, 1], 18))


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
@pytest.mark.parametrize("dim", [16, 256])
def test_one_launch_rotates_and_stores(name: str, dtype: torch.dtype, dim: int) -> None:
    """The queries, and what is stored, are those of a pool as computed."""
    shape = LayerShape(2, dim, dim)
    plain = BlocksFirst([shape], 12, 16, dtype=dtype)
    ours, theirs = (store_of(name, dtype, shape) for _ in range(2))
    rows, (cosines, sines) = torch.randn(9, 8 * dim).to(dtype), torch.randn(2, 9, dim).to(dtype).unbind(0)
    weights = torch.randn(2, dim).to(dtype).unbind(0)
    rows[4, -1] = 6e4 if dtype == torch.float16 else 7e4

    def run(store: KVStore) -> Tensor:
        return layers.rotate_and_write(
            rows.clone(), 4, *triton_backend.pools(store, 0)[:2], ROWS, triton_backend.pools(store, 0)[2],
            cosines=cosines, sines=sines, query_weight=weights[0], key_weight=weights[1], epsilon=1e-6,
        )  # fmt: skip

    with checked():
        assert torch.equal(run(ours), run(plain))
    kept = ROWS[ROWS >= 0]
    theirs.write(0, kept, *(pool.flatten(1, 2)[:, kept] for pool in (plain.keys[0], plain.values[0])))
    most, count = distance(ours, theirs)
    assert most <= 1 and count <= 3
    assert triton_backend.rotates(ours)


def test_halves_of_other_heads_have_no_whole_groups() -> None:
    store = store_of("int8", torch.float32, LayerShape(2, 96, 96))
    assert not triton_backend.rotates(store)
    assert triton_backend.rotates(store_of("float16", torch.float32, LayerShape(2, 96, 96)))
    keys, values, scales = triton_backend.pools(store, 0)
    with pytest.raises(AssertionError):
        layers.rotate_and_write(torch.zeros(1, 6 * 96), 2, keys, values, torch.tensor([0]), scales)


def test_codes_and_scales_are_copied_together() -> None:
    store = BlocksFirst([LayerShape(2, 16, 32), LayerShape(1, 64, 16)], 6, 4, kv_dtype="int8")
    for layer, shape in enumerate(store.layers):
        new = [torch.randn(shape.kv_heads, 8, dim) for dim in (shape.key_dim, shape.value_dim)]
        triton_backend.write(store, layer, torch.arange(4, 12), *new)
    before = [each.clone() for each in store.tensors]
    triton_backend.copy(store, [(1, 5), (2, 0)])
    for old, new in zip(before, store.tensors, strict=True):
        assert torch.equal(new[:, [5, 0]], old[:, [1, 2]])
        assert torch.equal(new[:, 1:5], old[:, 1:5])
        assert bool(old[:, [1, 2]].any())


def test_a_layer_that_the_kernels_do_not_serve_is_rotated_by_torch() -> None:
    store = BlocksFirst([LayerShape(1, 512, 512)], 2, 16, kv_dtype="int8")
    store.write(0, torch.arange(20), torch.randn(1, 20, 512), torch.randn(1, 20, 512))
    query = torch.randn(2, 1, 512)
    work = plan.build([[0, 1]], [20], [1], block_size=16)
    key, value = store.gather(0, [0, 1], 20)
    weights = torch.softmax(query @ key.transpose(1, 2) * 0.1, -1)
    found = triton_backend.attend(store, 0, query, work, scale=0.1)
    torch.testing.assert_close(found, (weights @ value).transpose(0, 1), rtol=0, atol=1e-5)
