"""Fused operators of a Llama layer: residual sum with RMS norm, rotation with the KV write, and SiLU with its product.

Every function costs one launch. Numbers are rounded to their dtype after each operator, as torch rounds them, so that a
fused layer equals the layer as written up to the order of a sum. The kernels read nothing back and need no memory
except for their results, so a CUDA graph can record them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803  (compile-time arguments are upper case, as in every Triton kernel)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv_kernels.launches import Launcher
from radixkv_kernels.triton_kernels import encoded, kept

INTERPRETED: bool = triton.knobs.runtime.interpret

WIDEST = 1 << 15
"""Numbers of a row that one program normalises, at most."""

HALVES = 512
"""Numbers of each half of heads that one program rotates."""

COLUMNS = 1024
"""Columns that one program of `silu_multiply` computes."""


@triton.jit
def _rounded(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """Return float32 `x` rounded to `dtype`, as float32."""
    if EXACT:  # the interpreter cuts numbers off to bfloat16; a GPU rounds to the nearest, and ties to even
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def add_norm_rows(
    hidden,  # [T, WIDTH], overwritten by the sum if ADDS
    residual,  # [T, WIDTH], if ADDS
    weight,  # [WIDTH]
    output,  # [T, WIDTH]
    epsilon,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add the residual to one row, and normalise the sum by its root mean square."""
    dtype: tl.constexpr = hidden.dtype.element_ty
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    numbers = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        numbers = _rounded(numbers + added, dtype, EXACT)
        tl.store(hidden + place, numbers.to(dtype), mask=inside)
    variance = tl.sum(numbers * numbers, 0) / WIDTH
    scaled = _rounded(numbers * tl.rsqrt(variance + epsilon), dtype, EXACT)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, _rounded(scaled * factors, dtype, EXACT).to(dtype), mask=inside)


ADD_NORM_ROWS = Launcher(add_norm_rows)


def add_norm(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """Normalise rows [T, width] by their root mean square and scale them by weight [width]; returns a new tensor.

    With a residual [T, width], `hidden` becomes the sum of both, which is normalised: the next residual. All are
    contiguous and have one dtype.
    """
    rows, width = hidden.shape
    assert hidden.is_contiguous() and weight.dtype == hidden.dtype
    assert residual is None or (residual.is_contiguous() and residual.dtype == hidden.dtype)
    output = torch.empty_like(hidden)
    padded = _power_of_2(width)
    if rows:
        ADD_NORM_ROWS(
            rows,
            (hidden, hidden if residual is None else residual, weight, output),
            (),
            (epsilon,),
            {"WIDTH": width, "WIDTH_PADDED": padded, "ADDS": residual is not None, "EXACT": _cuts(hidden.dtype)},
            num_warps=max(1, min(16, padded // 512)),
        )
    return output


@triton.jit
def _normed(low, high, low_factors, high_factors, epsilon, DIM: tl.constexpr, dtype: tl.constexpr, EXACT: tl.constexpr):
    """Normalise heads, given as two halves, by their root mean squares."""
    variance = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
    scale = tl.rsqrt(variance + epsilon)[:, None]
    low, high = _rounded(low * scale, dtype, EXACT), _rounded(high * scale, dtype, EXACT)
    return _rounded(low * low_factors, dtype, EXACT), _rounded(high * high_factors, dtype, EXACT)


@triton.jit(do_not_specialize=["tokens"])
def rotate_and_write_rows(
    rows,  # [T, (HEADS + 2 * KV_HEADS) * DIM] queries, keys and values of a token; queries are overwritten
    cosines,  # [T, DIM], if ROTATED
    sines,
    query_weight,  # [DIM], if NORMED
    key_weight,
    key_pool,  # [KV_HEADS, blocks, BLOCK_SIZE, DIM], any strides but of the last
    value_pool,
    key_scales,  # [KV_HEADS, blocks, BLOCK_SIZE, 1], if SCALED: the pools hold codes of heads rotated once more
    value_scales,
    slots,  # int64 [T], -1: a padded row
    tokens,  # T
    epsilon,
    row_stride,
    angle_stride,
    key_head,
    key_block,
    key_token,
    value_head,
    value_block,
    value_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,  # heads of one program
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Normalise and rotate some heads of queries and keys; write keys and values to their slots.

    A program takes whole heads, so queries can be overwritten. Each number is rotated with its partner in the other
    half of the head.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    half: tl.constexpr = DIM // 2
    every: tl.constexpr = HEADS + 2 * KV_HEADS
    item = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    token, head = item // every, item % every
    there = token < tokens
    is_query = there & (head < HEADS)
    is_value = there & (head >= HEADS + KV_HEADS)
    column = tl.arange(0, HALF_PADDED)[None, :]
    narrow = column < half
    inside = there[:, None] & narrow
    place = rows + (token * row_stride + head * DIM)[:, None] + column
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    value_low, value_high = low, high
    turned = inside & (head < HEADS + KV_HEADS)[:, None]
    if NORMED:
        asked, keyed = turned & is_query[:, None], turned & (head >= HEADS)[:, None]
        query_low = tl.load(query_weight + column, mask=asked, other=0.0)
        query_high = tl.load(query_weight + half + column, mask=asked, other=0.0)
        key_low = tl.load(key_weight + column, mask=keyed, other=0.0)
        key_high = tl.load(key_weight + half + column, mask=keyed, other=0.0)
        low_factors = query_low.to(tl.float32) + key_low.to(tl.float32)
        high_factors = query_high.to(tl.float32) + key_high.to(tl.float32)
        low, high = _normed(low, high, low_factors, high_factors, epsilon, DIM, dtype, EXACT)
    if ROTATED:
        angle = (token * angle_stride)[:, None] + column
        cosine = tl.load(cosines + angle, mask=turned, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=turned, other=0.0).to(tl.float32)
        turned_low = _rounded(low * cosine, dtype, EXACT) - _rounded(high * sine, dtype, EXACT)
        cosine = tl.load(cosines + half + angle, mask=turned, other=0.0).to(tl.float32)
        sine = tl.load(sines + half + angle, mask=turned, other=0.0).to(tl.float32)
        turned_high = _rounded(high * cosine, dtype, EXACT) + _rounded(low * sine, dtype, EXACT)
        low, high = _rounded(turned_low, dtype, EXACT), _rounded(turned_high, dtype, EXACT)
    if ROTATED or NORMED:
        tl.store(place, low.to(dtype), mask=inside & is_query[:, None])
        tl.store(place + half, high.to(dtype), mask=inside & is_query[:, None])

    slot = tl.load(slots + token, mask=there, other=-1)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    is_key = there & (head >= HEADS) & (head < HEADS + KV_HEADS) & (slot >= 0)
    key_start = block * key_block + offset * key_token + (head - HEADS) * key_head
    value_start = block * value_block + offset * value_token + (head - HEADS - KV_HEADS) * value_head
    is_value &= slot >= 0
    if SCALED:
        low = tl.where(is_value[:, None], value_low, low)
        high = tl.where(is_value[:, None], value_high, high)
        heads = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [AT_ONCE, DIM])
        codes, scales = encoded(heads, DIM)
        tl.store(key_scales + key_start // DIM, scales, mask=is_key)
        tl.store(value_scales + value_start // DIM, scales, mask=is_value)
        whole = tl.arange(0, DIM)[None, :]
        tl.store(key_pool + key_start[:, None] + whole, codes, mask=is_key[:, None])
        tl.store(value_pool + value_start[:, None] + whole, codes, mask=is_value[:, None])
    else:
        stored: tl.constexpr = key_pool.dtype.element_ty
        target = key_pool + key_start[:, None] + column
        tl.store(target, kept(low, dtype, stored), mask=is_key[:, None] & narrow)
        tl.store(target + half, kept(high, dtype, stored), mask=is_key[:, None] & narrow)
        target = value_pool + value_start[:, None] + column
        tl.store(target, kept(value_low, dtype, stored), mask=is_value[:, None] & narrow)
        tl.store(target + half, kept(value_high, dtype, stored), mask=is_value[:, None] & narrow)


ROTATE_AND_WRITE_ROWS = Launcher(rotate_and_write_rows)


def rotate_and_write(
    rows: Tensor,
    heads: int,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    scales: Sequence[Tensor] = (),
    *,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to slots; return the queries [heads, T, dim].

    `rows` [T, (heads + 2 * kv_heads) * dim] hold the heads of queries, keys and values of each token. The result is a
    view of its queries, which are overwritten. Cosines and sines [T, dim] rotate halves of heads; without, nothing is
    rotated. The weights [dim] scale normalised heads; without, no head is normalised. The pools are
    [kv_heads, blocks, block_size, dim] in any order of memory that keeps a head's numbers of one token together. With
    `scales`, as in `attention.attend`, they are stored as codes, and `dim` is a power of two. Slots int64 [T] are all
    different, except for -1, a row that is not stored.
    """
    kv_heads, _, block_size, dim = key_pool.shape
    tokens, every = len(rows), heads + 2 * kv_heads
    assert rows.shape[1] == every * dim and dim % 2 == 0 and rows.stride(1) == 1
    assert key_pool.shape == value_pool.shape and key_pool.stride(3) == value_pool.stride(3) == 1
    assert key_pool.dtype == value_pool.dtype and (key_pool.dtype == torch.int8) == bool(scales)
    assert not scales or dim.bit_count() == 1
    if cosines is not None:
        assert sines is not None and cosines.shape == sines.shape == (tokens, dim) and cosines.dtype == rows.dtype
        assert cosines.stride() == sines.stride() and cosines.stride(1) == 1
    half = _power_of_2(dim // 2)
    at_once = max(1, HALVES // half)
    if tokens:
        optional = [rows if each is None else each for each in (cosines, sines, query_weight, key_weight)]
        ROTATE_AND_WRITE_ROWS(
            -(-tokens * every // at_once),
            (rows, *optional, key_pool, value_pool, *(scales or (key_pool, value_pool)), slots),
            (tokens,),
            (
                epsilon,
                rows.stride(0),
                0 if cosines is None else cosines.stride(0),
                *key_pool.stride()[:3],
                *value_pool.stride()[:3],
            ),
            {
                "HEADS": heads,
                "KV_HEADS": kv_heads,
                "DIM": dim,
                "HALF_PADDED": half,
                "BLOCK_SIZE": block_size,
                "AT_ONCE": at_once,
                "ROTATED": cosines is not None,
                "NORMED": query_weight is not None,
                "SCALED": bool(scales),
                "EXACT": _cuts(rows.dtype),
            },
            num_warps=2,
        )
    return rows[:, : heads * dim].view(tokens, heads, dim).transpose(0, 1)


@triton.jit
def silu_multiply_rows(
    pairs,  # [T, 2 * WIDTH] gates, then factors
    output,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Multiply some factors of one row by the SiLU of their gates."""
    dtype: tl.constexpr = pairs.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    place = pairs + row * (2 * WIDTH) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    opened = _rounded(gate / (1.0 + tl.exp(-gate)), dtype, EXACT)
    tl.store(output + row * WIDTH + column, _rounded(opened * factor, dtype, EXACT).to(dtype), mask=inside)


SILU_MULTIPLY_ROWS = Launcher(silu_multiply_rows)


def silu_multiply(pairs: Tensor) -> Tensor:
    """Return silu(gates) * factors [T, width] of contiguous rows [T, 2 * width] that hold both."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    assert pairs.is_contiguous() and pairs.shape[1] == 2 * width
    output = pairs.new_empty(rows, width)
    columns = min(COLUMNS, _power_of_2(width))
    if rows:
        SILU_MULTIPLY_ROWS(
            rows,
            (pairs, output),
            (),
            (),
            {"WIDTH": width, "COLUMNS": columns, "EXACT": _cuts(pairs.dtype)},
            spans=-(-width // columns),
            num_warps=max(1, min(4, columns // 256)),
        )
    return output


def _power_of_2(number: int) -> int:
    """Return the smallest power of two from `number` on; Triton's own function takes 5 us."""
    return 1 << (number - 1).bit_length()


def _cuts(dtype: torch.dtype) -> bool:
    """Return whether conversions to this dtype do not round: to bfloat16 in the interpreter."""
    return INTERPRETED and dtype == torch.bfloat16
