"""The formats in which a pool stores keys and values other than as computed: in 16 and in 8 bits.

Only a format interprets the stored tensors; all other code copies their bytes. int8 rotates each head by a Hadamard
matrix before it rounds, which spreads outliers over all numbers. Queries are rotated alike, and outputs back, so that
the products keep their values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Stored = Sequence[Tensor]
"""Keys or values as they are stored: numbers [..., dim], and in some formats scales [..., 1]."""

Attend = Callable[..., Tensor]
"""Attends over one layer of a store: layer, query [heads, T, dk], work and options -> [T, heads, dv]."""

PIECE = 1024
"""Keys of a run that are expanded at once; only a chunk over its own keys expands more, all of them."""

LARGEST_CODE = 127
LARGEST_ROTATION = 128
MEAN_STEPS = 4
"""Weight of the root mean square of a head's deviations: wrong KV has many small ones, rounding only few."""


class KVFormat(ABC):
    """Writes numbers to stored tensors, and reads them. Formats override what they do otherwise."""

    name: str  # a name of `KV_DTYPES`
    piece = PIECE
    largest = math.inf  # the largest number that stays finite

    def __init__(self, dtype: torch.dtype) -> None:
        """Serve a model of `dtype`; attention computes in float32 or better."""
        self.compute_dtype = torch.float32 if dtype.itemsize < 4 else dtype

    @abstractmethod
    def columns(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return width and dtype of each tensor that holds a head of `dim` numbers."""

    @abstractmethod
    def encode(self, new: Tensor) -> Stored:
        """Return [..., dim] as it is stored: a tensor for each of the `columns`."""

    def decode(self, stored: Stored) -> Tensor:
        """Return the numbers [..., dim] over which attention computes, in any order of the dims."""
        numbers, *scales = (each.to(self.compute_dtype) for each in stored)
        for scale in scales:
            numbers.mul_(scale)
        return numbers

    def restored(self, numbers: Tensor) -> Tensor:
        """Return numbers [..., dim] of `decode` as the model has them: without a rotation."""
        return numbers

    def attending(self, attend: Attend) -> Attend:
        """Return attention for the model's queries and outputs from `attend`, which computes with decoded numbers."""
        return attend

    def deviation(self, mine: Stored, true: Stored) -> Tensor:
        """Return the largest difference of each token [tokens] in [kv_heads, tokens, width]; 0 for equal numbers.

        It is in root mean squares of a head over all tokens.
        """
        wanted = true[0].double()
        scale = wanted.square().mean(dim=(1, 2), keepdim=True).sqrt()
        difference = (mine[0].double() - wanted).abs()
        relative = torch.where(difference > 0, difference / scale, difference)  # where all is zero, both are
        return relative.amax(dim=(0, 2))

    def weighed(self, tables: Stored, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
        """Sum the values in tables [rows, ...] by weights [n, kv_heads, group, width] -> [n, kv_heads, group, dim].

        `rows` has the row of each weight, in their order; `bags` are the places in `rows` where a sum begins.
        """
        size, kv_heads, group, width = weights.shape
        first = rows.view(weights.shape)[:, :, 0].reshape(-1)  # the heads of a group read the same rows
        values = self.decode([each.index_select(0, first) for each in tables])
        return (weights.flatten(0, 1) @ values.view(size * kv_heads, width, -1)).view(size, kv_heads, group, -1)


class Float16(KVFormat):
    """Stores 16 bits, of which attention in float32 or better loses nothing; larger numbers become NaN."""

    name = "float16"
    largest = torch.finfo(torch.float16).max

    def columns(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return one column."""
        return ((dim, torch.float16),)

    def encode(self, new: Tensor) -> Stored:
        """Round to the nearest number, of two to the even one."""
        kept = new.to(torch.float16)
        return (kept.masked_fill(kept.isinf(), math.nan),)  # an infinite key could get no weight, which nothing shows


class Int8(KVFormat):
    """Stores rotated heads as codes of 8 bits, and a scale in float16 for each token and head.

    The scale is the largest number divided by 127, rounded up, so that no code exceeds 127. A head with a NaN or an
    infinity has a scale that is none either, or infinite, and is read as NaN.
    """

    name = "int8"
    largest = torch.finfo(torch.float16).max * LARGEST_CODE / math.sqrt(LARGEST_ROTATION)

    def columns(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the column of codes and the column of scales."""
        return (dim, torch.int8), (1, torch.float16)

    def encode(self, new: Tensor) -> Stored:
        """Rotate, and round to the nearest step, of two to the even one."""
        rotated = self._rotated(new.to(self.compute_dtype))
        scale = rounded_up(rotated.abs().amax(-1, keepdim=True) / LARGEST_CODE)
        codes = (rotated / scale.to(rotated.dtype)).nan_to_num_(0.0, 0.0, 0.0).round_().to(torch.int8)
        return codes, scale

    def restored(self, numbers: Tensor) -> Tensor:
        """Rotate back."""
        return self._rotated(numbers)

    def attending(self, attend: Attend) -> Attend:
        """Rotate queries, and outputs back."""

        def rotating(layer: int, query: Tensor, work: Any, **options: Any) -> Tensor:
            output = attend(layer, self._rotated(query.to(self.compute_dtype)), work, **options)
            return self._rotated(output).to(query.dtype)

        return rotating

    def deviation(self, mine: Stored, true: Stored) -> Tensor:
        """Return it in steps of the true scale: the largest one, or some root mean squares of a token's head."""
        difference = (self.decode(mine).double() - self.decode(true).double()).abs()
        steps = torch.where(difference > 0, difference / true[1].double(), difference)
        return torch.maximum(steps.amax((0, 2)), MEAN_STEPS * steps.square().mean(2).sqrt().amax(0))

    def _rotated(self, numbers: Tensor) -> Tensor:
        """Multiply each head [..., dim] by its rotation, which is its own inverse."""
        size = rotation_of(numbers.shape[-1])
        matrix = _hadamard(size, numbers.dtype, numbers.device)
        return (numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // size, size) @ matrix).flatten(-2)


def rotation_of(dim: int) -> int:
    """Return the numbers that are rotated together: the largest power of two that divides `dim`, at most 128."""
    return min(dim & -dim, LARGEST_ROTATION)


@cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the normalised Hadamard matrix [size, size]; `size` is a power of two."""
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix / math.sqrt(size)).to(device=device, dtype=dtype)


def rounded_up(numbers: Tensor) -> Tensor:
    """Return the smallest float16 that is not below each of these numbers, which are at least 0."""
    nearest = numbers.to(torch.float16)
    below = nearest.to(numbers.dtype) < numbers
    return (nearest.view(torch.int16) + below).view(torch.float16)
