"""Launch the kernels that write new KV to its slots and copy whole blocks, in any memory order of heads and blocks.

Slots and block ids are not checked: callers have validated them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from radixkv_kernels.launches import Launcher
from radixkv_kernels.triton_kernels import copy_regions, write_slots

WORD = 4
"""Bytes that a copy moves at once, at least."""

ENOUGH = 64 * 16
"""Bytes that a program moves, unless there are fewer: 16 for each thread of a warp, which has up to 64 threads."""

SPAN = 1024
"""Words that one program copies: eight 16-byte loads a thread at most, and enough programs for a single block."""


WRITE_SLOTS = Launcher(write_slots)


def write(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, scales: Sequence[Tensor] = ()
) -> None:
    """Store key [kv_heads, T, dk] and value [kv_heads, T, dv] in slots int64 [T] of one layer's pools.

    The pools are [kv_heads, blocks, block_size, dk or dv], in any order of memory that keeps a head's numbers of one
    token together. With `scales`, as in `attention.attend`, heads are rotated and stored as codes. Slots are all
    different, except -1, which is a row that is not stored. Costs one launch.
    """
    assert key.stride(2) == value.stride(2) == key_pool.stride(3) == value_pool.stride(3) == 1
    (heads, tokens, key_dim), value_dim = key.shape, value.shape[2]
    if not tokens:
        return
    padded, at_once, warps = _write_shape(heads, key_dim, value_dim, key.dtype.itemsize)
    WRITE_SLOTS(
        -(-tokens // at_once),
        (key, value, key_pool, value_pool, *(scales or (key_pool, value_pool)), slots),
        (tokens,),
        (*key.stride()[:2], *value.stride()[:2], *key_pool.stride()[:3], *value_pool.stride()[:3]),
        {
            "HEADS": heads,
            "HEADS_PADDED": padded[0],
            "DK": key_dim,
            "DK_PADDED": padded[1],
            "DV": value_dim,
            "DV_PADDED": padded[2],
            "BLOCK_SIZE": key_pool.shape[2],
            "TOKENS": at_once,
            "SCALED": bool(scales),
        },
        num_warps=warps,
    )


@cache
def _write_shape(heads: int, key_dim: int, value_dim: int, itemsize: int) -> tuple[list[int], int, int]:
    """Return the powers of two from heads and dims on, and the tokens and the warps of a program that writes them."""
    padded = [triton.next_power_of_2(size) for size in (heads, key_dim, value_dim)]
    each = padded[0] * max(padded[1:]) * itemsize
    at_once = max(1, ENOUGH // each)
    return padded, at_once, _warps(at_once * each)


@dataclass(frozen=True, eq=False)
class Regions:
    """Addresses and strides of the blocks of many pools, for `copy`: each region's blocks are runs of `words` words.

    A pool with blocks outermost has one region, a pool with heads outermost has a region for each head.
    """

    words: int
    alignment: int  # words that divide all of it: 4 for 16-byte loads
    addresses: Tensor  # int64 [regions]
    strides: Tensor  # int64 [regions]


def regions(pools: Sequence[Tensor], upload: Callable[[NDArray[np.int64]], Tensor] | None = None) -> list[Regions]:
    """Return the regions of pools [kv_heads, blocks, block_size, dim], grouped by size; made once per store.

    The pools must keep their memory. `upload` copies numbers to their device; by default the host waits. Raises
    ValueError for a block whose bytes are not a multiple of four.
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
    made = []
    for words, places in found.items():
        aligned = words % 4 == 0 and all(start % 16 == 0 and stride % 4 == 0 for start, stride in places)
        numbers = np.array(places, dtype=np.int64).T.copy()
        there = torch.from_numpy(numbers).to(pools[0].device) if upload is None else upload(numbers)
        made.append(Regions(words, 4 if aligned else 1, *there.unbind(0)))
    return made


def copy(places: Sequence[Regions], pairs: Tensor) -> None:
    """Copy whole blocks, `pairs` int64 [n, 2] of (source, destination), in every region; a pair of -1 does nothing.

    Costs one launch for each size of block in a model's layers, which is one launch in most models. Programs run in any
    order, so a block must not be both a source and a destination, and destinations are all different.
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
    """Return the warps of a program that moves `size` bytes."""
    return max(1, min(4, size // ENOUGH))
