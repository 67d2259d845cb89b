"""The formats of the pool: rounding against exact arithmetic, sizes, and one list of tensors for all that copies."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import radixkv
from radixkv.attention import plan, torch_backend
from radixkv.attention.kv_formats import Int8, rotation_of
from radixkv.attention.kv_store import KVStore, LayerShape, kv_format
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import KV_DTYPES, LayerKV
from radixkv_kernels import reference
from tests.attention.batches import BlocksFirst, numbers

UNUSUAL = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 1e-6, 3.4e38, -3.4e38, 65504.0, 1.0, -127.0, 0.5]
HALVES = np.sort(np.arange(0x7C01, dtype=np.uint16).view(np.float16))  # all from 0 to infinity
NUMBERS = st.one_of(st.sampled_from(UNUSUAL), st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(st.sampled_from([1, 2, 16, 48]).flatmap(lambda dim: st.lists(NUMBERS, min_size=dim, max_size=dim)))
@settings(max_examples=300, deadline=None)
def test_int8_rounds_as_exact_arithmetic_does(numbers: list[float]) -> None:
    kept = Int8(torch.float32)
    given_ = torch.tensor(numbers, dtype=torch.float32)
    rotated = kept.restored(given_)  # a rotation is its own inverse
    codes, scale = kept.encode(given_)
    largest = float(rotated.abs().max())
    if not math.isfinite(largest):
        assert not math.isfinite(scale.item())
        return
    wanted = np.float32(largest) / np.float32(127)
    assert scale.item() == HALVES[np.searchsorted(HALVES, wanted)]
    if not 0.0 < scale.item() < math.inf:
        assert not codes.any()
        return
    for number, code in zip(rotated.tolist(), codes.tolist(), strict=True):
        exact = Fraction(number) / Fraction(scale.item())
        assert abs(code) <= 127
        assert abs(code - exact) <= Fraction(1, 2) + abs(exact) * Fraction(1, 1 << 22)
        if (2 * exact).denominator == 1 and exact.denominator != 1:
            assert code % 2 == 0, "of two nearest codes, the even one"


def test_the_smallest_scale_is_rounded_up_so_that_no_code_is_cut() -> None:
    given_ = torch.full((1, 1), 127 * 1.4 * 2.0**-24)  # between the two smallest scales
    codes, scale = Int8(torch.float32).encode(given_)
    assert (codes.item(), scale.item()) == (89, 2.0**-23)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["auto", "float16", "int8"])
def test_a_number_that_is_none_stays_visible(name: str, wrong: float) -> None:
    kept = kv_format(name, torch.float32)
    numbers = torch.ones(3, 16)
    numbers[1, 5] = wrong
    found = kept.decode(kept.encode(numbers))
    assert not found[1].isfinite().all()
    assert found[[0, 2]].isfinite().all()


def test_float16_beyond_its_range_is_nan_so_that_it_is_seen() -> None:
    kept = kv_format("float16", torch.float32)
    numbers = kept.decode(kept.encode(torch.tensor([-0.0, 65504.0, 65520.0, -7e4]))).tolist()
    assert numbers[:2] == [0, 65504.0] and all(math.isnan(each) for each in numbers[2:])
    assert kept.largest == 65504.0


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_a_key_that_overflows_shows_even_where_it_would_have_no_weight(name: str) -> None:
    store = KVStore([LayerShape(1, 16, 16)], 4, 16, kv_dtype=name)
    key, query = torch.randn(1, 64, 16), torch.randn(1, 1, 16)
    key[0, 5, 0], query[0, 0, 0] = 1e9, -1e-9
    store.write(0, torch.arange(64), key, torch.randn(1, 64, 16))
    work = plan.build([[0, 1, 2, 3]], [64], [1], None, block_size=16)
    attend = store.format.attending(partial(torch_backend.attend, store))
    assert attend(0, query, work, scale=1.0).isnan().any()


@pytest.mark.parametrize("dim", [1, 3, 16, 48, 64, 80, 192, 256])
def test_a_rotation_is_the_hadamard_matrix_per_part_of_a_head(dim: int) -> None:
    size = rotation_of(dim)
    assert dim % size == 0
    assert size == 128 or dim % (2 * size)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    whole = torch.block_diag(*[signs / math.sqrt(size)] * (dim // size)).double()
    given_ = torch.randn(4, dim, dtype=torch.float64)
    kept = Int8(torch.float64)
    torch.testing.assert_close(kept.restored(given_), given_ @ whole)
    torch.testing.assert_close(kept.restored(kept.restored(given_)), given_)


def test_an_outlier_costs_less_after_a_rotation() -> None:
    given_ = torch.randn(64, 64)
    given_[:, 7] = 50.0
    kept = Int8(torch.float32)
    found = kept.restored(kept.decode(kept.encode(given_)))
    assert (found - given_).abs().max() < 50.0 / 127 / 2  # half a step without one


@pytest.mark.parametrize(("change", "deviation"), [("one by 15", 15.0), ("all by 3", 12.0), ("scale by 2", None)])
def test_the_deviation_of_codes_is_the_largest_step_or_four_times_the_mean(
    change: str, deviation: float | None
) -> None:
    kept = Int8(torch.float32)
    codes, scale = kept.encode(torch.randn(2, 5, 64))
    mine = codes.clamp(-90, 90), scale.clone()
    true = mine[0].clone(), scale
    if change == "scale by 2":
        mine[1][1, 3] *= 2
        deviation = float(mine[0][1, 3].abs().max().maximum(4 * mine[0][1, 3].double().square().mean().sqrt()))
    else:
        mine[0][1, 3, slice(7, 8) if change == "one by 15" else slice(None)] += int(change.split()[-1])
    assert kept.deviation(mine, true).tolist() == pytest.approx([0, 0, 0, deviation, 0])


# ---- the store


@pytest.mark.parametrize("kind", [KVStore, BlocksFirst])
@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_counted_to_the_byte(kind: type[KVStore], name: str, dtype: torch.dtype) -> None:
    shapes = [(2, 64, 64), (1, 16, 48), (3, 80, 128)]
    if (name, dtype) == ("float16", torch.bfloat16):
        with pytest.raises(InvalidInput, match="the model computes in bfloat16"):
            kind([], 4, dtype=dtype, kv_dtype=name)
        return
    store = kind([LayerShape(*shape) for shape in shapes], 4, 16, dtype=dtype, kv_dtype=name)
    counted = sum(LayerKV(*shape).bytes_per_token(dtype.itemsize, name) for shape in shapes)
    assert store.bytes_per_block == 16 * counted
    assert store.nbytes == sum(each.nbytes for each in store.tensors)
    assert sum(each.untyped_storage().nbytes() for each in store.tensors) == store.nbytes, "no padding"


def test_an_unknown_format_lists_the_others() -> None:
    with pytest.raises(InvalidInput, match="kv_dtype='fp8': allowed are 'auto', 'float16', 'int8'"):
        KVStore([], 1, kv_dtype="fp8")


@pytest.mark.parametrize("kind", [KVStore, BlocksFirst])
@pytest.mark.parametrize("name", ["float16", "int8"])
def test_a_copied_block_reads_as_its_source(kind: type[KVStore], name: str) -> None:
    store = kind([LayerShape(2, 16, 32), LayerShape(1, 64, 16)], 6, 4, kv_dtype=name)
    for layer, shape in enumerate(store.layers):
        new = (torch.randn(shape.kv_heads, 8, dim) for dim in (shape.key_dim, shape.value_dim))
        store.write(layer, torch.arange(4, 12), *new)
    before = [store.gather(layer, [1, 2], 8) for layer in range(2)]
    store.copy([(1, 5), (2, 0)])
    for layer, found in enumerate(before):
        for old, new in zip(found, store.gather(layer, [5, 0], 8), strict=True):
            assert torch.equal(old, new)
            assert old.any()


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator of torch makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = (each for each in (found if isinstance(found, tuple | list) else [found]) if isinstance(each, Tensor))
        self.nbytes = max([self.nbytes, *(each.nbytes for each in made if not each._is_view())])
        return found


@pytest.mark.parametrize("order", [1, -1], ids=["adjacent", "scattered"])
@pytest.mark.parametrize("rows", [[1], [512], [1, 1]], ids=["decode", "chunk", "shared"])
@pytest.mark.parametrize("name", ["float16", "int8"])
def test_no_tensor_is_as_large_as_the_context_in_float32(name: str, rows: list[int], order: int) -> None:
    length = 16_384
    store = KVStore([LayerShape(2, 64, 64)], length // 16, 16, kv_dtype=name)
    attend = store.format.attending(partial(torch_backend.attend, store))
    table = list(range(length // 16))[::order]
    work = plan.build([table for _ in rows], [length for _ in rows], rows, None, block_size=16)
    with Largest() as seen:
        attend(0, torch.randn(4, sum(rows), 64), work, scale=0.1)
    assert 0 < seen.nbytes < 2 * length * 64 * 4 / 4


@pytest.mark.parametrize("kind", [KVStore, BlocksFirst])
@pytest.mark.parametrize("name", ["float16", "int8"])
def test_pieces_of_a_run_are_merged(kind: type[KVStore], name: str) -> None:
    """A window hides the first pieces from late rows of a chunk, and single rows have long tails of their own."""
    torch.manual_seed(0)
    store = kind([LayerShape(2, 16, 16)], 50, 16, kv_dtype=name)
    store.format.piece = 32
    store.write(0, torch.arange(800), *torch.randn(2, 2, 800, 16))
    tables = [[*range(15)], [*range(15, 40)], [*range(49, 40, -1)]]
    lengths = [230, 400, 140], [200, 1, 1]
    query = torch.randn(4, 202, 16)
    for window in (40, None):
        work = plan.build(tables, *lengths, window, block_size=16)
        found = store.format.attending(partial(torch_backend.attend, store))(0, query, work, scale=0.3)
        expected = reference.attend(query, *numbers(store), tables, *lengths, scale=0.3, window=window)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


SOURCES = Path(radixkv.__file__).parent


def test_nothing_else_lists_the_tensors_of_a_pool() -> None:
    """What copies blocks walks `KVStore.tensors`: a list of its own would miss scales."""
    kernels = SOURCES.parent / "kernels"
    sources = [*SOURCES.rglob("*.py"), *kernels.rglob("*.py")]
    listed = re.compile(r"(\*|in |\()\s*\w*\.?_?(store|images)\.(keys|values|key_parts|value_parts)\b(?!\[)")
    found = {path.name: listed.findall(path.read_text()) for path in sources}
    own = {"compiled_attention.py"}  # which hands the addresses of all tensors of a part to compiled functions
    assert {name for name, lines in found.items() if lines} <= own
