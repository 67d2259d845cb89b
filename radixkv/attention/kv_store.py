"""The pool's tensors: one K and one V per layer, addressed by block and slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput


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


class KVStore:
    """KV of `num_blocks` blocks of `block_size` tokens for every layer; allocated at once, zeroed lazily by the system.

    Every tensor has the shape [kv_heads, blocks, block_size, dim]. On a CPU this is also the order in memory, so that
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
    ) -> None:
        """Allocate; raises InvalidInput for no blocks, no slots, or a dtype that is not floating point.

        A model without attention has no layers, and its blocks take no bytes.
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
        self._place = device_of(self.device)
        self.dtype = dtype
        self.compute_dtype = torch.float32 if dtype.itemsize < 4 else dtype  # attention computes in this
        self.num_rows = (
            max((layer.kv_heads for layer in layers), default=1) * num_blocks * block_size
        )  # of the largest `table`
        self.runs_are_views = self.device.type == "cpu" if blocks_first is None else not blocks_first
        self.reads_in_place = self.runs_are_views and not always_gather
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
            self.keys = [self._allocate(layer.kv_heads, layer.key_dim) for layer in layers]
            self.values = [self._allocate(layer.kv_heads, layer.value_dim) for layer in layers]
        self._workspaces = [torch.empty(0, dtype=dtype, device=self.device) for _ in range(2)]

    def _allocate(self, kv_heads: int, dim: int) -> Tensor:
        """Return zeros of shape [kv_heads, blocks, block_size, dim]."""
        if self.runs_are_views:
            # numpy's zeros come from calloc: a page is mapped when first written. torch's zeros touch all pages.
            shape = (kv_heads, self.num_blocks, self.block_size, dim)
            flat = torch.from_numpy(np.zeros(math.prod(shape) * self.dtype.itemsize, np.uint8))
            return flat.view(self.dtype).view(shape)
        blocks_first = torch.zeros(
            self.num_blocks, kv_heads, self.block_size, dim, dtype=self.dtype, device=self.device
        )
        return blocks_first.transpose(0, 1)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers, K and V."""
        per_token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return per_token * self.block_size * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] in slots int64 [T], all different."""
        for pool, new in ((self.keys[layer], key), (self.values[layer], value)):
            if self.runs_are_views:
                self.slots(pool).index_copy_(1, slots, new.to(self.dtype))
            else:
                pool[:, slots // self.block_size, slots % self.block_size] = new.to(self.dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers; all sources are read before a destination is written.

        Destinations are all different. Costs two launches per tensor, for any number of pairs.
        """
        if not pairs:
            return
        sources, destinations = self._place.constant(np.array(pairs, dtype=np.int64)).unbind(1)
        for pool in (*self.keys, *self.values):
            pool.index_copy_(1, destinations, pool.index_select(1, sources))

    def gather(self, layer: int, block_table: Sequence[int] | NDArray[np.int32], length: int) -> tuple[Tensor, Tensor]:
        """Copy one sequence's (key [kv_heads, length, key_dim], value [kv_heads, length, value_dim])."""
        used = np.array(block_table, dtype=np.int64)[: -(-length // self.block_size)]
        index = self.regions(used, self.layers[layer].kv_heads)
        pools = self.keys[layer], self.values[layer]
        key, value = (self.read(pool, index)[:, :length].clone() for pool in pools)
        return key, value

    def slots(self, pool: Tensor) -> Tensor:
        """View a tensor of the pool as [kv_heads, slots, dim]; only if `runs_are_views`."""
        return pool.view(pool.shape[0], -1, pool.shape[3])

    def views(self, pool: Tensor, sizes: list[int]) -> list[Tensor]:
        """View keys in place, [kv_heads, dim, size] each: every second piece of `slots` cut into `sizes`.

        One call returns all views: a dozen single ones per layer would cost as much as the products do.
        """
        pieces = self.slots(pool).transpose(1, 2).split_with_sizes(sizes, 2)[1::2]
        return [piece.to(self.compute_dtype) for piece in pieces] if self.dtype != self.compute_dtype else list(pieces)

    def regions(self, blocks: NDArray[np.int64], kv_heads: int) -> Tensor:
        """Return the regions of blocks [..., n] for `read`, head by head: [..., kv_heads, n]."""
        index = self.rows(blocks * self.block_size, kv_heads) // self.block_size
        return self._place.constant(index)

    def constant(self, numbers: NDArray[Any]) -> Tensor:
        """Return indices or a mask on the device of the pool; see `Device.constant`."""
        return self._place.constant(numbers)

    def table(self, pool: Tensor) -> Tensor:
        """View a tensor of the pool as a plain table [rows, dim], in the order of memory."""
        return (pool if self.runs_are_views else pool.transpose(0, 1)).view(-1, pool.shape[3])

    def rows(self, slots: NDArray[np.int64], kv_heads: int) -> NDArray[np.int64]:
        """Return the rows of slots [..., n] in `table`, head by head: [..., kv_heads, n]."""
        heads, slots = np.arange(kv_heads, dtype=np.int64)[:, None], slots[..., None, :]
        if self.runs_are_views:
            return heads * (self.num_blocks * self.block_size) + slots
        block, offset = np.divmod(slots, self.block_size)
        return (block * kv_heads + heads) * self.block_size + offset

    def read(self, pool: Tensor, index: Tensor, workspace: int = 0) -> Tensor:
        """Gather regions [..., kv_heads, n] -> [all but the last, n * block_size, dim], in `compute_dtype`.

        The result lies in one of two workspaces, and the next `read` into the same one overwrites it.
        """
        dim = pool.shape[3]
        width = self.block_size * dim
        space = self._workspaces[workspace]
        if len(space) < index.numel() * width:
            with torch.inference_mode(False):
                space = torch.empty(index.numel() * width, dtype=self.dtype, device=self.device)
            self._workspaces[workspace] = space
        out = space[: index.numel() * width].view(-1, width)
        torch.index_select(self.table(pool).view(-1, width), 0, index.view(-1), out=out)
        return out.view(math.prod(index.shape[:-1]), index.shape[-1] * self.block_size, dim).to(self.compute_dtype)
