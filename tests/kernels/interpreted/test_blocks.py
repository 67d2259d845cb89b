"""Compare writes and copies with plain torch indexing, in both memory orders, in the interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixkv_kernels import blocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
orders = st.sampled_from(["heads first", "blocks first"])


def pool(order: str, heads: int, count: int, block_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return NaN [heads, count, block_size, dim] in the layout of a CPU or of a GPU."""
    shape = (heads, count) if order == "heads first" else (count, heads)
    tensor = torch.full((*shape, block_size, dim), torch.nan, dtype=dtype)
    return tensor if order == "heads first" else tensor.transpose(0, 1)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Compare bit by bit, NaN included."""
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_write_puts_each_row_in_its_slot_and_touches_nothing_else(data: st.DataObject) -> None:
    draw = data.draw
    heads, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dims = [draw(st.sampled_from([1, 5, 16, 80])) for _ in range(2)]
    block_size, dtype = draw(st.sampled_from([1, 3, 16, 32])), draw(st.sampled_from(DTYPES))
    slots = draw(st.lists(st.integers(0, count * block_size - 1), unique=True, max_size=6))
    padded = torch.tensor(draw(st.permutations([*slots, *[-1] * draw(st.integers(0, 2))])), dtype=torch.int64)
    order = draw(orders)
    pools = [pool(order, heads, count, block_size, dim, dtype) for dim in dims]
    expected = [each.clone() for each in pools]
    given_dtype = torch.float32 if dtype == torch.float16 else dtype  # a write casts to the dtype of the pool
    new = [torch.randn(len(padded), heads, dim).to(given_dtype).transpose(0, 1) for dim in dims]
    for rows, each in zip(new, expected, strict=True):
        for index, slot in enumerate(padded.tolist()):
            if slot >= 0:
                each[:, slot // block_size, slot % block_size] = rows[:, index]
    blocks.write(*new, *pools, padded)
    assert all(same(a, b) for a, b in zip(pools, expected, strict=True))


def test_write_stops_at_the_last_row_though_its_programs_take_several() -> None:
    """Rows of 256 bytes, four per program; memory after the last row would also be valid."""
    keys, values = torch.randn(2, 1, 12, 128).half().unbind(0)
    slots = torch.tensor([5, 0, -1, 17, 9, 2, 30, 11, 3, 20, 21, 22])
    pools = [pool("blocks first", 1, 2, 16, 128, torch.float16) for _ in range(2)]
    blocks.write(keys[:, :9], values[:, :9], *pools, slots[:9])
    for new, each in zip((keys, values), pools, strict=True):
        rows = [row for row, slot in enumerate(slots[:9].tolist()) if slot >= 0]
        there = each.reshape(32, 128)
        assert same(there[slots[rows]], new[0, rows])
        assert int(there.isnan().all(1).sum()) == 32 - len(rows)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_copy_does_what_indexing_does_for_all_layers(data: st.DataObject) -> None:
    draw = data.draw
    order, dtype, block_size = draw(orders), draw(st.sampled_from(DTYPES)), draw(st.sampled_from([2, 16]))
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2, 16, 80])), min_size=1, max_size=4))
    guarded = [pool(order, heads, 9, block_size, dim, dtype) for heads, dim in shapes]
    pools = [each[:, 1:] for each in guarded]  # block -1 is a guard
    for each in guarded:
        each.copy_(torch.randn(each.shape))
    expected = [each.clone() for each in guarded]
    rng = random.Random(draw(st.integers(0, 10**9)))
    ids = rng.sample(range(8), 8)
    cut = draw(st.integers(1, 7))
    pairs = [(rng.choice(ids[:cut]), destination) for destination in ids[cut:]] + [(0, -1)]
    for each in expected:
        for source, destination in pairs[:-1]:
            each[:, 1 + destination] = each[:, 1 + source].clone()
    places = blocks.regions(pools)
    blocks.copy(places, torch.tensor(pairs, dtype=torch.int64))
    assert all(same(a, b) for a, b in zip(guarded, expected, strict=True))
    assert order == "heads first" or len(places) == len({heads * dim for heads, dim in shapes})


def test_blocks_beyond_two_gigabytes_are_reached() -> None:
    """A pool of four gigabytes, of which only touched pages exist: 32-bit offsets would overflow."""
    count = (1 << 31) // (16 * 64) + 2
    memory = torch.zeros(0, dtype=torch.float16).new_empty(count, 1, 16, 64)  # not touched
    big = memory.transpose(0, 1)
    row = torch.randn(1, 1, 64).half()
    last = count - 1
    blocks.write(row, row, big, big, torch.tensor([last * 16 + 3]))
    assert same(big[:, last, 3], row[:, 0])
    big[:, 0] = torch.randn(16, 64).half()
    blocks.copy(blocks.regions([big]), torch.tensor([[0, last]]))
    assert same(big[:, last], big[:, 0])


def test_blocks_are_read_16_bytes_at_a_time_only_if_all_of_them_may_be() -> None:
    """A GPU traps on a read that is not aligned; the interpreter does not."""
    aligned, shifted = torch.zeros(1, 3, 2, 8), torch.zeros(1 + 3 * 2 * 8)[1:].view(1, 3, 2, 8)
    narrow = torch.zeros(1, 3, 1, 6)
    found = {name: [place.alignment for place in blocks.regions(pools)] for name, pools in {
        "aligned": [aligned], "an address": [aligned, shifted], "words": [narrow],
    }.items()}  # fmt: skip
    assert found == {"aligned": [4], "an address": [1], "words": [1]}


def test_blocks_that_are_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="whole words"):
        blocks.regions([torch.zeros(1, 4, 1, 1, dtype=torch.float16)])


def test_nothing_to_do_is_fine() -> None:
    pools = [torch.zeros(2, 3, 4, 8) for _ in range(2)]
    empty = torch.empty(2, 0, 8)
    blocks.write(empty, empty, *pools, torch.empty(0, dtype=torch.int64))
    blocks.copy(blocks.regions(pools), torch.empty(0, 2, dtype=torch.int64))
    assert not any(each.any() for each in pools)
