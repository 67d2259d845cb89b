"""Many query rows, each over keys that only it reads: the private tails of a decode step.

Knows how the blocks of a tail lie in memory. Does not know the tree, nor rows that share keys (`spans`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv_kernels.work_list import WorkList

from .kv_store import KVStore

Int = NDArray[np.int64]

VIEW_BLOCKS = 8
"""From this many adjacent blocks on, a product over a view is cheaper than gathering them."""

SCORE_CELLS = 4096
"""Padded keys of one batch, at most (but for a single tail): its scores stay in a core's own cache."""


@dataclass(frozen=True)
class _View:
    """Adjacent slots of the pool that one tail reads where they are."""

    tail: int
    slot: int
    tokens: int


class Layout:
    """How the tails of a work list lie in the pool: long runs of adjacent blocks as views, the rest to be gathered."""

    def __init__(self, work: WorkList, items: Int, runs_are_views: bool) -> None:
        self.block_size = work.block_size
        self.skip = work.kv_start[items].astype(np.int64) % work.block_size  # slots before the first key
        self.end = self.skip + work.tokens[items]
        counts = -(-self.end // work.block_size)
        self.tail = np.repeat(np.arange(len(items)), counts)
        self.ordinal = np.arange(len(self.tail)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks = work.block_ids[np.repeat(work.block_offset[items], counts) + self.ordinal].astype(np.int64)
        self.views: list[list[_View]] = [[] for _ in items]
        gathered = self._find_views() if runs_are_views else np.ones(len(self.blocks), dtype=np.bool_)
        self.tail, self.ordinal, self.blocks = self.tail[gathered], self.ordinal[gathered], self.blocks[gathered]
        self.gathered = np.bincount(self.tail, minlength=len(items))  # [tails] blocks to gather
        self.viewed = np.array([sum(view.tokens for view in views) for views in self.views], dtype=np.int64)

    def _find_views(self) -> NDArray[np.bool_]:
        """Note the long runs in `views`; True for each block that is in none. Views never overlap."""
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
        """Note blocks[first : first + length] as a view of the slots that their tail reads."""
        tail, origin = int(self.tail[first]), int(self.ordinal[first]) * self.block_size
        start = max(int(self.skip[tail]), origin)
        stop = min(int(self.end[tail]), origin + length * self.block_size)
        slot = int(self.blocks[first]) * self.block_size + start - origin
        self.views[tail].append(_View(tail, slot, stop - start))

    def batches(self) -> Iterator[Int]:
        """The tails, in groups of similar shape: padding them costs at most a third, and their scores are few."""
        order = np.lexsort((self.viewed, self.gathered))[::-1]
        width = self.viewed + self.gathered * self.block_size
        batch: list[int] = []
        widest = used = used_blocks = 0
        for tail in order.tolist():
            grown = max(widest, int(width[tail])) * (len(batch) + 1)
            blocks = int(self.gathered[batch[0]] if batch else self.gathered[tail]) * (len(batch) + 1)
            enough = grown > SCORE_CELLS or 3 * blocks > 4 * (used_blocks + int(self.gathered[tail])) + 32
            if batch and (enough or 2 * grown > 3 * (used + int(width[tail])) + 256):
                yield np.sort(batch)
                batch, widest, used, used_blocks = [], 0, 0, 0
            batch.append(tail)
            widest, used = max(widest, int(width[tail])), used + int(width[tail])
            used_blocks += int(self.gathered[tail])
        if batch:
            yield np.sort(batch)


class TailBatch:
    """Tails of similar shape, whose scores stand in one padded tensor [n, kv_heads, group, gathered + viewed keys]."""

    def __init__(self, layout: Layout, tails: Int, rows: Int, kv_heads: int, group: int, store: KVStore) -> None:
        """Lay out the scores; `rows` [n] are the query rows of `tails`. Everything here is done once per step."""
        self.size, self.kv_heads, self.group = len(tails), kv_heads, group
        self.rows = torch.from_numpy(rows).to(store.device)
        self.in_order = bool((rows == np.arange(len(rows))).all())
        self.partials = len(tails)
        number = np.full(len(layout.views), -1)
        number[tails] = np.arange(len(tails))
        self._plan_gather(layout, tails, number, store)
        self._plan_scores(layout, tails, number, store)

    def _plan_gather(self, layout: Layout, tails: Int, number: Int, store: KVStore) -> None:
        """Which blocks to gather for each tail, padded with any, and which of the columns that yields hold no key."""
        size = layout.block_size
        counts = layout.gathered[tails]
        chosen = np.flatnonzero(number[layout.tail] >= 0)
        row, origin = number[layout.tail[chosen]], layout.ordinal[chosen] * size
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.zeros((self.size, int(counts.max())), dtype=np.int64)
        blocks[row, place] = layout.blocks[chosen]
        first, last = np.zeros_like(blocks), np.zeros_like(blocks)  # of each block's slots, those that hold keys
        first[row, place] = layout.skip[tails[row]] - origin
        last[row, place] = layout.end[tails[row]] - origin
        slots = np.arange(size)
        hidden = ((slots < first[..., None]) | (slots >= last[..., None])).reshape(self.size, -1)
        self.columns = hidden.shape[1]
        self.regions = store.regions(blocks, self.kv_heads)
        rows, columns = np.nonzero(hidden)
        self._plan_hidden(hidden, rows, columns, store)

    def _plan_hidden(self, hidden: NDArray[np.bool_], rows: Int, columns: Int, store: KVStore) -> None:
        """From the first hidden column on: a mask for scores; and the gathered slots that must not be weighed."""
        self.first_hidden = int(columns.min(initial=self.columns))
        mask = torch.from_numpy(hidden[:, self.first_hidden :]).to(store.device)
        self.hidden = mask[:, None, None] if len(rows) else None
        heads = np.arange(self.kv_heads)[:, None]
        slots = (rows * self.kv_heads + heads) * self.columns + columns
        self.hidden_slots = torch.from_numpy(slots.reshape(-1)).to(store.device)

    def _plan_scores(self, layout: Layout, tails: Int, number: Int, store: KVStore) -> None:
        """The score tensor, minus infinity where no key will stand, and the parts of it that each product fills."""
        width = self.columns + int(layout.viewed[tails].max())
        with torch.inference_mode(False):
            shape = (self.size, self.kv_heads, self.group, width)
            self.scores = torch.full(shape, -torch.inf, dtype=store.compute_dtype, device=store.device)
            self.weights = torch.empty_like(self.scores)
        self.gathered_scores, self.gathered_weights = (
            tensor.flatten(0, 1)[..., : self.columns] for tensor in (self.scores, self.weights)
        )
        self.hidden_scores = self.scores[..., self.first_hidden : self.columns]
        views = sorted((view for tail in tails.tolist() for view in layout.views[tail]), key=lambda view: view.slot)
        self._plan_views(views, number, store)
        self.filled = self.columns + layout.viewed[tails]

    @cached_property
    def padding(self) -> Tensor:
        """[n, 1, 1, width]: which scores belong to no key; only needed where something is done to all scores."""
        padding = np.arange(self.scores.shape[-1]) >= self.filled[:, None]
        mask = torch.from_numpy(padding).to(self.scores.device)[:, None, None]
        if self.hidden is not None:
            mask[..., self.first_hidden : self.columns] = self.hidden
        return mask

    def _plan_views(self, views: list[_View], number: Int, store: KVStore) -> None:
        """Where to cut the pool so that each view is a piece of it, and where the scores of each view stand."""
        self.sizes: list[int] = []
        self.chosen: list[int] = []
        self.view_rows = [int(number[view.tail]) for view in views]
        self.view_scores: list[Tensor] = []
        self.view_weights: list[Tensor] = []
        filled, position = [self.columns] * self.size, 0
        for view, row in zip(views, self.view_rows, strict=True):
            self.sizes += [view.slot - position, view.tokens]
            self.chosen.append(len(self.sizes) - 1)
            position = view.slot + view.tokens
            place = slice(filled[row], filled[row] + view.tokens)
            self.view_scores.append(self.scores[row, :, :, place])
            self.view_weights.append(self.weights[row, :, :, place])
            filled[row] += view.tokens
        self.sizes.append(store.num_blocks * store.block_size - position)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        if not self.in_order or self.size != len(query):
            query = query.index_select(0, self.rows)
        self._score(store, store.keys[layer], query * scale)
        scores = self.scores
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap).masked_fill_(self.padding, -torch.inf)
        torch.softmax(scores, -1, out=self.weights)
        lse = scores.amax(-1) - self.weights.amax(-1).log_() if need_lse else None
        return self._weigh(store, store.values[layer]), lse

    def _score(self, store: KVStore, pool: Tensor, query: Tensor) -> None:
        """Fill `scores`: one product for all that is gathered, one for each view."""
        if self.columns:
            key = store.read(pool, self.regions)
            torch.bmm(query.flatten(0, 1), key.transpose(1, 2), out=self.gathered_scores)
            if self.hidden is not None:
                self.hidden_scores.masked_fill_(self.hidden, -torch.inf)
        if self.chosen:
            rows = query.unbind(0)
            views = store.views(pool, 2, self.sizes, self.chosen)
            for key, row, part in zip(views, self.view_rows, self.view_scores, strict=True):
                torch.bmm(rows[row], key, out=part)

    def _weigh(self, store: KVStore, pool: Tensor) -> Tensor:
        """The sum of the values, weighed: [n, kv_heads, group, dv]."""
        shape = (self.size, self.kv_heads, self.group, pool.shape[3])
        if self.columns:
            value = store.read(pool, self.regions)
            value.view(-1, pool.shape[3]).index_fill_(0, self.hidden_slots, 0.0)  # NaN, perhaps, and 0 x NaN poisons
            output = torch.bmm(self.gathered_weights, value).view(shape)
        else:
            output = self.weights.new_zeros(shape)
        if self.chosen:
            rows = output.unbind(0)
            views = store.views(pool, 1, self.sizes, self.chosen)
            for value, row, part in zip(views, self.view_rows, self.view_weights, strict=True):
                rows[row].baddbmm_(part, value)
        return output
