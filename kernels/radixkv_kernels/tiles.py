"""Cut a work list into tiles for the kernels: each has the query rows of one matrix product and a run of keys.

The keys are cut so that the tiles of a step keep all processors of a GPU equally busy. Every (row, key) pair of the
work list lies in exactly one tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv_kernels.work_list import Int32, WorkList

Int = NDArray[np.int64]

FIELDS = 16
"""Numbers of a tile, which fill a cache line; the last seven are zero.

0 block_offset, 1 position: slot `s` is key `position + s`, in block `block_ids[block_offset + s // block_size]`
2 first, 3 stop: the tile's keys are the slots [first, stop)
4 row_offset, 5 rows: its query rows are `row_ids[row_offset:][:rows]`
6 clear_from, 7 clear_to: iterations over whole runs of keys that all rows see, and that need no mask
8 partial_offset: place of its rows' first partial, or -1 if no other tile has keys for these rows
"""

HEADER = 16
"""Numbers before the first tile (or row to merge): the number of tiles (or rows), then zeros."""

SHORTEST = 256
"""Keys of the shortest part into which keys are cut: below, its partial costs more than a processor gains."""

WAVES = 4
"""Tiles per program, at most, into which keys are cut: a program runs its tiles one after the other."""

PARTIAL = 2
"""Cost of a partial in keys read, for each stacked row: a partial is written and read again in 32 bits."""

OVERREAD = 256
"""Block ids after the last one that a kernel may load and never use: the most keys of one iteration."""


@dataclass(frozen=True)
class Shape:
    """The size of one kind of tile: `rows` stacked query rows (rows times heads of a group), `keys` per iteration."""

    rows: int
    keys: int


@dataclass(frozen=True, eq=False)
class Tiles:
    """One step's tiles, by kind, longest first, and how their partials are merged; all arrays are int32."""

    kinds: tuple[Int32, ...]  # for each shape [HEADER + tiles * FIELDS]
    block_ids: Int32
    row_ids: Int32
    positions: Int32  # [query rows]
    merge_rows: Int32  # [HEADER + rows that need a merge]
    merge_offset: Int32  # [rows that need a merge + 1]
    merge_ids: Int32  # [partials] in the order of their keys
    num_partials: int

    @property
    def num_rows(self) -> int:
        """The number of query rows of the step."""
        return len(self.positions)

    @property
    def num_merges(self) -> int:
        """The number of rows that need a merge."""
        return len(self.merge_rows) - HEADER

    def num_tiles(self, kind: int) -> int:
        """Return the number of tiles of one kind."""
        return (len(self.kinds[kind]) - HEADER) // FIELDS


def build(
    work: WorkList,
    shapes: tuple[Shape, ...],
    group: int,
    *,
    spread: float | Sequence[float] = 1,
    split: int | None = None,
) -> Tiles:
    """Cut `work` into tiles of these shapes (from few rows to many), for `group` query heads per kv head.

    Each kind is a launch of its own. Its keys are cut for the least time if `spread` of its tiles run at once (a number
    for each kind, or one for all). With `split` they are cut into even parts of about `split` keys in every step: a
    row's result then depends on no other row, if no run is shared either. The group must fit into the largest shape.
    Costs about 80 numpy calls and O(rows + partials): 0.3 ms for 64 sequences.
    """
    assert group <= shapes[-1].rows, f"{group} heads a group do not fit into tiles of {shapes[-1].rows} rows"
    return _Cut(work, shapes, group).tiles(spread, split)


def added_tiles(spread: float | Sequence[float], kinds: int) -> list[int]:
    """Return, for each kind, the most tiles that are added to keep a GPU busy."""
    return [max(1, int(WAVES * each)) for each in _each(spread, kinds)]


def _each(spread: float | Sequence[float], kinds: int) -> Sequence[float]:
    return spread if isinstance(spread, Sequence) else [spread] * kinds


class _Cut:
    """The steps of `build`: items -> row tiles -> tiles, each a set of parallel arrays."""

    def __init__(self, work: WorkList, shapes: tuple[Shape, ...], group: int) -> None:
        self.work, self.shapes, self.group = work, shapes, group
        self.start, self.stop, self.block, self.row_offset, self.rows = _fused(work)
        self._cut_rows(group)
        self._trim()

    def _cut_rows(self, group: int) -> None:
        """Cut each item's rows into row tiles of the largest shape, then give each the smallest shape that fits."""
        tall = self.shapes[-1].rows // group
        item, ordinal = _repeated(-(-self.rows // tall))
        self.row_offset = self.row_offset[item] + ordinal * tall
        self.rows = np.minimum(self.rows[item] - ordinal * tall, tall)
        self.start, self.stop, self.block = self.start[item], self.stop[item], self.block[item]
        self.kind = np.searchsorted([shape.rows for shape in self.shapes], self.rows * group)

    def _trim(self) -> None:
        """Drop the keys that no row of a row tile sees, and row tiles without keys."""
        self.origin = self.start // self.work.block_size  # the ordinal of the block that `block` points to
        tile, within = _repeated(self.rows)
        seen_from = self.work.positions[self.work.row_ids[self.row_offset[tile] + within]].astype(np.int64)
        edges = np.cumsum(self.rows) - self.rows
        self.lowest, self.highest = (
            f.reduceat(seen_from, edges) if len(edges) else edges for f in (np.minimum, np.maximum)
        )
        self.stop = np.minimum(self.stop, self.highest + 1)
        if self.work.window is not None:
            self.start = np.maximum(self.start, self.lowest - self.work.window + 1)
        self._take(np.flatnonzero(self.start < self.stop))

    def _take(self, index: Int) -> None:
        """Keep or repeat tiles by their index."""
        for name in ("start", "stop", "block", "origin", "row_offset", "rows", "kind", "lowest", "highest"):
            setattr(self, name, getattr(self, name)[index])

    def tiles(self, spread: float | Sequence[float], split: int | None) -> Tiles:
        """Cut the keys, then lay out the arrays."""
        length = self.stop - self.start
        if split is not None:
            self._cut_keys(np.maximum(1, (length + split // 2) // split))
        else:
            count = np.ones_like(length)
            for kind, at_once in enumerate(_each(spread, len(self.shapes))):
                tile = np.flatnonzero(self.kind == kind)
                if len(tile):
                    count[tile] = _part_counts(length[tile], self.rows[tile] * self.group, at_once)
            self._cut_keys(count)
        partial_offset, merge_rows, merge_offset, merge_ids = self._merges()
        records = self._records(partial_offset)
        longest_first = np.lexsort((self.start - self.stop, self.kind))
        ends = np.searchsorted(self.kind[longest_first], np.arange(len(self.shapes) + 1))
        kinds = [_with_header(records[longest_first[a:b]]) for a, b in itertools.pairwise(ends)]
        return Tiles(
            kinds=tuple(kinds),
            block_ids=np.concatenate([self.work.block_ids, np.zeros(OVERREAD, dtype=np.int32)]),
            row_ids=self.work.row_ids,
            positions=self.work.positions,
            merge_rows=_with_header(merge_rows),
            merge_offset=merge_offset.astype(np.int32),
            merge_ids=merge_ids.astype(np.int32),
            num_partials=len(merge_ids),
        )

    def _cut_keys(self, count: Int) -> None:
        """Cut each tile into about `count` even parts, on block boundaries."""
        size, length = self.work.block_size, self.stop - self.start
        unit = np.array([np.lcm(shape.keys, size) for shape in self.shapes])[self.kind]
        part = -(-length // (count * unit)) * unit
        base = self.start // size * size
        tile, ordinal = _repeated(-(-(self.stop - base) // part))
        part, base = part[tile], base[tile]
        self._take(tile)
        self.start = np.maximum(self.start, base + ordinal * part)
        self.stop = np.minimum(self.stop, base + (ordinal + 1) * part)

    def _merges(self) -> tuple[Int, Int, Int, Int]:
        """Return the place of each tile's partials, and the partials that each row merges."""
        tile, within = _repeated(self.rows)
        row = self.work.row_ids[self.row_offset[tile] + within].astype(np.int64)
        total = len(self.work.positions)
        times = np.bincount(row, minlength=total)
        edges = np.cumsum(self.rows) - self.rows
        done = np.maximum.reduceat(times[row], edges) == 1 if len(edges) else np.empty(0, dtype=np.bool_)
        counted = np.where(done, 0, self.rows)
        partial_offset = np.where(done, -1, np.cumsum(counted) - counted)
        left = ~done[tile]
        row, start = row[left], self.start[tile][left]
        partials = np.bincount(row, minlength=total)
        merge_rows = np.flatnonzero((partials > 0) | (times == 0))
        merge_offset = np.concatenate(([0], np.cumsum(partials[merge_rows])))
        return partial_offset, merge_rows, merge_offset, np.lexsort((start, row))

    def _records(self, partial_offset: Int) -> Int32:
        """Return the tiles' numbers [tiles, FIELDS]."""
        size = self.work.block_size
        position = self.start // size * size
        keys = np.array([shape.keys for shape in self.shapes])[self.kind]
        seen_by_all = self.start
        if self.work.window is not None:
            seen_by_all = np.maximum(self.start, self.highest - self.work.window + 1)
        clear_from = -(-(seen_by_all - position) // keys)
        clear_to = (np.minimum(self.stop, self.lowest + 1) - position) // keys
        some = clear_to > clear_from
        block = self.block + position // size - self.origin
        records = np.zeros((len(position), FIELDS), dtype=np.int32)
        keys_of = (block, position, self.start - position, self.stop - position)
        clear = (np.where(some, clear_from, 0), np.where(some, clear_to, 0))
        records[:, :9] = np.stack([*keys_of, self.row_offset, self.rows, *clear, partial_offset], axis=1)
        return records


def _fused(work: WorkList) -> tuple[Int, Int, Int, Int, Int]:
    """Return start, stop, block offset, row offset and rows of the items; adjacent items with equal rows are joined."""
    start, rows, offset = (a.astype(np.int64) for a in (work.kv_start, work.rows, work.row_offset))
    stop, table = start + work.tokens, work.block_offset - start // work.block_size
    block = work.block_offset.astype(np.int64)
    if len(start) < 2:
        return start, stop, block, offset, rows
    first, last = work.row_ids[offset], work.row_ids[offset + rows - 1]
    joined = (stop[:-1] == start[1:]) & (table[:-1] == table[1:]) & (last - first + 1 == rows)[:-1]
    joined &= (first[:-1] == first[1:]) & (last[:-1] == last[1:]) & (rows[:-1] == rows[1:])
    heads, tails = np.concatenate(([True], ~joined)), np.concatenate((~joined, [True]))
    return start[heads], stop[tails], block[heads], offset[heads], rows[heads]


def _part_counts(length: Int, stacked: Int, at_once: float) -> Int:
    """Return the number of parts for each tile of one launch, given their keys and stacked rows; `at_once` parts run.

    Compares parts that fill the GPU one to WAVES times. Time is counted in keys that a program reads: the longest part,
    or the average parts of a program, and the partials, shared by all programs. Of equal times, the fewest parts win.
    """
    if length.max() < 2 * SHORTEST:
        return np.ones_like(length)
    total, waves = int(length.sum()), np.arange(1, WAVES + 1)
    wanted = np.maximum(1, (waves * at_once).astype(np.int64))
    count = np.maximum(1, np.minimum(length * wanted[:, None] // total, length // SHORTEST))  # [waves, tiles]
    longest, tiles = (-(-length // count)).max(1), count.sum(1)
    turns = np.ceil(tiles / at_once) * total / tiles
    partials = (np.where(count > 1, count, 0) * stacked).sum(1) * PARTIAL / at_once
    best: Int = count[np.argmin(np.maximum(longest, turns) + partials)]
    return best


def _repeated(counts: Int) -> tuple[Int, Int]:
    """Repeat each index `counts` times; return the indices and the ordinal of each repetition."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _with_header(records: NDArray[np.signedinteger]) -> Int32:
    """Return the number of records, padded to HEADER numbers, then the records; one run of int32."""
    header = np.zeros(HEADER, dtype=np.int32)
    header[0] = len(records)
    return np.concatenate([header, records.astype(np.int32).ravel()])
