"""Build the work list of a step from its block tables: which query rows read which keys.

Sequences that share a prefix share block *ids*, so sorting the tables shows the tree of prefixes (`group`). Keys of a
shared run are listed once for all of its rows, keys of a private tail once for each sequence. Every visible (row, key)
pair is listed exactly once.

Layers that attend in chunks (a token sees only earlier tokens of its own chunk of absolute positions) need no mask of
their own: `cut_chunks` turns each chunk into a sequence that starts where the chunk starts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidInput
from radixkv_kernels.work_list import WorkList

Int = NDArray[np.int64]
Table = NDArray[np.int32]
Run = tuple[int, int, Int]
"""A shared run: blocks [start, stop) of a path, and the sequences that read it, ascending."""

MIN_SAVING = 256
"""Token reads that a shared run must save to become an item: below this, the item costs more than it saves."""

NEVER_SHARE = 1 << 62
"""A `min_saving` with which no run is shared: each sequence is then read the same way in every batch."""

BAND = 256
"""Query rows of a prefill that form one band under a window: taller bands waste masks, lower ones waste calls."""


def build(
    block_tables: Sequence[Sequence[int] | NDArray[np.int32]],
    kv_lengths: Sequence[int],
    query_lengths: Sequence[int],
    window: int | None = None,
    previous: WorkList | None = None,
    *,
    block_size: int,
    min_saving: int = MIN_SAVING,
    max_tokens: int | None = None,
    max_shared_rows: int | None = None,
    short_chunk: int = 1,
) -> WorkList:
    """Return the work list of a step: each shared run once for all of its rows, then each sequence's private tail.

    Sequence `s` reads `kv_lengths[s]` keys, this step's own included, for its last `query_lengths[s]` positions; with
    0 it takes no part in the step. `window` is the model's sliding window. `previous` is the last step's list: its tree
    is reused while the batch keeps its members and only tails grow, and any other list is ignored. `max_tokens` cuts
    longer items, so that many processors share the work. `max_shared_rows` bounds the query rows of all shared runs
    together, as `merge_runs` does. Each row of a chunk of up to `short_chunk` rows has an item of its own, as a decode
    has. Raises InvalidInput for lengths that do not fit. Costs one comparison of all tables
    (0.1 ms at 64 sequences), and a sort of them if the tree is new.
    """
    tables = [np.asarray(table, dtype=np.int32) for table in block_tables]
    kv, queries = np.asarray(kv_lengths, dtype=np.int64), np.asarray(query_lengths, dtype=np.int64)
    if min(x for x in (block_size, window, max_tokens) if x is not None) < 1:
        raise InvalidInput(
            f"block size, window and max_tokens must be at least 1: {block_size}, {window}, {max_tokens}"
        )
    if not len(tables) == len(kv) == len(queries):
        raise InvalidInput(f"{len(tables)} tables, {len(kv)} kv lengths and {len(queries)} query lengths do not match")
    if len(tables) and (queries.min() < 0 or (kv < queries).any()):
        raise InvalidInput("a query length must lie between 0 and the kv length, which counts this step's tokens too")
    capacity = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables)) * block_size
    if (capacity < kv).any():
        index = int(np.argmax(capacity < kv))
        raise InvalidInput(f"table {index} has room for {capacity[index]} tokens, its kv length is {kv[index]}")
    offset = np.concatenate(([0], np.cumsum(capacity // block_size)))
    batch = Batch(np.concatenate(tables) if tables else np.empty(0, dtype=np.int32), offset, kv, queries)
    grouping = None
    if previous is not None and isinstance(previous.origin, Grouping) and previous.block_size == block_size:
        grouping = previous.origin.grown(batch, min_saving, max_shared_rows)
    if grouping is None:
        grouping = group(batch, block_size, min_saving, max_shared_rows)
    return _ListBuilder(grouping, window, block_size, max_tokens, short_chunk).work_list()


@dataclass(frozen=True)
class _Piece:
    """Keys [start, stop) of the path of sequence `owner`, read by the query rows `rows`."""

    owner: int
    start: int
    stop: int
    rows: Int


class _ListBuilder:
    """Lays out one step's items from the grouping and the lengths."""

    def __init__(
        self,
        grouping: Grouping,
        window: int | None,
        block_size: int,
        max_tokens: int | None,
        short_chunk: int,
    ) -> None:
        self.grouping, self.batch = grouping, grouping.batch
        self.kv, self.queries = kv, queries = self.batch.kv_lengths, self.batch.query_lengths
        self.block_size, self.max_tokens, self.short_chunk = block_size, max_tokens, short_chunk
        # A window that covers every context is ignored, which saves masks.
        self.window = window if window is not None and len(kv) and int(kv.max()) > window else None
        self.first = kv - queries  # position of each sequence's first query row
        self.row_start = np.concatenate(([0], np.cumsum(queries)))
        self.declared_window = window

    def work_list(self) -> WorkList:
        pieces = [piece for index in np.flatnonzero(self.queries > 1).tolist() for piece in self._chunk(index)]
        owner, start, stop, rows, row_ids = self._arrays(pieces)
        positions = np.repeat(self.first - self.row_start[:-1], self.queries) + np.arange(self.row_start[-1])
        row_offset = np.cumsum(rows) - rows
        seen_from = positions[row_ids]
        lowest, highest = (f.reduceat(seen_from, row_offset) if len(rows) else rows for f in (np.minimum, np.maximum))
        visible = stop - 1 <= lowest
        if self.window is not None:
            visible &= highest - self.window < start
        counts = np.bincount(row_ids, minlength=len(positions))
        return WorkList(
            block_size=self.block_size,
            window=self.declared_window,
            block_offset=(self.batch.table_offset[owner] + start // self.block_size).astype(np.int32),
            kv_start=start.astype(np.int32),
            tokens=(stop - start).astype(np.int32),
            row_offset=row_offset.astype(np.int32),
            rows=rows.astype(np.int32),
            fully_visible=visible,
            block_ids=self.batch.block_ids,
            row_ids=row_ids.astype(np.int32),
            positions=positions.astype(np.int32),
            merge_offset=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            merge_ids=np.lexsort((np.repeat(start, rows), row_ids)).astype(np.int32),
            origin=self.grouping,
        )

    def _shared(self) -> tuple[Int, Int]:
        """Return shared runs stacked as in `_arrays`, and the rows of their members whose window reaches them."""
        runs = self.grouping.runs
        members, counts, start, stop = runs.members, self.queries[runs.members], runs.start, runs.stop
        edges = np.cumsum(runs.counts) - runs.counts
        if self.window is not None:
            run = np.repeat(np.arange(len(start)), runs.counts)
            counts = np.clip(stop[run] - 1 + self.window - self.first[members], 0, counts)
            reached = np.flatnonzero(counts)
            members, counts = members[reached], counts[reached]
            kept, edges = np.unique(run[reached], return_index=True)
            start, stop = start[kept], stop[kept]
        if not len(start):
            return np.empty((4, 0), dtype=np.int64), np.empty(0, dtype=np.int64)
        if self.window is not None:
            start = np.maximum(start, np.minimum.reduceat(self.first[members], edges) - self.window + 1)
        rows = np.add.reduceat(counts, edges)
        row_ids = np.repeat(self.row_start[members] - (np.cumsum(counts) - counts), counts)
        return np.stack([members[edges], start, stop, rows]), row_ids + np.arange(len(row_ids))

    def _chunk(self, index: int) -> list[_Piece]:
        """Cut a sequence with several query rows into keys that all rows see and the diagonal; in bands if windowed."""
        tail, first, length = int(self.grouping.private_start[index]), int(self.first[index]), int(self.kv[index])
        if length - first <= self.short_chunk:
            return self._rows(index)
        window, height = length + 1, length - first
        if self.window is not None and length > self.window:
            window, height = self.window, min(max(self.window, 64), BAND)
        row, pieces = int(self.row_start[index]) - first, []
        for top in range(first, length, height):
            bottom = min(top + height, length)
            low = max(tail, top - window + 1)
            edges = low, max(low, min(top, bottom - window)), max(low, top), bottom
            rows = np.arange(row + top, row + bottom)
            pieces += [_Piece(index, start, stop, rows) for start, stop in itertools.pairwise(edges) if start < stop]
        return pieces

    def _rows(self, index: int) -> list[_Piece]:
        """Cut a sequence's keys for each of its query rows, as for a decode."""
        tail, first, row = int(self.grouping.private_start[index]), int(self.first[index]), int(self.row_start[index])
        pieces = []
        for place in range(first, int(self.kv[index])):
            start = tail if self.window is None else max(tail, place - self.window + 1)
            if start <= place:
                pieces.append(_Piece(index, start, place + 1, np.array([row + place - first])))
        return pieces

    def _arrays(self, pieces: list[_Piece]) -> tuple[Int, Int, Int, Int, Int]:
        """Return owner, start, stop and rows [items], and row_ids, of shared runs, pieces and tails with one row."""
        shared, shared_rows = self._shared()
        single = np.flatnonzero(self.queries == 1)
        start = self.grouping.private_start[single]
        if self.window is not None:
            start = np.maximum(start, self.first[single] - self.window + 1)
        single, start = single[start < self.kv[single]], start[start < self.kv[single]]
        table = np.array([(p.owner, p.start, p.stop, len(p.rows)) for p in pieces], dtype=np.int64).reshape(-1, 4)
        tails = np.stack([single, start, self.kv[single], np.ones_like(single)])
        owner, start, stop, rows = np.concatenate([shared, table.T, tails], axis=1)
        row_ids = np.concatenate([shared_rows, *(p.rows for p in pieces), self.row_start[single]])
        if self.max_tokens is None or not (stop - start > self.max_tokens).any():
            return owner, start, stop, rows, row_ids
        return self._cut(owner, start, stop, rows, row_ids, self.max_tokens)

    def _cut(
        self, owner: Int, start: Int, stop: Int, rows: Int, row_ids: Int, most: int
    ) -> tuple[Int, Int, Int, Int, Int]:
        """Cut the items into items of at most `most` keys."""
        cuts = -(-(stop - start) // most)
        item = np.repeat(np.arange(len(cuts)), cuts)
        ordinal = np.arange(len(item)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        first = start[item] + ordinal * most
        row_offset = np.cumsum(rows) - rows
        copies = [row_ids[row_offset[i] : row_offset[i] + rows[i]] for i in item]
        return owner[item], first, np.minimum(first + most, stop[item]), rows[item], np.concatenate(copies)


@dataclass(frozen=True, eq=False)
class SharedRuns:
    """Runs of tokens [start, stop), on block boundaries, that several sequences share; parents before children.

    They are kept as arrays, because every step lays out its list from them until the tree changes.
    """

    start: Int  # [runs]
    stop: Int  # [runs]
    counts: Int  # [runs] members
    members: Int  # sequence indices of all runs in turn, ascending within a run


class Batch(NamedTuple):
    """The sequences of a step."""

    block_ids: Table  # all tables, end to end
    table_offset: Int  # [sequences + 1] where each table starts in block_ids
    kv_lengths: Int
    query_lengths: Int

    def begins_with(self, old: Batch) -> bool:
        """Return whether each table begins with a table of `old`, which has as many sequences."""
        more = np.diff(self.table_offset) - np.diff(old.table_offset)
        if (more < 0).any():
            return False
        new, before = 0, 0
        for index in np.flatnonzero(more).tolist():  # few tables grow in a step: those between two are one comparison
            end = int(old.table_offset[index + 1])
            if not np.array_equal(self.block_ids[new : new + end - before], old.block_ids[before:end]):
                return False
            new, before = int(self.table_offset[index + 1]), end
        return np.array_equal(self.block_ids[new:], old.block_ids[before:])


@dataclass(frozen=True, eq=False)
class Grouping:
    """The shared runs of a batch, and where each sequence's private tail starts."""

    runs: SharedRuns
    private_start: Int  # [sequences] first token that only this sequence reads
    batch: Batch
    min_saving: int
    max_shared_rows: int | None

    def grown(self, batch: Batch, min_saving: int, max_shared_rows: int | None) -> Grouping | None:
        """Return this grouping for tables that have only grown at their ends; None if anything else has changed."""
        before, limits = self.batch, (min_saving, max_shared_rows)
        if limits != (self.min_saving, self.max_shared_rows) or len(batch.kv_lengths) != len(before.kv_lengths):
            return None
        if (batch.kv_lengths < before.kv_lengths).any():
            return None
        had, has = before.query_lengths, batch.query_lengths  # counts, if the rows of runs are bounded
        same_rows = np.array_equal(had > 0, has > 0) if max_shared_rows is None else np.array_equal(had, has)
        return replace(self, batch=batch) if same_rows and batch.begins_with(before) else None


def group(batch: Batch, block_size: int, min_saving: int, max_shared_rows: int | None = None) -> Grouping:
    """Find the tree in the tables: sort them, compare neighbours, split where they differ.

    Only blocks that are full for every member are shared: after the fill mark of a common block, each sequence may
    have appended tokens of its own. A run that saves fewer than `min_saving` token reads is left to its children.
    """
    starts, blocks = batch.table_offset.tolist(), (batch.kv_lengths // block_size).tolist()
    full = [batch.block_ids[start : start + count] for start, count in zip(starts, blocks, strict=False)]
    order = sorted(np.flatnonzero(batch.query_lengths > 0).tolist(), key=lambda index: full[index].tobytes())
    common = [_common(full[a], full[b]) for a, b in itertools.pairwise(order)]
    runs, private = _split(np.array(order, dtype=np.int64), common, len(full), -(-min_saving // block_size))
    if max_shared_rows is not None:
        runs, private = merge_runs(runs, private, batch.query_lengths, max_shared_rows)
    start, stop = (np.array([run[i] for run in runs], dtype=np.int64) * block_size for i in range(2))
    counts = np.array([len(members) for *_, members in runs], dtype=np.int64)
    joined = np.concatenate([members for *_, members in runs]) if runs else np.empty(0, dtype=np.int64)
    shared = SharedRuns(start, stop, counts, joined)
    return Grouping(shared, private * block_size, batch, min_saving, max_shared_rows)


def _common(a: Table, b: Table) -> int:
    """Return the number of leading blocks that two tables have in common."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _split(order: Int, common: list[int], sequences: int, min_saving: int) -> tuple[list[Run], Int]:
    """Return runs in blocks, each (start, stop, members), and the first private block of each sequence.

    `order` has the sequences in the order of their tables, `common` the overlap of neighbours. Not recursive.
    """
    runs: list[Run] = []
    private = np.zeros(sequences, dtype=np.int64)
    waiting = [(0, len(order), 0)]
    while waiting:
        low, high, start = waiting.pop()
        if high - low < 2:
            private[order[low:high]] = start
            continue
        stop = min(common[low : high - 1])
        if stop > start and (stop - start) * (high - low - 1) >= min_saving:
            runs.append((start, stop, np.sort(order[low:high])))
            start = stop
        edges = [low, *(i + 1 for i in range(low, high - 1) if common[i] == stop), high]
        waiting += [(a, b, start) for a, b in itertools.pairwise(edges)]
    return runs, private


def merge_runs(runs: list[Run], private: Int, query_lengths: Int, most: int) -> tuple[list[Run], Int]:
    """Merge shared runs into their children until all runs together have at most `most` query rows.

    A merged run is read once for each child: runs below it, and sequences whose private part follows it. The run with
    the fewest additional reads for each row that it had is merged first. `runs` have parents before children, and
    `private` [sequences] is the first private block; both are returned unchanged if they fit. Costs O(n log n) for n
    runs in most trees, and at most O(n * depth).
    """
    rows = [int(query_lengths[members].sum()) for *_, members in runs]
    excess = sum(rows) - most
    if excess <= 0:
        return runs, private
    deepest = np.full(len(private), -1, dtype=np.int64)
    parents = []
    for number, (*_, members) in enumerate(runs):
        parents.append(int(deepest[members[0]]))
        deepest[members] = number
    below: list[list[int]] = [[] for _ in runs]
    for number, parent in enumerate(parents):
        if parent >= 0:
            below[parent].append(number)
    readers = np.bincount(deepest[deepest >= 0], minlength=len(runs)) + [len(children) for children in below]
    starts, merged = [start for start, *_ in runs], set[int]()

    def cost(number: int) -> float:
        return float((runs[number][1] - starts[number]) * (readers[number] - 1) / rows[number])

    waiting = [(cost(number), number) for number in range(len(runs))]
    heapq.heapify(waiting)
    while excess > 0:
        estimate, number = heapq.heappop(waiting)
        if number in merged:
            continue
        if (now := cost(number)) > estimate:  # costs only grow
            heapq.heappush(waiting, (now, number))
            continue
        merged.add(number)
        excess -= rows[number]
        parent = parents[number]
        if parent >= 0:
            readers[parent] += readers[number] - 1
            below[parent] += below[number]
        for child in below[number]:
            starts[child], parents[child] = starts[number], parent
    return _laid_out([run for number, run in enumerate(runs) if number not in merged], len(private))


def _laid_out(runs: list[Run], sequences: int) -> tuple[list[Run], Int]:
    """Let each run start where its parent stops; return the runs, and the first private block of each sequence."""
    private = np.zeros(sequences, dtype=np.int64)
    found = []
    for _, stop, members in runs:
        found.append((int(private[members[0]]), stop, members))
        private[members] = stop
    return found, private


def check_chunk(chunk: int, block_size: int) -> None:
    """Raise InvalidInput if chunks are not whole blocks: they would begin inside a block that holds other keys."""
    if chunk % block_size:
        raise InvalidInput(f"this model attends in chunks of {chunk} tokens, which block_size={block_size} must divide")


def cut_chunks(
    tables: Sequence[Table], kv_lengths: Sequence[int], query_lengths: Sequence[int], chunk: int, block_size: int
) -> tuple[list[Table], list[int], list[int]]:
    """Return tables, kv lengths and query lengths of the same rows in the same order, with a sequence for each chunk.

    Sequence `s` has rows for its last `query_lengths[s]` positions, at least one. Costs nothing per token.
    """
    check_chunk(chunk, block_size)
    pieces = []
    for table, end, rows in zip(tables, kv_lengths, query_lengths, strict=True):
        first = end - rows
        for start in range(first // chunk * chunk, end, chunk):
            stop = min(start + chunk, end)
            pieces.append((table[start // block_size : -(-stop // block_size)], stop - start, stop - max(start, first)))
    cut_tables, lengths, queries = zip(*pieces, strict=True)
    return list(cut_tables), list(lengths), list(queries)
