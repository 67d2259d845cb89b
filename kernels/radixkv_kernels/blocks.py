"""Write new KV to its slots and copy whole blocks: what a step does to the pool before attention reads it.

Knows tensors in any memory order of heads and blocks. Does not know who owns a block, nor what a layer is. Slots and
block ids are not checked: whoever calls has validated them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from radixkv_kernels.triton_kernels import copy_regions, write_slots

WORD = 4
"""Bytes that a copy moves at least at once."""

ENOUGH = 64 * 16
"""Bytes that a program moves at least, if there are so many: 16 for each thread of a warp, of which AMD's have 64."""

SPAN = 1024
"""Words that one program copies: eight 16-byte loads a thread at most, and enough programs for a single block."""


def write(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> None:
    """Store key [kv_heads, T, dk] and value [kv_heads, T, dv] in slots int64 [T] of one layer's pools.

    The pools are [kv_heads, blocks, block_size, dk or dv], in any order of memory that keeps a head's numbers of one
    token together. Slots are all different, but for -1, which is a row that is not stored. Two launches.
    """
    for new, pool in ((key, key_pool), (value, value_pool)):
        assert new.stride(2) == 1 and pool.stride(3) == 1
        heads, tokens, dim = new.shape
        if not tokens:
            continue
        each = triton.next_power_of_2(heads) * triton.next_power_of_2(dim) * new.itemsize
        at_once = max(1, ENOUGH // each)
        write_slots[(triton.cdiv(tokens, at_once),)](
            new,
            pool,
            slots,
            tokens,
            new.stride(0),
            new.stride(1),
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            HEADS=heads,
            HEADS_PADDED=triton.next_power_of_2(heads),
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            BLOCK_SIZE=pool.shape[2],
            TOKENS=at_once,
            num_warps=_warps(at_once * each),
        )


@dataclass(frozen=True, eq=False)
class Regions:
    """Where the blocks of many pools lie, for `copy`: runs of `words` words, each found by an address and a stride.

    A pool that keeps blocks outermost has one region, one that keeps heads outermost has a region for each head.
    """

    words: int
    alignment: int  # words that divide all of it: 4 for 16-byte loads
    addresses: Tensor  # int64 [regions]
    strides: Tensor  # int64 [regions]


def regions(pools: Sequence[Tensor]) -> list[Regions]:
    """The regions of pools [kv_heads, blocks, block_size, dim], those of one size together; made once per store.

    The pools must stay where they are. Raises ValueError for a block whose bytes are no multiple of four.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for pool in pools:
        heads, _, block_size, dim = pool.shape
        assert pool.stride(2) == dim and pool.stride(3) == 1, "a head's part of a block is one run"
        whole = heads == 1 or pool.stride(0) == block_size * dim
        size = block_size * dim * pool.itemsize * (heads if whole else 1)
        stride = pool.stride(1) * pool.itemsize
        starts = [pool.data_ptr() + head * pool.stride(0) * pool.itemsize for head in range(1 if whole else heads)]
        if size % WORD or stride % WORD or any(start % WORD for start in starts):
            raise ValueError(f"blocks of {size} bytes at a stride of {stride} are not made of whole words")
        found.setdefault(size // WORD, []).extend((start, stride // WORD) for start in starts)
    return [_regions(words, places, pools[0].device) for words, places in found.items()]


def _regions(words: int, places: list[tuple[int, int]], device: torch.device) -> Regions:
    """Regions of one size."""
    aligned = words % 4 == 0 and all(start % 16 == 0 and stride % 4 == 0 for start, stride in places)
    addresses, strides = torch.tensor(places, dtype=torch.int64).to(device).unbind(1)
    return Regions(words, 4 if aligned else 1, addresses.contiguous(), strides.contiguous())


def copy(places: Sequence[Regions], pairs: Tensor) -> None:
    """Copy whole blocks, `pairs` int64 [n, 2] of (source, destination), in every region; a pair of -1 does nothing.

    One launch for each size of block that a model's layers have: for most models one launch in all. Programs run in
    any order, so no block may be a source and a destination, and destinations are all different.
    """
    for place in places:
        if len(pairs):
            span = min(SPAN, triton.next_power_of_2(place.words))
            copy_regions[(len(pairs), len(place.addresses), triton.cdiv(place.words, span))](
                place.addresses,
                place.strides,
                pairs,
                WORDS=place.words,
                SPAN=span,
                ALIGNMENT=place.alignment,
                num_warps=_warps(WORD * span),
            )


def _warps(size: int) -> int:
    """Warps for a program that moves so many bytes."""
    return max(1, min(4, size // ENOUGH))
