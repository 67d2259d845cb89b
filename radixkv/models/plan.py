"""Work out, once per step for all layers, which query reads which block.

Knows the reaches of a model's layers and the step before. Does not know tensors or how a list is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.attention import chunked, worklist
from radixkv.models.chunk import Chunk
from radixkv.models.loaded import LayerSpec, Reach
from radixkv_kernels.work_list import WorkList

Lists = dict[Reach, WorkList]


class Planner:
    """Builds a work list for each distinct reach of the layers of a model."""

    def __init__(self, layers: Sequence[LayerSpec], block_size: int, worth: int) -> None:
        """`worth` as in `worklist.build`. Raises InvalidInput for layers whose chunks are no whole blocks."""
        for layer in layers:
            if layer.chunk is not None:
                chunked.check(layer.chunk, block_size)
        self._reaches = tuple({layer.reach: None for layer in layers})
        self._block_size, self._worth = block_size, worth
        self._previous: dict[int | None, WorkList] = {}

    def lists(self, chunks: Sequence[Chunk]) -> Lists:
        """The list of each reach.

        The tree among the tables is the same for all windows, and mostly that of the step before: each list is built
        from the one before it.
        """
        tables = [chunk.block_table for chunk in chunks]
        query_lengths = [len(chunk.tokens) for chunk in chunks]
        kv_lengths = [chunk.start + n for chunk, n in zip(chunks, query_lengths, strict=True)]
        found = {}
        for reach in self._reaches:
            sequences = self._sequences(tables, kv_lengths, query_lengths, reach)
            self._previous[reach.chunk] = found[reach] = worklist.build(
                *sequences,
                reach.window,
                self._previous.get(reach.chunk),
                block_size=self._block_size,
                worth=self._worth,
            )
        return found

    def _sequences(
        self, tables: list[NDArray[np.int32]], kv_lengths: list[int], query_lengths: list[int], reach: Reach
    ) -> tuple[Any, list[int], list[int]]:
        """The step's sequences as layers of this reach see them."""
        if reach.chunk is None:
            return tables, kv_lengths, query_lengths
        return chunked.cut(tables, kv_lengths, query_lengths, reach.chunk, self._block_size)
