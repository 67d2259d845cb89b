"""The tree in a batch of block tables: which sequences share which runs of blocks.

Knows block ids and which blocks are full. Does not know query rows beyond "has some", windows, or tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Table = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SharedRuns:
    """Tokens [start, stop) of paths, on block boundaries, that several sequences have in common; parents first.

    In arrays, as a step's list is laid out from them again and again while the tree stays as it is.
    """

    start: Int  # [runs]
    stop: Int  # [runs]
    counts: Int  # [runs] members
    members: Int  # sequence indices, ascending within a run, one run behind the other


@dataclass(frozen=True, eq=False)
class Grouping:
    """The shared runs of a batch, parents before children, and where each sequence's own tail starts."""

    runs: SharedRuns
    tails: Int  # [sequences] first token that a sequence reads alone
    block_ids: Table  # all tables, one behind the other
    table_offset: Int  # [sequences + 1] where each table starts in block_ids
    kv_lengths: Int
    active: NDArray[np.bool_]  # [sequences] has query rows
    worth: int

    def grown(self, tables: list[Table], kv_lengths: Int, query_lengths: Int, worth: int) -> Grouping | None:
        """This grouping for tables that have only grown at their ends, or None if anything else has changed."""
        if len(tables) != len(self.kv_lengths) or worth != self.worth or (kv_lengths < self.kv_lengths).any():
            return None
        block_ids, offset = _flat(tables)
        if not np.array_equal(query_lengths > 0, self.active) or not self._is_prefix(block_ids, offset):
            return None
        return Grouping(self.runs, self.tails, block_ids, offset, kv_lengths, self.active, worth)

    def _is_prefix(self, block_ids: Table, offset: Int) -> bool:
        """Does each of the new tables begin with the old one?"""
        more = np.diff(offset) - np.diff(self.table_offset)
        if (more < 0).any():
            return False
        new, old = 0, 0
        for index in np.flatnonzero(more).tolist():  # few grow in one step: what lies between them is one run
            end = int(self.table_offset[index + 1])
            if not np.array_equal(block_ids[new : new + end - old], self.block_ids[old:end]):
                return False
            new, old = int(offset[index + 1]), end
        return np.array_equal(block_ids[new:], self.block_ids[old:])


def group(tables: list[Table], kv_lengths: Int, query_lengths: Int, block_size: int, worth: int) -> Grouping:
    """Find the tree in the tables: sort them, compare neighbours, split where they part.

    Only blocks that are full for every member are shared: behind the fill mark of a common block each sequence may
    have appended tokens of its own. A run whose sharing saves fewer than `worth` token reads is left to its children.
    """
    block_ids, offset = _flat(tables)
    active = query_lengths > 0
    full = [table[: length // block_size] for table, length in zip(tables, kv_lengths.tolist(), strict=True)]
    order = sorted(np.flatnonzero(active).tolist(), key=lambda index: full[index].tobytes())
    common = [_common(full[a], full[b]) for a, b in itertools.pairwise(order)]
    runs, tails = _split(np.array(order, dtype=np.int64), common, len(tables), -(-worth // block_size))
    return Grouping(_joined(runs, block_size), tails * block_size, block_ids, offset, kv_lengths, active, worth)


def _joined(runs: list[tuple[int, int, Int]], block_size: int) -> SharedRuns:
    """Runs of blocks, each (start, stop, members), as arrays in tokens."""
    start, stop = (np.array([run[i] for run in runs], dtype=np.int64) * block_size for i in range(2))
    counts = np.array([len(members) for *_, members in runs], dtype=np.int64)
    members = [members for *_, members in runs]
    return SharedRuns(start, stop, counts, np.concatenate(members) if members else np.empty(0, dtype=np.int64))


def _flat(tables: list[Table]) -> tuple[Table, Int]:
    """All tables, one behind the other, and where each starts."""
    lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
    block_ids = np.concatenate(tables) if tables else np.empty(0, dtype=np.int32)
    return block_ids, np.concatenate(([0], np.cumsum(lengths)))


def _common(a: Table, b: Table) -> int:
    """How many leading blocks two tables have in common."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _split(order: Int, common: list[int], sequences: int, worth: int) -> tuple[list[tuple[int, int, Int]], Int]:
    """Runs in blocks, each (start, stop, members), and each sequence's tail; no recursion.

    From sequences in the order of their tables, and the overlap of neighbours.
    """
    runs: list[tuple[int, int, Int]] = []
    tails = np.zeros(sequences, dtype=np.int64)
    waiting = [(0, len(order), 0)]
    while waiting:
        low, high, start = waiting.pop()
        if high - low < 2:
            tails[order[low:high]] = start
            continue
        stop = min(common[low : high - 1])
        if stop > start and (stop - start) * (high - low - 1) >= worth:
            runs.append((start, stop, np.sort(order[low:high])))
            start = stop
        edges = [low, *(i + 1 for i in range(low, high - 1) if common[i] == stop), high]
        waiting += [(a, b, start) for a, b in itertools.pairwise(edges)]
    return runs, tails
