"""Attention of single query rows and writes to the pool by compiled functions, for float32 on a CPU.

In a decode step of a small model, the operators of torch take as long as the products: each layer's attention has about
a dozen. Here two calls take their place. Query rows that share a run of keys are computed by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import torch_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.attention.private_attention import QueryRows
from radixkv.models.quantized.kernels import Kernels, kernels
from radixkv_kernels.work_list import WorkList

LARGEST = 512
"""Numbers per head, at most."""

Int = NDArray[np.int64]


def obstacle(shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why the compiled functions cannot serve these layers; None if they can.

    Compiles them at the first call for float32 on a CPU: five seconds.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return f"the functions are for float32 on a CPU, not for {str(dtype).removeprefix('torch.')} on {device.type}"
    odd = next((dim for each in shapes for dim in (each.key_dim, each.value_dim) if dim % 16 or dim > LARGEST), None)
    if odd is not None:
        return f"a head of {odd} numbers is no multiple of 16 up to {LARGEST}"
    return "nothing is compiled on this machine" if kernels() is None else None


class _Layer(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("slots", ctypes.c_int64),
    )


class _Items(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("block_offset", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
    )


class CompiledAttention:
    """Writes to one store, and attends over it."""

    def __init__(self, store: KVStore) -> None:
        """Serve a store of float32 on a CPU, for which `obstacle` is None."""
        library = kernels()
        assert library is not None and store.runs_are_views
        self._store, self._library = store, library
        slots = store.num_blocks * store.block_size
        self._layers = [
            _Layer(keys.data_ptr(), values.data_ptr(), shape.kv_heads, shape.key_dim, shape.value_dim, slots)
            for shape, keys, values in zip(store.layers, store.keys, store.values, strict=True)
        ]
        self._addresses = [ctypes.addressof(layer) for layer in self._layers]
        # One object, as the plans of a list are found by it; no bound method, whose cycle would keep the pool.
        self._tails = partial(_tails, library, self._addresses)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] in slots int64 [T], all different."""
        key, value = _rows(key), _rows(value)
        self._library.store(
            self._addresses[layer],
            slots.data_ptr(),
            len(slots),
            key.data_ptr(),
            key.stride(1),
            key.stride(0),
            value.data_ptr(),
            value.stride(1),
            value.stride(0),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        work: WorkList,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend as `torch_backend.attend`: query [heads, T, dk] -> [T, heads, dv]."""
        tails = self._tails
        if sinks is None and query.dtype is torch.float32 and query.stride(2) == 1:
            heads, rows, _ = query.shape
            shape = self._store.layers[layer]
            group = heads // shape.kv_heads
            plan = torch_backend.plan_of(self._store, work, shape.kv_heads, group, tails)
            if plan.plain and isinstance(single := plan.operations[0], _SingleRows):  # a step of decodes
                output = query.new_empty(rows, heads, shape.value_dim)
                single.compute(layer, query, query.stride(1), query.stride(0), group, scale, softcap, output, None)
                return output
        return torch_backend.attend(
            self._store, layer, query, work, scale=scale, softcap=softcap, sinks=sinks, tails=tails
        )


def _tails(
    library: Kernels, layers: list[int], work: WorkList, items: Int, store: KVStore, kv_heads: int, group: int
) -> Iterator[tuple[_SingleRows, Int]]:
    """Yield one operation for all single query rows, if there are any."""
    if len(items):
        places = work.row_offset[items].astype(np.int64)
        rows = work.row_ids[places].astype(np.int64)
        yield _SingleRows(work, items, rows, library, layers), places


def _rows(new: Tensor) -> Tensor:
    """Return a tensor of float32 [..., dim] whose last dimension is contiguous: the same if it is that already."""
    if new.dtype is torch.float32 and new.stride(2) == 1:
        return new
    return new.to(torch.float32).contiguous()


class _SingleRows:
    """Attention of query rows, each over its own keys."""

    def __init__(self, work: WorkList, items: Int, rows: Int, library: Kernels, layers: list[int]) -> None:
        """Lay out `items`, once per step; `rows` [n] are their query rows."""
        self.rows = QueryRows(rows, torch.from_numpy)
        self._library, self._layers = library, layers
        columns = (work.block_offset[items], work.kv_start[items], work.tokens[items])
        arrays = [np.ascontiguousarray(each) for each in (work.block_ids, *columns, rows)]
        assert [each.dtype for each in arrays] == [np.int32] * 4 + [np.int64]
        self._arrays = arrays  # the items point to them
        self._items = _Items(*(each.ctypes.data for each in arrays), len(rows), work.block_size)
        self._address = ctypes.addressof(self._items)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        kv_heads, group = query.shape[1:3]
        if query.stride(3) != 1 or query.stride(1) != group * query.stride(2):
            query = query.contiguous()
        output = query.new_empty(len(self.rows), kv_heads, group, store.layers[layer].value_dim)
        lse = query.new_empty(output.shape[:3]) if need_lse else None
        self.compute(layer, query, query.stride(0), query.stride(2), group, scale, softcap, output, lse)
        return output, lse

    def compute(
        self,
        layer: int,
        query: Tensor,
        row: int,
        head: int,
        group: int,
        scale: float,
        softcap: float | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Fill output [n, heads, dv] and lse [n, heads] for queries with strides `row` and `head`."""
        library = self._library
        library.attend(
            self._layers[layer],
            self._address,
            query.data_ptr(),
            row,
            head,
            group,
            scale,
            softcap or 0.0,
            output.data_ptr(),
            None if lse is None else lse.data_ptr(),
            library.instructions,
            torch.get_num_threads(),
            library.parallel,
        )
