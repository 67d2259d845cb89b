"""The pool's tensors, addressed by block and slot: K and V of each layer, in one of the `kv_formats`.

A stored part, keys or values of a layer, is one tensor or several: in 8 bits, codes and scales. `tensors` lists all of
them. Whatever copies a block copies it in each of them, so that codes and scales move as one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from radixkv.attention.kv_formats import Float16, Int8, KVFormat, Stored
from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import check_kv_dtype


@dataclass(frozen=True)
class LayerShape:
    """The KV that one layer stores per token: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        """Refuse empty dims."""
        if min(self.kv_heads, self.key_dim, self.value_dim) < 1:
            raise InvalidInput(f"every dim of a layer must be at least 1, not {self}")


class Part(NamedTuple):
    """The stored keys, or values, of one layer: its tensors, and views of each.

    In 8 bits, the tensors are codes and scales. `tables` are plain tables [rows, width] in the order of memory, and
    `regions` the same with a row for each head of a block. `slots` are [kv_heads, slots, width]; empty if blocks are
    outermost.
    """

    tensors: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    regions: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]


class AsComputed(KVFormat):
    """The default format: numbers in the dtype of the model."""

    name = "auto"
    piece = 1 << 62  # no copy is made, unless the model computes in 16 bits

    def __init__(self, dtype: torch.dtype) -> None:
        """Store `dtype`; attention computes in float32 or better."""
        super().__init__(dtype)
        self.dtype = dtype
        if dtype == self.compute_dtype:
            self.decode = itemgetter(0)  # type: ignore[assignment, method-assign]  # attention reads it in place

    def columns(self, dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return one column of the dtype."""
        return ((dim, self.dtype),)

    def encode(self, new: Tensor) -> Stored:
        """Cast."""
        return (new.to(self.dtype),)

    def weighed(self, tables: Stored, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
        """Sum by an embedding bag, in less time than a product takes over contiguous values."""
        flat = weights.view(-1).to(self.dtype)
        output = functional.embedding_bag(rows, tables[0], bags, mode="sum", per_sample_weights=flat)
        return output.view(*weights.shape[:3], -1).to(self.compute_dtype)


_FORMATS: dict[str, Callable[[torch.dtype], KVFormat]] = {"auto": AsComputed, "float16": Float16, "int8": Int8}


def kv_format(name: str, dtype: torch.dtype) -> KVFormat:
    """Return the format `name` for a model that computes in `dtype`.

    Raises InvalidInput for an unknown name, and for float16 if the model computes in 16 bits.
    """
    check_kv_dtype(name, str(dtype).removeprefix("torch."))
    return _FORMATS[name](dtype)


class KVStore:
    """KV of `num_blocks` blocks of `block_size` tokens for every layer; allocated at once, zeroed lazily by the system.

    Every tensor has the shape [kv_heads, blocks, block_size, width]. On a CPU this is also the order in memory, so that
    adjacent blocks are one run per head. On a GPU blocks are outermost, so that a block is one region. Slot `s` is
    token `s % block_size` of block `s // block_size`. Callers validate block ids and slots; they are not checked here.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int = 16,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        always_gather: bool = False,
        blocks_first: bool | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        """Allocate; raises InvalidInput for no blocks, no slots, or a dtype that is not floating point.

        `dtype` is the model's, and `kv_dtype` the name of the format. A model without attention has no layers, and its
        blocks take no bytes.
        With `always_gather`, keys are never read in place, so that block ids do not change the bits of a result.
        `blocks_first` sets the order in memory, by default the device's order.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidInput(f"a store needs a block and a slot, not {num_blocks}, {block_size}")
        if not dtype.is_floating_point:
            raise InvalidInput(f"KV is stored in a floating point dtype, not in {dtype}")
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.constant = device_of(self.device).constant  # puts indices or a mask on the device of the pool
        self.dtype = dtype
        self.format: KVFormat = kv_format(kv_dtype, dtype)
        self.compute_dtype = self.format.compute_dtype  # attention computes in this
        self.num_rows = num_blocks * block_size * max((each.kv_heads for each in layers), default=1)  # of a table
        self.runs_are_views = self.device.type == "cpu" if blocks_first is None else not blocks_first
        self.reads_in_place = self.runs_are_views and not always_gather
        self.key_parts = [self._part(layer.kv_heads, layer.key_dim) for layer in layers]
        self.value_parts = [self._part(layer.kv_heads, layer.value_dim) for layer in layers]
        self.keys, self.values = ([part.tensors[0] for part in parts] for parts in (self.key_parts, self.value_parts))
        self.tensors = tuple(chain.from_iterable(part.tensors for part in (*self.key_parts, *self.value_parts)))
        self._workspaces: dict[tuple[int, int], Tensor] = {}

    def _part(self, kv_heads: int, dim: int) -> Part:
        """Return zeros for heads of `dim` numbers."""
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
            tensors = tuple(self._allocate(kv_heads, width, dtype) for width, dtype in self.format.columns(dim))
        stored = [pool if self.runs_are_views else pool.transpose(0, 1) for pool in tensors]
        return Part(
            tensors,
            tuple(pool.view(-1, pool.shape[3]) for pool in stored),
            tuple(pool.view(-1, self.block_size * pool.shape[3]) for pool in stored),
            tuple(pool.view(kv_heads, -1, pool.shape[3]) for pool in stored) if self.runs_are_views else (),
        )

    def _allocate(self, kv_heads: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return zeros of shape [kv_heads, blocks, block_size, width]."""
        if self.runs_are_views:
            # A page is mapped when first written: torch's zeros touch all pages, and numpy's ask for pages of 2 MB.
            shape = (kv_heads, self.num_blocks, self.block_size, width)
            nbytes = math.prod(shape) * dtype.itemsize
            try:
                pages = mmap(-1, nbytes, MAP_PRIVATE | MAP_ANONYMOUS)
            except (OSError, OverflowError) as error:
                raise MemoryError(f"{nbytes:,} bytes of KV do not fit into memory") from error
            return torch.frombuffer(pages, dtype=dtype).view(shape)
        blocks_first = torch.zeros(self.num_blocks, kv_heads, self.block_size, width, dtype=dtype, device=self.device)
        return blocks_first.transpose(0, 1)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers, K and V, in all tensors."""
        return sum(each.nbytes for each in self.tensors) // self.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] in slots int64 [T], all different."""
        for part, numbers in ((self.key_parts[layer], key), (self.value_parts[layer], value)):
            stored = self.format.encode(numbers)
            if self.runs_are_views:
                for pool, new in zip(part.slots, stored, strict=True):
                    pool.index_copy_(1, slots, new)
            else:
                for pool, new in zip(part.tensors, stored, strict=True):
                    pool[:, slots // self.block_size, slots % self.block_size] = new

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers; all sources are read before a destination is written.

        Destinations are all different. Costs two launches per tensor, for any number of pairs.
        """
        if not pairs:
            return
        sources, destinations = self.constant(np.array(pairs, dtype=np.int64)).unbind(1)
        for pool in self.tensors:
            pool.index_copy_(1, destinations, pool.index_select(1, sources))

    def copy_slots(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        """Copy the stored bytes of slots of each head, int64 [kv_heads, m], to other slots `targets` int64 [m]."""
        heads, size = torch.arange(len(sources), device=self.device)[:, None], self.block_size
        for pool in (*self.key_parts[layer].tensors, *self.value_parts[layer].tensors):
            pool[heads, targets // size, targets % size] = pool[heads, sources // size, sources % size]

    def gather(self, layer: int, block_table: Sequence[int] | NDArray[np.int32], length: int) -> tuple[Tensor, Tensor]:
        """Copy one sequence's (key [kv_heads, length, key_dim], value [kv_heads, length, value_dim]).

        They are the numbers of the model, as far as the format has kept them.
        """
        parts = self.stored(layer, block_table, length)
        key, value = (self.format.restored(self.format.decode(part)) for part in parts)
        return key, value

    def stored(self, layer: int, block_table: Sequence[int] | NDArray[np.int32], length: int) -> list[Stored]:
        """Copy one sequence's stored keys and values, each tensor as [kv_heads, length, width]."""
        used = torch.from_numpy(np.array(block_table, dtype=np.int64)[: -(-length // self.block_size)])
        used = used.to(self.device)
        parts = self.key_parts[layer], self.value_parts[layer]
        return [tuple(pool.index_select(1, used).flatten(1, 2)[:, :length] for pool in part.tensors) for part in parts]

    def views(self, part: Part, sizes: list[int]) -> list[Tensor]:
        """View keys in place, [kv_heads, dim, size] each: every second piece of all slots, cut into `sizes`.

        One call returns all views: a dozen single ones per layer would cost as much as the products do. Numbers that
        attention cannot read in place are expanded.
        """
        cut = [pool.transpose(1, 2).split_with_sizes(sizes, 2)[1::2] for pool in part.slots]
        return [self.format.decode(piece) for piece in zip(*cut, strict=True)]

    def run(self, part: Part, slot: int, tokens: int) -> Tensor:
        """Return the numbers of adjacent slots, [kv_heads, tokens, dim]: a view if they can be read in place."""
        return self.format.decode([pool.narrow(1, slot, tokens) for pool in part.slots])

    def regions(self, blocks: NDArray[np.int64], kv_heads: int) -> Tensor:
        """Return the regions of blocks [..., n] for `read`, head by head: [..., kv_heads, n]."""
        index = self.rows(blocks * self.block_size, kv_heads) // self.block_size
        return self.constant(index)

    def rows(self, slots: NDArray[np.int64], kv_heads: int) -> NDArray[np.int64]:
        """Return the rows of slots [..., n] in the tables of a part, head by head: [..., kv_heads, n]."""
        heads, slots = np.arange(kv_heads, dtype=np.int64)[:, None], slots[..., None, :]
        if self.runs_are_views:
            return heads * (self.num_blocks * self.block_size) + slots
        block, offset = np.divmod(slots, self.block_size)
        return (block * kv_heads + heads) * self.block_size + offset

    def read(self, part: Part, index: Tensor, workspace: int = 0) -> Tensor:
        """Gather regions [..., kv_heads, n] -> [all but the last, n * block_size, dim], in `compute_dtype`.

        Stored bytes are gathered into a workspace, and so is a result that needs no decoding: the next `read` into the
        same workspace overwrites it.
        """
        shape = math.prod(index.shape[:-1]), index.shape[-1] * self.block_size, -1
        found = []
        for column, table in enumerate(part.regions):
            width, place = table.shape[1], (workspace, column)
            size = index.numel() * width
            space = self._workspaces.get(place)
            if space is None or len(space) < size:
                with torch.inference_mode(False):
                    space = self._workspaces[place] = torch.empty(size, dtype=table.dtype, device=self.device)
            out = space[:size].view(-1, width)
            torch.index_select(table, 0, index.view(-1), out=out)
            found.append(out.view(shape))
        return self.format.decode(found)
