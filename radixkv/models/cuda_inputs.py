"""The inputs of recorded steps, at fixed addresses of a device: every replay reads the same addresses.

`StepInputs` writes a step's tokens, positions, slots, block ids and tiles into a `HostStaging`, which sends all of
them to the device in one copy. Each bucket has addresses of its own in the same memory: a small step is a small copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.device import Device, device_of
from radixkv.models.loaded import AttentionWindow, LayerSpec, SequenceInput
from radixkv.models.step_batch import relay, step_columns
from radixkv_kernels import attention, graph_capacity
from radixkv_kernels.graph_capacity import Bucket, GraphCapacity
from radixkv_kernels.tiles import OVERREAD
from radixkv_kernels.work_list import WorkList

ALIGNMENT = 16
"""Each array is padded to multiples of this number, 64 bytes, so that kernels may load 16 numbers at a time."""

MOST_BLOCKS = 1 << 22
"""Entries of a step's block tables, at most: 16 megabytes, 64 million tokens in blocks of 16."""

TOKENS, POSITIONS, SLOTS, LOGIT_ROWS, UNKNOWN, SAMPLED_ROWS = range(6)


class HostStaging:
    """At most `size` int32 numbers, on the host and on a device, sent in one copy.

    The copy from the host runs in a stream of its own, into other memory of the device: it does not wait for a step
    that still reads the numbers of the last one. A short copy on the device follows, in the order of steps.
    """

    def __init__(self, size: int, device: Device) -> None:
        """Allocate all three; on the host in pinned memory if the device is a GPU."""
        with torch.inference_mode(False):  # they are also written outside of inference mode
            self._host_tensor = device.pinned(size, torch.int32).zero_()
            numbers = torch.zeros(2, size, dtype=torch.int32, device=device.place)
        self.there: Tensor = numbers[0]
        self._arrived: Tensor = numbers[1]
        self.numbers: NDArray[np.int32] = self._host_tensor.numpy()
        self._device, self._uploads = device, device.stream()
        self._sent, self._taken = device.event(), device.event()
        self._uploads.wait_stream(device.current_stream())

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers on the host; the device has twice as many."""
        return self._host_tensor.nbytes

    def wait(self) -> None:
        """Wait until the last copy is done: its source must not change before."""
        self._sent.synchronize()

    def put(self, start: int, numbers: NDArray[np.int32]) -> None:
        """Write numbers on the host; after `wait`, before `send`."""
        self.numbers[start : start + len(numbers)] = numbers

    def send(self, count: int) -> None:
        """Start to copy the first `count` numbers to the device, where `there` has them for the next step."""
        with self._device.on(self._uploads):
            self._taken.wait()
            self._arrived[:count].copy_(self._host_tensor[:count], non_blocking=True)
            self._sent.record()
        self._sent.wait()
        self.there[:count].copy_(self._arrived[:count])
        self._taken.record()


class Layout:
    """The places of a bucket's arrays, each on a boundary of `ALIGNMENT` numbers.

    The columns come first, then the tiles of each group of layers from array groups[i] on, then the block tables from
    array `tables` on.
    """

    def __init__(self, columns: Sequence[int], groups: Sequence[Sequence[int]], tables: Sequence[int]) -> None:
        """Place arrays of these sizes one after the other."""
        *self.groups, self.tables = itertools.accumulate(map(len, groups), initial=len(columns))
        self.sizes = [*columns, *itertools.chain.from_iterable(groups), *tables]
        *self.starts, self.total = itertools.accumulate(
            (-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes), initial=0
        )


@dataclass(frozen=True)
class LayerGroup:
    """The properties that layers with the same tiles have in common."""

    attention_window: AttentionWindow
    shape: LayerShape
    heads: int


class StepInputs:
    """Tokens, positions, slots, block ids and tiles of the steps of some buckets; filled on the host, sent in one copy.

    A step that is smaller than its bucket is padded. Padded rows have slot -1, which is not written, belong to no
    tile, read no keys, and their attention is zero.
    """

    def __init__(
        self,
        store: KVStore,
        layers: Sequence[LayerSpec],
        buckets: Sequence[Bucket],
        *,
        max_length: int,
        split: int | None = None,
    ) -> None:
        """Allocate for sequences of up to `max_length` tokens; `split` as in `triton_backend.attend`."""
        self._store, self._split = store, split
        self._blocks_each = min(-(-max_length // store.block_size), store.num_blocks)
        self._of_layer = [LayerGroup(layer.attention_window, layer.shape, layer.heads) for layer in layers]
        self._alike = list(dict.fromkeys(self._of_layer))
        tilings = [triton_backend.tiling(store, alike.shape, alike.heads) for alike in self._alike]
        self._tilings = {bucket: [_of_two_kinds(each, bucket) for each in tilings] for bucket in buckets}
        # Layers that attend in chunks have block tables of their own. The longest tables are last: see `send`.
        chunks = dict.fromkeys(alike.attention_window.chunk for alike in self._alike)
        self._chunks = sorted(chunks, key=lambda chunk: max_length if chunk is None else chunk)
        self._rooms = {bucket: [self._room(index, bucket) for index in range(len(self._alike))] for bucket in buckets}
        self._layouts = {bucket: self._layout(bucket) for bucket in buckets}
        self._staging = HostStaging(max(each.total for each in self._layouts.values()), device_of(store.device))

    def _layout(self, bucket: Bucket) -> Layout:
        """Place the arrays of a bucket."""
        columns = [2 * size for size in (*[bucket.tokens] * 3, *[bucket.sequences] * 3)]  # of 64 bits
        tables = [self._most_blocks(bucket, chunk) + OVERREAD for chunk in self._chunks]
        return Layout(columns, [room.sizes for room in self._rooms[bucket]], tables)

    # ---- on the host

    def fill(self, inputs: Sequence[SequenceInput], work: Mapping[AttentionWindow, WorkList], bucket: Bucket) -> bool:
        """Write a step of at most this bucket's size; return False, with nothing written, if it does not fit.

        The lists of `work` have no more than `bucket.shared_rows` rows in shared runs; then only block tables may not
        fit. Costs the cutting of each distinct list.
        """
        cut = [
            attention.cut(work[alike.attention_window].padded(bucket.tokens), split=self._split, **tiling)
            for alike, tiling in zip(self._alike, self._tilings[bucket], strict=True)
        ]
        if not all(room.holds(tiles) for room, tiles in zip(self._rooms[bucket], cut, strict=True)):
            return False
        layout, staging = self._layouts[bucket], self._staging
        staging.wait()
        columns = step_columns(inputs, bucket.tokens, bucket.sequences)
        for start, column in zip(layout.starts, columns, strict=False):
            staging.put(start, column.view(np.int32))
        tables = {}
        for first, alike, tiles in zip(layout.groups, self._alike, cut, strict=True):
            merges = tiles.merge_rows, tiles.merge_offset, tiles.merge_ids
            arrays = (*tiles.kinds, tiles.row_ids, tiles.positions, *merges)
            for start, numbers in zip(layout.starts[first:], arrays, strict=False):
                staging.put(start, numbers)
            tables[alike.attention_window.chunk] = tiles.block_ids  # all windows have the same tables
        for start, chunk in zip(layout.starts[layout.tables :], self._chunks, strict=True):
            staging.put(start, tables[chunk])
        self._filled = bucket, start + len(tables[chunk]), len(columns.unknown)
        return True

    def clear(self, bucket: Bucket) -> None:
        """Write a step without any sequence."""
        layout = self._layouts[bucket]
        self._staging.wait()
        self._staging.numbers[: layout.total] = 0
        self._staging.put(layout.starts[SLOTS], np.full(2 * bucket.tokens, -1, dtype=np.int32))
        self._filled = bucket, layout.total, 0

    def send(self, sampled: Tensor | None = None) -> None:
        """Start to copy the filled step to the device, and there its unknown tokens from `sampled` int64 [rows].

        Copies all arrays up to the last table that is used.
        """
        bucket, used, unknown = self._filled
        self._staging.send(used)
        rows, sampled_rows = (self._column(index, bucket)[:unknown] for index in (UNKNOWN, SAMPLED_ROWS))
        relay(self._column(TOKENS, bucket), rows, sampled_rows, sampled)

    # ---- on the device

    def columns(self, bucket: Bucket) -> list[Tensor]:
        """Return tokens, positions and slots int64 [tokens], and rows with logits int64 [sequences] of a bucket."""
        return [self._column(index, bucket) for index in (TOKENS, POSITIONS, SLOTS, LOGIT_ROWS)]

    def _column(self, index: int, bucket: Bucket) -> Tensor:
        return self._array(index, bucket).view(torch.int64)

    def _array(self, index: int, bucket: Bucket) -> Tensor:
        layout = self._layouts[bucket]
        return self._staging.there[layout.starts[index] : layout.starts[index] + layout.sizes[index]]

    def plans(self, bucket: Bucket) -> list[attention.TilePlan]:
        """Return each layer's plan for the steps of this bucket.

        A launch for each kind of tile that such a step may have: a step that lacks a kind has a count of zero.
        """
        plans = {alike: self._plan(index, bucket) for index, alike in enumerate(self._alike)}
        return [plans[alike] for alike in self._of_layer]

    def _plan(self, index: int, bucket: Bucket) -> attention.TilePlan:
        room, tiling, layout = self._rooms[bucket][index], self._tilings[bucket][index], self._layouts[bucket]
        first = layout.groups[index]
        window, chunk = self._alike[index].attention_window
        chosen: tuple[attention.Kind, ...] = tiling["chosen"]
        *tiles, row_ids, positions, merge_rows, merge_offset, merge_ids = (
            self._array(place, bucket) for place in range(first, first + len(chosen) + 5)
        )
        return attention.TilePlan(
            kinds=chosen,
            counts=room.tiles,
            tiles=tuple(tiles),
            rows=(self._array(layout.tables + self._chunks.index(chunk), bucket), row_ids, positions),
            merges=(merge_rows, merge_offset, merge_ids),
            num_merges=bucket.tokens,
            num_partials=room.partials,
            block_size=self._store.block_size,
            window=window,
            processors=tiling["processors"],
        )

    # ---- capacity

    def _most_blocks(self, bucket: Bucket, chunk: int | None) -> int:
        """Return the most blocks of all tables of a step together."""
        each = self._blocks_each if chunk is None else min(self._blocks_each, chunk // self._store.block_size)
        return min(bucket.pieces(chunk) * each, MOST_BLOCKS)

    def _room(self, index: int, bucket: Bucket) -> GraphCapacity:
        """Return the capacity for the tiles of one list."""
        tiling, (window, chunk) = self._tilings[bucket][index], self._alike[index].attention_window
        blocks, group = self._most_blocks(bucket, chunk), tiling["heads"] // tiling["kv_heads"]
        shapes = tuple(kind.shape for kind in tiling["chosen"])
        if self._split is not None:
            keys = self._blocks_each * self._store.block_size
            return graph_capacity.split_capacity(bucket.tokens, blocks, shapes, group, keys=keys, split=self._split)
        return graph_capacity.step_capacity(
            bucket,
            blocks,
            shapes,
            group,
            spread=attention.spread(tiling["processors"], tiling["kv_heads"], tiling["chosen"]),
            window=window,
            chunk=chunk,
        )


def _of_two_kinds(tiling: dict[str, Any], bucket: Bucket) -> dict[str, Any]:
    """Return the arguments of the cutting for a bucket: decodes have tiles of two kinds, so that a layer launches two.

    Where a decode could have all three, rows of the middle kind are computed in tiles of the tallest: a run of keys is
    read as often, and the products of empty rows take less time than the read.
    """
    small, *middle, tall = tiling["chosen"]
    group = tiling["heads"] // tiling["kv_heads"]
    if bucket.chunks or not middle or bucket.tokens * group <= middle[-1].rows or group > small.rows:
        return tiling
    return {**tiling, "chosen": (small, tall)}
