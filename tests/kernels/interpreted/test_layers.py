"""Compare the fused operators of a layer with the operators of torch, rounded as torch rounds, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from radixkv_kernels import layers

EXAMPLES = 6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One unit in the last place, relative: another order of a sum moves a number across a rounding boundary."""


def near(found: Tensor, expected: Tensor) -> bool:
    """Return whether numbers differ by at most two units in the last place."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = 2 * ULP[found.dtype]
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_norm_adds_the_residual_first_and_keeps_the_sum(data: st.DataObject) -> None:
    draw = data.draw
    rows, width = draw(st.integers(0, 4)), draw(st.sampled_from([1, 7, 64, 100, 576]))
    dtype, magnitude = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1e-2, 1.0, 30.0]))
    hidden, residual = (torch.randn(2, rows, width) * magnitude).to(dtype).unbind(0)
    weight, total = torch.randn(width).to(dtype), hidden + residual
    given_hidden, given_residual = hidden.clone(), residual.clone()
    found = layers.add_norm(given_hidden, weight, 1e-5, given_residual)
    assert torch.equal(given_hidden, total) and torch.equal(given_residual, residual)
    assert near(found, norm(total, weight, 1e-5))
    assert near(layers.add_norm(hidden, weight, 1e-5), norm(hidden, weight, 1e-5))
    assert torch.equal(hidden + residual, total)  # without a residual nothing is overwritten


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_an_activation_matches_torch(data: st.DataObject) -> None:
    draw = data.draw
    rows, width = draw(st.integers(0, 3)), draw(st.sampled_from([1, 48, 100, 1024, 1100]))
    dtype = draw(st.sampled_from(DTYPES))
    pairs = (torch.randn(rows, 2 * width) * draw(st.sampled_from([1e-2, 1.0, 30.0]))).to(dtype)
    assert near(layers.silu_multiply(pairs), functional.silu(pairs[:, :width]) * pairs[:, width:])


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate [T, heads, dim] as models do."""
    low, high = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat([-high, low], -1) * sines[:, None]


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_one_launch_rotates_queries_and_writes_keys_and_values(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 16, 64, 80, 96, 128, 256]))
    heads, block_size = kv_heads * draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 16]))
    dtype, normed, turns = draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.booleans())
    count = draw(st.integers(2, 4))
    used = draw(st.lists(st.integers(0, count * block_size - 1), unique=True, max_size=5))
    slots = torch.tensor(draw(st.permutations([*used, *[-1] * draw(st.integers(0, 2))])), dtype=torch.int64)
    tokens, every = len(slots), heads + 2 * kv_heads
    rows = torch.randn(tokens, every * dim).to(dtype)
    cosines, sines = torch.randn(2, tokens, dim).to(dtype).unbind(0)  # of both halves, which may differ
    weights = torch.randn(2, dim).to(dtype).unbind(0)
    order = draw(st.sampled_from(["heads first", "blocks first"]))
    shape = (kv_heads, count) if order == "heads first" else (count, kv_heads)
    pools = [torch.full((*shape, block_size, dim), torch.nan, dtype=dtype) for _ in range(2)]
    pools = [pool if order == "heads first" else pool.transpose(0, 1) for pool in pools]

    parts = list(rows.view(tokens, every, dim).split([heads, kv_heads, kv_heads], 1))
    if normed:
        parts[:2] = [norm(part, weight, 1e-6) for part, weight in zip(parts[:2], weights, strict=True)]
    if turns:
        parts[:2] = [rotated(part, cosines, sines) for part in parts[:2]]
    expected = [pool.clone() for pool in pools]
    for index, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for pool, part in zip(expected, parts[1:], strict=True):
                pool[:, slot // block_size, slot % block_size] = part[index]

    kept = rows[:, heads * dim :].clone()
    query = layers.rotate_and_write(
        rows, heads, *pools, slots,
        cosines=cosines if turns else None, sines=sines if turns else None,
        query_weight=weights[0] if normed else None, key_weight=weights[1] if normed else None, epsilon=1e-6,
    )  # fmt: skip
    assert query.data_ptr() == rows.data_ptr() or not tokens  # a view: nothing was copied
    equal = near if normed else torch.equal  # a rotation has no sum whose order could differ
    assert equal(query, parts[0].transpose(0, 1))
    assert all(near(pool, other) for pool, other in zip(pools, expected, strict=True))
    assert torch.equal(rows[:, heads * dim :], kept)


def test_slots_beyond_two_gigabytes_are_reached() -> None:
    """Pools of four gigabytes, of which only touched pages exist: 32-bit offsets would overflow."""
    count = (1 << 31) // (16 * 64) + 2
    pools = [torch.empty(count, 1, 16, 64, dtype=torch.float16).transpose(0, 1) for _ in range(2)]
    rows = torch.randn(1, 3 * 64).half()
    layers.rotate_and_write(rows, 1, *pools, torch.tensor([(count - 1) * 16 + 3]))
    assert all(torch.equal(pool[0, -1, 3], part) for pool, part in zip(pools, rows[0, 64:].split(64), strict=True))


@pytest.mark.parametrize("wrong", ["an odd head", "another dtype", "another width"])
def test_rows_of_another_shape_are_refused(wrong: str) -> None:
    dim, dtype = (15 if wrong == "an odd head" else 16), torch.int8 if wrong == "another dtype" else torch.float32
    rows = torch.randn(1, 3 * dim + (wrong == "another width"))
    pools = torch.zeros(2, 1, 1, 4, dim, dtype=dtype).unbind(0)
    with pytest.raises(AssertionError):
        layers.rotate_and_write(rows, 1, *pools, torch.tensor([0]))
