"""Triton kernels that move KV: new tokens into their slots, whole blocks to other blocks.

Knows strides, slots and block ids. Does not know how they are launched (`blocks`), nor attention.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803  (compile-time arguments are upper case, as in every Triton kernel)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def write_slots(
    new,  # [kv_heads, T, dim], any strides of heads and tokens
    pool,  # [kv_heads, blocks, block_size, dim], any strides but of dim
    slots,  # int64 [T], -1: a padded row
    tokens,  # T
    new_head,
    new_token,
    pool_head,
    pool_block,
    pool_token,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of one program
):
    """A few tokens a program: all heads of their keys, or of their values, to their slots."""
    row = tl.arange(0, TOKENS * HEADS_PADDED)[:, None]
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS_PADDED
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    head = (row % HEADS_PADDED).to(tl.int64)
    column = tl.arange(0, DIM_PADDED)[None, :]
    inside = (slot >= 0) & (head < HEADS) & (column < DIM)
    numbers = tl.load(new + token * new_token + head * new_head + column, mask=inside)
    place = (slot // BLOCK_SIZE) * pool_block + (slot % BLOCK_SIZE) * pool_token + head * pool_head + column
    tl.store(pool + place, numbers.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def copy_regions(
    addresses,  # int64 [regions] where block 0 of each region starts
    strides,  # int64 [regions] words from one block of a region to the next
    pairs,  # int64 [pairs, 2] source and destination block; -1: a padded pair
    WORDS: tl.constexpr,  # int32 words that a block has in each region
    SPAN: tl.constexpr,  # words that one program copies
    ALIGNMENT: tl.constexpr,  # words that divide WORDS, every stride and every address
):
    """Program (pair, region, span): some words of one block, from the source to the destination."""
    source = tl.load(pairs + 2 * tl.program_id(0))
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1)
    if destination >= 0:
        region = tl.program_id(1)
        start = tl.load(addresses + region).to(tl.pointer_type(tl.int32))
        start = tl.multiple_of(start, 4 * ALIGNMENT)
        stride = tl.multiple_of(tl.load(strides + region), ALIGNMENT)
        word = tl.program_id(2) * SPAN + tl.arange(0, SPAN)
        words = tl.load(start + source * stride + word, mask=word < WORDS)
        tl.store(start + destination * stride + word, words, mask=word < WORDS)
