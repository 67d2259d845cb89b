"""The inputs of recorded decode steps, at fixed addresses of a device: every replay reads the same addresses.

`DecodeInputs` writes a step's tokens, positions, slots, block ids and tiles into a `HostStaging`, which sends all of
them to the device in one copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.device import device_of
from radixkv.models.loaded import AttentionWindow, LayerSpec, SequenceInput
from radixkv.models.step_batch import relay, unknown_tokens
from radixkv_kernels import attention, graph_capacity
from radixkv_kernels.graph_capacity import GraphCapacity
from radixkv_kernels.tiles import Tiles
from radixkv_kernels.work_list import WorkList

Present = tuple[bool, ...]
"""Which kinds of tile a step has: the others are not launched."""

ALIGNMENT = 16
"""Each array is padded to multiples of this number, 64 bytes, so that kernels may load 16 numbers at a time."""


class HostStaging:
    """Arrays of at most `sizes` int32 numbers, each at a fixed place on the host and on a device, sent in one copy."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """Allocate both, zeroed; on the host in pinned memory if the device is a GPU."""
        self._sizes = list(sizes)
        self._starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        with torch.inference_mode(False):  # they are also written outside of inference mode
            self._host_tensor = device_of(device).pinned(self._starts[-1], torch.int32).zero_()
            self._device_numbers = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self._numbers: NDArray[np.int32] = self._host_tensor.numpy()
        self._sent = device_of(device).event()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays on the device, and again on the host."""
        return self._host_tensor.nbytes

    def wait(self) -> None:
        """Wait until the last copy is done: its source must not change before."""
        self._sent.synchronize()

    def put(self, index: int, numbers: NDArray[np.int32]) -> None:
        """Write an array on the host; after `wait`, before `send`."""
        assert len(numbers) <= self._sizes[index]
        start = self._starts[index]
        self._numbers[start : start + len(numbers)] = numbers

    def send(self, last: int) -> None:
        """Start to copy all arrays to the device, but only the first `last` numbers of the last one."""
        used = self._starts[-2] + last
        self._device_numbers[:used].copy_(self._host_tensor[:used], non_blocking=True)
        self._sent.record()

    def on_device(self, index: int, count: int | None = None) -> Tensor:
        """Return the first `count` numbers of an array on the device, or all."""
        start = self._starts[index]
        return self._device_numbers[start : start + (self._sizes[index] if count is None else count)]


MOST_BLOCKS = 1 << 20
"""Entries of a step's block tables, at most: four megabytes, 16 million tokens in blocks of 16."""

TOKENS, POSITIONS, SLOTS, PLACES, SAMPLED_ROWS = range(5)


@dataclass(frozen=True)
class LayerGroup:
    """The properties that layers with the same tiles have in common."""

    attention_window: AttentionWindow
    shape: LayerShape
    heads: int


class DecodeInputs:
    """Tokens, positions, slots, block ids and tiles of up to `rows` decodes; filled on the host, sent in one copy.

    A step of fewer sequences than its bucket is padded. Padded rows have slot -1, which is not written, belong to no
    tile, read no keys, and their attention is zero.
    """

    def __init__(
        self, store: KVStore, layers: Sequence[LayerSpec], rows: int, *, max_length: int, split: int | None = None
    ) -> None:
        """Allocate for sequences of up to `max_length` tokens; `split` as in `triton_backend.attend`."""
        self._store, self._split = store, split
        self._blocks_each = min(-(-max_length // store.block_size), store.num_blocks)
        self._of_layer = [LayerGroup(layer.attention_window, layer.shape, layer.heads) for layer in layers]
        self._alike = list(dict.fromkeys(self._of_layer))
        self._tilings = [triton_backend.tiling(store, alike.shape, alike.heads) for alike in self._alike]
        sizes, self._first = [2 * rows] * 5, []  # the columns have 64 bits
        for index, tiling in enumerate(self._tilings):
            self._first.append(len(sizes))
            sizes += self._room(index, rows).sizes(len(tiling["chosen"]))
        self._blocks = len(sizes)
        self._staging = HostStaging([*sizes, self._room(0, rows).block_ids], store.device)
        with torch.inference_mode(False):
            self._rows = torch.arange(rows, device=store.device)

    # ---- on the host

    def fill(
        self, inputs: Sequence[SequenceInput], work: Mapping[AttentionWindow, WorkList], bucket: int
    ) -> Present | None:
        """Write a step of `bucket` rows, the first for `inputs`, and return the kinds of tile that it has.

        Returns None, with nothing written, if the step does not fit. Costs the cutting of each distinct list.
        """
        cut = [
            attention.cut(_padded(work[alike.attention_window], bucket), split=self._split, **tiling)
            for alike, tiling in zip(self._alike, self._tilings, strict=True)
        ]
        if not all(self._room(index, bucket).holds(tiles) for index, tiles in enumerate(cut)):
            return None
        self._staging.wait()
        self._put(TOKENS, [sequence.tokens[0] for sequence in inputs], bucket, 0)
        self._put(POSITIONS, [sequence.start for sequence in inputs], bucket, 0)
        self._put(SLOTS, [sequence.slots[0] for sequence in inputs], bucket, -1)
        places, rows = unknown_tokens(inputs, np.arange(len(inputs)))
        self._unknown = len(places)
        self._staging.put(PLACES, places.view(np.int32))
        self._staging.put(SAMPLED_ROWS, rows.view(np.int32))
        for first, tiles in zip(self._first, cut, strict=True):
            merges = tiles.merge_rows, tiles.merge_offset, tiles.merge_ids
            for place, numbers in enumerate((*tiles.kinds, tiles.row_ids, tiles.positions, *merges)):
                self._staging.put(first + place, numbers)
        self._staging.put(self._blocks, cut[0].block_ids)  # the same for all windows, as all have the same tables
        self._used = len(cut[0].block_ids)
        return tuple(map(any, zip(*(_present(tiles) for tiles in cut), strict=True)))

    def _put(self, index: int, numbers: Sequence[int | np.signedinteger], bucket: int, padding: int) -> None:
        """Write a 64-bit number for each row."""
        column = np.full(bucket, padding, dtype=np.int64)
        column[: len(numbers)] = numbers
        self._staging.put(index, column.view(np.int32))

    def send(self, sampled: Tensor | None = None) -> None:
        """Start to copy the filled step to the device, and there its unknown tokens from `sampled` int64 [rows]."""
        self._staging.send(self._used)
        places, rows = (self._column(index, self._unknown) for index in (PLACES, SAMPLED_ROWS))
        relay(self._column(TOKENS), places, rows, sampled)

    # ---- on the device

    def columns(self, bucket: int) -> list[Tensor]:
        """Return tokens, positions and slots of a bucket's rows, int64 [bucket] each."""
        return [self._column(index, bucket) for index in (TOKENS, POSITIONS, SLOTS)]

    def _column(self, index: int, count: int | None = None) -> Tensor:
        """Return the first `count` 64-bit numbers of an array, or all."""
        return self._staging.on_device(index, None if count is None else 2 * count).view(torch.int64)

    def last_rows(self, bucket: int) -> Tensor:
        """Return the row of each sequence's last token, which is its only one."""
        return self._rows[:bucket]

    def plans(self, bucket: int, present: Present) -> list[attention.TilePlan]:
        """Return each layer's plan for steps of this bucket with these kinds of tile."""
        plans = {alike: self._plan(index, bucket, present) for index, alike in enumerate(self._alike)}
        return [plans[alike] for alike in self._of_layer]

    def _plan(self, index: int, bucket: int, present: Present) -> attention.TilePlan:
        room, tiling, first = self._room(index, bucket), self._tilings[index], self._first[index]
        kinds = len(tiling["chosen"])
        *tiles, row_ids, positions, merge_rows, merge_offset, merge_ids = (
            self._staging.on_device(first + place) for place in range(kinds + 5)
        )
        return attention.TilePlan(
            kinds=tiling["chosen"],
            counts=tuple(room.tiles * has_kind for has_kind in present[:kinds]),
            tiles=tuple(tiles),
            rows=(self._staging.on_device(self._blocks), row_ids, positions),
            merges=(merge_rows, merge_offset, merge_ids),
            num_merges=bucket,
            num_partials=room.partials,
            block_size=self._store.block_size,
            window=self._alike[index].attention_window.window,
            processors=tiling["processors"],
        )

    def _room(self, index: int, bucket: int) -> GraphCapacity:
        """Return the capacity for the tiles of one list."""
        tiling = self._tilings[index]
        return graph_capacity.decode_capacity(
            bucket,
            min(bucket * self._blocks_each, MOST_BLOCKS),
            tuple(kind.shape for kind in tiling["chosen"]),
            tiling["heads"] // tiling["kv_heads"],
            spread=attention.spread(tiling["processors"], tiling["kv_heads"], tiling["chosen"]),
            keys=self._blocks_each * self._store.block_size,
            split=self._split,
        )


def _padded(work: WorkList, rows: int) -> WorkList:
    """Return the same list for a step of more rows, which read nothing."""
    positions: NDArray[np.int32] = np.zeros(rows, dtype=np.int32)
    positions[: work.num_rows] = work.positions
    return replace(work, positions=positions)


def _present(tiles: Tiles) -> list[bool]:
    """Return, for each of three kinds of tile, whether the step has any."""
    return [kind < len(tiles.kinds) and tiles.num_tiles(kind) > 0 for kind in range(3)]
