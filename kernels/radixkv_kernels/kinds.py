"""Which kinds of tile suit which heads, and how each is compiled.

Knows head sizes, dtypes and generations of GPUs. Does not know tensors, launches or what the kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv_kernels import tiles as tiling


@dataclass(frozen=True)
class Kind:
    """One kind of tile, and how it is compiled: `rows` stacked query rows, `keys` an iteration."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int  # programs that a processor is given

    @property
    def shape(self) -> tiling.Shape:
        """What the tiling needs to know."""
        return tiling.Shape(self.rows, self.keys)


AMD = 0
"""What `kinds` takes for the generation of an AMD GPU: a processor has 64 KiB of shared memory, and wide warps."""


def kinds(key_dim: int, value_dim: int, dtype: torch.dtype, *, generation: int = 9) -> tuple[Kind, ...]:
    """The kinds of tile for heads of this size: for private tails, for some sharers, and for many and chunks.

    `generation` is the major number of a GPU's compute capability: from 9 on, products read their operands from shared
    memory, which leaves registers for larger tiles. Chosen among those that spill nothing and fit a processor as often
    as they say (`make kernels`), not yet by speed.
    """
    if torch.version.hip is not None:
        generation = AMD
    size = max(key_dim, value_dim)
    if dtype.itemsize > 2:
        return _float32(size, generation)
    if generation == AMD:
        return _amd(size)
    return _hopper(size, generation) if generation >= 9 else _ampere(size)


def _float32(size: int, generation: int) -> tuple[Kind, ...]:
    """Few numbers at a time: NVIDIA's GPUs multiply float32 without tensor cores, and keep it in registers."""
    if generation == AMD:
        return (Kind(16, 16, 8, 2, 1), Kind(32, 16, 8, 2, 1))
    return (Kind(16, 16, 8, 2, 1), Kind(32, 16, 8, 3, 1) if size <= 64 else Kind(32, 16, 16, 2, 1))


def _hopper(size: int, generation: int) -> tuple[Kind, ...]:
    """From 10 on, what is multiplied comes back from a memory of its own, which more warps or fewer keys leave room."""
    if size > 128:
        return (Kind(16, 32, 4, 3, 2), Kind(64, 32, 8, 2, 1), Kind(128, 32, 8, 2, 1))
    if generation >= 10:
        return (Kind(16, 64, 4, 3, 2), Kind(64, 64, 8, 2, 1), Kind(128, 32, 8, 3, 1))
    tails = Kind(16, 32, 4, 4, 2) if 80 < size < 128 else Kind(16, 64, 4, 3, 2)
    return (tails, Kind(64, 64, 4, 3, 2), Kind(128, 64, 8, 3, 1))


def _ampere(size: int) -> tuple[Kind, ...]:
    if size > 128:
        return (Kind(16, 64, 4, 2, 2), Kind(64, 32, 8, 2, 1))
    tails = Kind(16, 64, 4, 3, 2) if size <= 64 else Kind(16, 32, 4, 4, 2)
    return (tails, Kind(64, 32, 4, 3, 2), Kind(128, 32, 8, 3, 1))


def _amd(size: int) -> tuple[Kind, ...]:
    if size > 128:
        return (Kind(16, 32, 4, 2, 1), Kind(64, 32, 8, 2, 1))
    tails = Kind(16, 64, 4, 3, 2) if size <= 64 else Kind(16, 32, 4, 3, 2)
    return (tails, Kind(64, 32, 4, 3, 1), Kind(128, 32, 8, 3, 1))
