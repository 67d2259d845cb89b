"""Attention of query rows over keys that each reads alone: the private tails of a decode step.

Long runs of adjacent blocks are read in place, all other blocks are gathered. Tails of similar shape form a
`PrivateAttention`, whose scores are one padded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv_kernels.work_list import WorkList


class QueryRows:
    """Some of a step's query rows: indices [n], all different; adjacent rows are read and written in place."""

    def __init__(self, rows: NDArray[np.int64], constant: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """Find out whether the rows are one range, in order; if not, `constant` makes their index on the device."""
        self.count = len(rows)
        adjacent = self.count > 0 and bool((rows == rows[0] + np.arange(self.count)).all())
        self.start = int(rows[0]) if adjacent else None
        self._index = torch.empty(0, dtype=torch.int64) if adjacent else constant(rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count

    def covers(self, total: int) -> bool:
        """Return whether these are all rows of a step that has `total`, in order."""
        return self.start == 0 and self.count == total

    def pick(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor [T, ...]; a view if they are adjacent."""
        if self.covers(len(tensor)):
            return tensor
        return tensor.index_select(0, self._index) if self.start is None else tensor.narrow(0, self.start, self.count)

    def put(self, total: Tensor, output: Tensor) -> None:
        """Set these rows of `total` to output [n, kv_heads, group, dv]."""
        if self.start is None:
            total.index_copy_(0, self._index, output)
        else:
            total.narrow(0, self.start, self.count).copy_(output)

    def add(self, total: Tensor, output: Tensor, share: Tensor) -> None:
        """Add output [n, kv_heads, group, dv], weighed by share [n, kv_heads, group], to these rows of `total`."""
        if self.start is None:
            total.index_add_(0, self._index, output * share[..., None])
        else:
            total.narrow(0, self.start, self.count).addcmul_(output, share[..., None])


Int = NDArray[np.int64]

VIEW_BLOCKS = 8
"""From this number of adjacent blocks on, a product over a view is cheaper than gathering them."""

SCORE_CELLS = 4096
"""Padded keys of one batch, at most, unless it has a single tail: its scores stay in a core's own cache."""


@dataclass(frozen=True)
class _View:
    """Adjacent slots of the pool that one tail reads in place."""

    tail: int
    slot: int
    tokens: int


class PrivateLayout:
    """The blocks of a work list's tails: long runs of adjacent blocks are views, all others are gathered."""

    def __init__(self, work: WorkList, items: Int, reads_in_place: bool) -> None:
        self.block_size = work.block_size
        self.skip = work.kv_start[items].astype(np.int64) % work.block_size  # slots before the first key
        self.end = self.skip + work.tokens[items]
        counts = -(-self.end // work.block_size)
        self.tail = np.repeat(np.arange(len(items)), counts)
        self.ordinal = np.arange(len(self.tail)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks = work.block_ids[np.repeat(work.block_offset[items], counts) + self.ordinal].astype(np.int64)
        self.first_slot = self.blocks[np.cumsum(counts) - counts] * work.block_size + self.skip
        self.views: list[list[_View]] = [[] for _ in items]
        gathered = self._find_views() if reads_in_place else np.ones(len(self.blocks), dtype=np.bool_)
        self.tail, self.ordinal, self.blocks = self.tail[gathered], self.ordinal[gathered], self.blocks[gathered]
        self.gathered = np.bincount(self.tail, minlength=len(items))  # [tails] blocks to gather
        self.viewed = np.array([sum(view.tokens for view in views) for views in self.views], dtype=np.int64)

    def _find_views(self) -> NDArray[np.bool_]:
        """Put the long runs into `views`; return True for each block outside of them. Views never overlap."""
        edge = np.ones(len(self.blocks) + 1, dtype=np.bool_)
        edge[1:-1] = (np.diff(self.blocks) != 1) | (np.diff(self.tail) != 0)
        starts = np.flatnonzero(edge)
        lengths = np.diff(starts)
        chosen, free = lengths >= VIEW_BLOCKS, 0
        for run in sorted(np.flatnonzero(chosen).tolist(), key=lambda run: int(self.blocks[starts[run]])):
            first, length = int(starts[run]), int(lengths[run])
            chosen[run] = self.blocks[first] >= free
            if chosen[run]:
                self._add_view(first, length)
                free = int(self.blocks[first]) + length
        return np.repeat(~chosen, lengths)

    def _add_view(self, first: int, length: int) -> None:
        """Add blocks[first : first + length] as a view of the slots that their tail reads."""
        tail, origin = int(self.tail[first]), int(self.ordinal[first]) * self.block_size
        start = max(int(self.skip[tail]), origin)
        stop = min(int(self.end[tail]), origin + length * self.block_size)
        slot = int(self.blocks[first]) * self.block_size + start - origin
        self.views[tail].append(_View(tail, slot, stop - start))

    def batches(self) -> Iterator[Int]:
        """Yield the tails in groups of similar shape, for little padding, with few enough scores for a core's cache."""
        width = self.viewed + self.gathered * self.block_size
        batch: list[int] = []
        widest = 0
        for tail in np.lexsort((self.viewed, self.gathered))[::-1].tolist():
            widest = max(widest, int(width[tail]))
            if batch and not (self._similar(batch[0], tail) and widest * (len(batch) + 1) <= SCORE_CELLS):
                yield np.sort(batch)
                batch, widest = [], int(width[tail])
            batch.append(tail)
        if batch:
            yield np.sort(batch)

    def _similar(self, first: int, tail: int) -> bool:
        """Return whether `tail` fits into a batch that began with `first`, which gathers at least as much."""
        low, high = sorted((int(self.viewed[first]), int(self.viewed[tail])))
        return bool(4 * (self.gathered[tail] + 4) >= 3 * self.gathered[first]) and high <= 2 * low + 128


class PrivateAttention:
    """Attention of tails of similar shape, with scores in one padded tensor [n, kv_heads, group, width].

    Its columns are the keys of the gathered blocks, then the keys of the views. Values are not gathered: an embedding
    bag sums rows of a table by index and weight, in less time than a product takes over contiguous values.
    """

    def __init__(self, layout: PrivateLayout, tails: Int, rows: Int, kv_heads: int, group: int, store: KVStore) -> None:
        """Lay out the scores, once per step; `rows` [n] are the query rows of `tails`."""
        self.size, self.kv_heads, self.group = len(tails), kv_heads, group
        self.rows = QueryRows(rows, store.constant)
        number = np.full(len(layout.views), -1)
        number[tails] = np.arange(len(tails))
        blocks, hidden = self._blocks(layout, tails, number)
        self._plan_gather(blocks, hidden, store)
        self._plan_scores(self.columns + int(layout.viewed[tails].max()), store)
        views = sorted((view for tail in tails.tolist() for view in layout.views[tail]), key=lambda view: view.slot)
        filled = self._plan_views(views, number, store)
        self._plan_values(layout.first_slot[tails], blocks, hidden, views, store)
        self.padding = np.arange(self.scores.shape[-1]) >= np.array(filled)[:, None]
        self.padding[:, : self.columns] = hidden
        self._padded: Tensor | None = None

    def _blocks(self, layout: PrivateLayout, tails: Int, number: Int) -> tuple[Int, NDArray[np.bool_]]:
        """Return the blocks to gather [n, most of a tail], padded, and the slots [n, columns] without a key."""
        counts = layout.gathered[tails]
        chosen = np.flatnonzero(number[layout.tail] >= 0)
        row, origin = number[layout.tail[chosen]], layout.ordinal[chosen] * layout.block_size
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.zeros((self.size, int(counts.max())), dtype=np.int64)
        blocks[row, place] = layout.blocks[chosen]
        first, last = np.zeros_like(blocks), np.zeros_like(blocks)  # of each block's slots, those that hold keys
        first[row, place] = layout.skip[tails[row]] - origin
        last[row, place] = layout.end[tails[row]] - origin
        within = np.arange(layout.block_size)
        hidden = (within < first[..., None]) | (within >= last[..., None])
        return blocks, hidden.reshape(self.size, blocks.shape[1] * layout.block_size)

    def _plan_gather(self, blocks: Int, hidden: NDArray[np.bool_], store: KVStore) -> None:
        """Find the regions of the gathered keys, and the first column in which some keys must be hidden."""
        self.columns = hidden.shape[1]
        self.regions = store.regions(blocks, self.kv_heads)
        self.first_hidden = int(hidden.any(0).argmax()) if hidden.any() else self.columns
        self.hidden = store.constant(hidden[:, None, None, self.first_hidden :])

    def _plan_scores(self, width: int, store: KVStore) -> None:
        """Allocate the scores, minus infinity where no product will write, and the weights."""
        shape = (self.size, self.kv_heads, self.group, width)
        with torch.inference_mode(False):
            self.scores = torch.full(shape, -torch.inf, dtype=store.compute_dtype, device=store.device)
            self.weights = torch.empty_like(self.scores)
        self.gathered_scores = self.scores.flatten(0, 1)[..., : self.columns]
        self.hidden_scores = self.scores[..., self.first_hidden : self.columns]

    def _plan_views(self, views: list[_View], number: Int, store: KVStore) -> list[int]:
        """Cut the pool so that each view is a piece, and find its scores; return the columns used per row."""
        self.sizes: list[int] = []
        self.view_rows = [int(number[view.tail]) for view in views]
        self.view_places: list[slice] = []
        filled, position = [self.columns] * self.size, 0
        for view, row in zip(views, self.view_rows, strict=True):
            self.sizes += [view.slot - position, view.tokens]
            position = view.slot + view.tokens
            self.view_places.append(slice(filled[row], filled[row] + view.tokens))
            filled[row] += view.tokens
        self.sizes.append(store.num_blocks * store.block_size - position)
        places = zip(self.view_rows, self.view_places, strict=True)
        self.view_scores = [self.scores[row, :, :, place] for row, place in places]
        return filled

    def _plan_values(
        self, first: Int, blocks: Int, hidden: NDArray[np.bool_], views: list[_View], store: KVStore
    ) -> None:
        """Find the row of the value table for each weight; a weight of 0 gets a row that surely holds numbers."""
        slots = np.repeat(first[:, None], self.scores.shape[-1], axis=1)
        gathered = (blocks[..., None] * store.block_size + np.arange(store.block_size)).reshape(hidden.shape)
        np.copyto(slots[:, : self.columns], gathered, where=~hidden)
        for view, row, place in zip(views, self.view_rows, self.view_places, strict=True):
            slots[row, place] = np.arange(view.slot, view.slot + view.tokens)
        rows = store.rows(slots, self.kv_heads).astype(np.int32 if store.num_rows < 2**31 else np.int64)
        index = np.repeat(rows[:, :, None], self.group, axis=2).reshape(-1)
        self.value_rows = store.constant(index)
        self.bags = torch.arange(0, len(index), slots.shape[1], dtype=self.value_rows.dtype, device=store.device)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        query = self.rows.pick(query) * scale
        self._score(store, store.keys[layer], query)
        scores = self.scores
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap).masked_fill_(self._padding_of(store), -torch.inf)
        torch.softmax(scores, -1, out=self.weights)
        lse = scores.amax(-1) - self.weights.amax(-1).log_() if need_lse else None
        table = store.table(store.values[layer])
        weights = self.weights.view(-1).to(store.dtype)
        output = F.embedding_bag(self.value_rows, table, self.bags, mode="sum", per_sample_weights=weights)
        return output.view(*query.shape[:3], -1).to(store.compute_dtype), lse

    def _padding_of(self, store: KVStore) -> Tensor:
        """Return `padding` [n, 1, 1, width] on the device, which the first layer with a softcap copies there."""
        if self._padded is None:
            self._padded = store.constant(self.padding)[:, None, None]
        return self._padded

    def _score(self, store: KVStore, pool: Tensor, query: Tensor) -> None:
        """Fill `scores`: one product for all gathered keys, one for each view."""
        if self.columns:
            key = store.read(pool, self.regions)
            torch.bmm(query.flatten(0, 1), key.transpose(1, 2), out=self.gathered_scores)
        if self.first_hidden < self.columns:
            self.hidden_scores.masked_fill_(self.hidden, -torch.inf)
        if self.view_rows:
            rows, keys = query.unbind(0), store.views(pool, self.sizes)
            for key, row, part in zip(keys, self.view_rows, self.view_scores, strict=True):
                torch.bmm(rows[row], key, out=part)


def private_attention(
    work: WorkList, items: Int, store: KVStore, kv_heads: int, group: int
) -> Iterator[tuple[PrivateAttention, Int]]:
    """Yield the operations of these items, which have one query row each, and the places of their partials."""
    layout = PrivateLayout(work, items, store.reads_in_place)
    for batch in layout.batches():
        places = work.row_offset[items[batch]].astype(np.int64)
        rows = work.row_ids[places].astype(np.int64)
        yield PrivateAttention(layout, batch, rows, kv_heads, group, store), places
