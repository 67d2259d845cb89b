"""A load that is pending for a sequence: which host blocks it reads, and which tokens."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache.types import Node


@dataclass(slots=True)
class Loading:
    """A pending load. The host keeps its blocks unchanged until the sequence commits or closes."""

    start: int  # the length of the sequence before the load
    reads: dict[int, int]  # host block -> the end of the tokens that are read there

    def reads_host(self, blocks: Set[int], start: int) -> bool:
        """Whether it reads tokens from `start` on in one of these host blocks."""
        return any(end > start and block in blocks for block, end in self.reads.items())


def sources(runs: list[tuple[Node, int]], size: int) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
    """The host slots of the leading tokens of nodes; and their host blocks, each with the end of these tokens."""
    parts = [np.empty(0, np.int64)]
    reads: dict[int, int] = {}
    for node, count in runs:
        first, end = node.start // size, node.start + count
        blocks = node.blocks[: -(-end // size) - first]
        slots = np.add.outer(np.frombuffer(blocks, np.int32).astype(np.int64) * size, np.arange(size)).ravel()
        parts.append(slots[node.start - first * size : end - first * size])
        reads.update((block, min(end, (first + at + 1) * size)) for at, block in enumerate(blocks))
    return np.concatenate(parts), reads
