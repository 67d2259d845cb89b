"""Attention of decodes and short chunks, and writes to the pool, by compiled functions: float32 on a CPU, any format.

In a decode step of a small model, the operators of torch take as long as the products: each layer's attention has about
a dozen. Here two calls take their place. The rows of a short chunk, such as a draft, are computed as decodes are, to
the same bits, but they read each key from memory once. Query rows of several sequences that share a run of keys are
computed by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import torch_backend
from radixkv.attention.kv_store import KVStore, LayerShape, Part
from radixkv.attention.torch_backend import QueryRows
from radixkv.models.quantized.kernels import Kernels, kernels
from radixkv.sizing.kv_size import LARGEST_HEAD
from radixkv_kernels.work_list import WorkList

Int = NDArray[np.int64]

SHORT_CHUNK = 16
"""Query rows of a sequence that are computed as decodes: CHUNK_ROWS of step.cpp."""


def obstacle(shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why the compiled functions cannot serve these layers; None if they can.

    Compiles them at the first call for float32 on a CPU: five seconds.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return f"the functions are for float32 on a CPU, not for {str(dtype).removeprefix('torch.')} on {device.type}"
    dims = (dim for each in shapes for dim in (each.key_dim, each.value_dim))
    odd = next((dim for dim in dims if dim % 16 or dim > LARGEST_HEAD), None)
    if odd is not None:
        return f"a head of {odd} numbers is no multiple of 16 up to {LARGEST_HEAD}"
    return "nothing is compiled on this machine" if kernels() is None else None


class _Layer(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("stored", ctypes.c_int64),
    )


class _Items(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("block_offset", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
    )


class CompiledAttention:
    """Writes to one store, and attends over it."""

    def __init__(self, store: KVStore) -> None:
        """Serve a store on a CPU, in any format, for which `obstacle` is None."""
        library = kernels()
        assert library is not None and store.runs_are_views
        self._store, self._library = store, library
        slots = store.num_blocks * store.block_size
        self._layers = [
            _Layer(*_addresses(key, value), shape.kv_heads, shape.key_dim, shape.value_dim, slots, _stored(key))
            for shape, key, value in zip(store.layers, store.key_parts, store.value_parts, strict=True)
        ]
        self._addresses = [ctypes.addressof(layer) for layer in self._layers]
        # One object, as the plans of a list are found by it; no bound method, whose cycle would keep the pool.
        self._tails = partial(_tails, library, self._addresses)
        self._attend_all = store.format.attending(partial(torch_backend.attend, store, tails=self._tails))

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
        if sinks is None and query.dtype is torch.float32 and query.stride(2) == 1:
            heads, rows, _ = query.shape
            shape = self._store.layers[layer]
            group = heads // shape.kv_heads
            plan = torch_backend.plan_of(self._store, work, shape.kv_heads, group, self._tails)
            if plan.plain and isinstance(single := plan.operations[0], _SingleRows):  # a step of decodes
                output = query.new_empty(rows, heads, shape.value_dim)
                single.compute(
                    layer, query, query.stride(1), query.stride(0), group, scale, softcap, output, None, rotates=True
                )
                return output
        return self._attend_all(layer, query, work, scale=scale, softcap=softcap, sinks=sinks)


def _addresses(key: Part, value: Part) -> list[int | None]:
    """Return the addresses of keys, values, and the scales of both if there are any."""
    numbers, *scales = ([each.data_ptr() for each in pair] for pair in zip(key.tensors, value.tensors, strict=True))
    return [*numbers, *(scales[0] if scales else (None, None))]


def _stored(part: Part) -> int:
    """Return how numbers are stored, an entry of `Stored` in step.cpp."""
    return {torch.float32: 0, torch.float16: 1, torch.int8: 2}[part.tensors[0].dtype]


def _tails(
    library: Kernels, layers: list[int], work: WorkList, items: Int, store: KVStore, kv_heads: int, group: int
) -> Iterator[tuple[_SingleRows, Int]]:
    """Yield one operation for all single query rows, if there are any."""
    if len(items):
        places = work.row_offset[items].astype(np.int64)
        rows = work.row_ids[places].astype(np.int64)
        order = rows.argsort(kind="stable")
        items, places, rows = items[order], places[order], rows[order]
        yield _SingleRows(work, items, rows, library, layers), places


def _rows(new: Tensor) -> Tensor:
    """Return a tensor of float32 [..., dim] whose last dimension is contiguous: the same if it is that already."""
    if new.dtype is torch.float32 and new.stride(2) == 1:
        return new
    return new.to(torch.float32).contiguous()


def _chunks(offset: NDArray[np.int32], start: NDArray[np.int32]) -> Int:
    """Return where each chunk begins, and the end: items with the same first block and key, up to `SHORT_CHUNK`."""
    begins = np.flatnonzero((np.diff(offset) != 0) | (np.diff(start) != 0)) + 1
    edges = np.concatenate(([0], begins, [len(offset)]))
    if len(edges) <= len(offset) and (np.diff(edges) > SHORT_CHUNK).any():
        cuts = [np.arange(low, high, SHORT_CHUNK) for low, high in pairwise(edges.tolist())]
        edges = np.concatenate((*cuts, [len(offset)]))
    return edges


class _SingleRows:
    """Attention of query rows, each over its own keys. Adjacent ones with the same first key are a chunk."""

    def __init__(self, work: WorkList, items: Int, rows: Int, library: Kernels, layers: list[int]) -> None:
        """Lay out `items`, once per step; `rows` [n] are their query rows, ascending."""
        self.rows = QueryRows(rows, torch.from_numpy)
        self._library, self._layers = library, layers
        columns = (work.block_offset[items], work.kv_start[items], work.tokens[items])
        arrays = [np.ascontiguousarray(each) for each in (work.block_ids, *columns, rows, _chunks(*columns[:2]))]
        assert [each.dtype for each in arrays] == [np.int32] * 4 + [np.int64] * 2
        self._arrays = arrays  # the items point to them
        self._items = _Items(*(each.ctypes.data for each in arrays), len(arrays[5]) - 1, work.block_size)
        self._address = ctypes.addressof(self._items)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        kv_heads, group = query.shape[1:3]
        if query.stride(3) != 1 or query.stride(1) != group * query.stride(2):
            query = query.contiguous()
        output = query.new_empty(self.rows.count, kv_heads, group, store.layers[layer].value_dim)
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
        *,
        rotates: bool = False,
    ) -> None:
        """Fill output [n, heads, dv] and lse [n, heads] for queries with strides `row` and `head`.

        If the pool has rotated heads, `rotates` says whether queries and outputs are those of the model.
        """
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
            rotates,
            library.instructions,
            torch.get_num_threads(),
            library.parallel,
        )
