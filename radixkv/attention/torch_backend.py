"""Attention along a work list in plain torch, on any device.

Query rows that read keys alone, the private tails of a decode step, are computed together by `PrivateAttention`. Long
runs of adjacent blocks are read in place, all other blocks are gathered. Tails of similar shape have their scores in
one padded tensor. `SharedAttention` computes many query rows over one run of keys: a shared prefix, or the context of a
prefill. A `TorchPlan` is made once per step; each layer then runs its operations, and merges the partials of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore, Part
from radixkv_kernels.work_list import WorkList

Int = NDArray[np.int64]


class QueryRows:
    """Some of a step's query rows: indices [n], all different; adjacent rows are read and written in place."""

    def __init__(self, rows: NDArray[np.int64], constant: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """Find out whether the rows are one range, in order; if not, `constant` makes their index on the device."""
        self.count = len(rows)
        adjacent = self.count > 0 and bool((rows == rows[0] + np.arange(self.count)).all())
        self.start = int(rows[0]) if adjacent else None
        self._index = torch.empty(0, dtype=torch.int64) if adjacent else constant(rows)

    def pick(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor [T, ...]; a view if they are adjacent."""
        if self.start == 0 and self.count == len(tensor):
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


# ---- single query rows


VIEW_BLOCKS = 8
"""From this number of adjacent blocks on, a product over a view is cheaper than gathering them."""

TAIL_CELLS = 4096
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
                free = int(self.blocks[first]) + length
                tail, origin = int(self.tail[first]), int(self.ordinal[first]) * self.block_size
                start = max(int(self.skip[tail]), origin)
                stop = min(int(self.end[tail]), origin + length * self.block_size)
                slot = int(self.blocks[first]) * self.block_size + start - origin
                self.views[tail].append(_View(tail, slot, stop - start))
        return np.repeat(~chosen, lengths)

    def batches(self) -> Iterator[Int]:
        """Yield the tails in groups of similar shape, for little padding, with few enough scores for a core's cache."""
        width = self.viewed + self.gathered * self.block_size
        batch: list[int] = []
        widest = 0
        for tail in np.lexsort((self.viewed, self.gathered))[::-1].tolist():
            widest = max(widest, int(width[tail]))
            if batch and not (self._similar(batch[0], tail) and widest * (len(batch) + 1) <= TAIL_CELLS):
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

    Its columns are the keys of the gathered blocks, then the keys of the views. Values are summed by index and weight.
    """

    def __init__(self, layout: PrivateLayout, tails: Int, rows: Int, kv_heads: int, group: int, store: KVStore) -> None:
        """Lay out the scores, once per step; `rows` [n] are the query rows of `tails`."""
        self.size, self.kv_heads, self.group = len(tails), kv_heads, group
        self.rows = QueryRows(rows, store.constant)
        number = np.full(len(layout.views), -1)
        number[tails] = np.arange(len(tails))
        blocks, hidden = self._plan_gather(layout, tails, number, store)
        shape = (self.size, kv_heads, group, self.columns + int(layout.viewed[tails].max()))
        with torch.inference_mode(False):  # minus infinity where no product will write
            self.scores = torch.full(shape, -torch.inf, dtype=store.compute_dtype, device=store.device)
            self.weights = torch.empty_like(self.scores)
        self.gathered_scores = self.scores.flatten(0, 1)[..., : self.columns]
        self.hidden_scores = self.scores[..., self.first_hidden : self.columns]
        slots = np.repeat(layout.first_slot[tails][:, None], shape[-1], axis=1)  # a weight of 0 gets a slot in use
        gathered = (blocks[..., None] * store.block_size + np.arange(store.block_size)).reshape(hidden.shape)
        np.copyto(slots[:, : self.columns], gathered, where=~hidden)
        views = sorted((view for tail in tails.tolist() for view in layout.views[tail]), key=lambda view: view.slot)
        filled = self._plan_views(views, number, slots, store)
        rows_of_values = store.rows(slots, kv_heads).astype(np.int32 if store.num_rows < 2**31 else np.int64)
        self.value_rows = store.constant(np.repeat(rows_of_values[:, :, None], group, axis=2).reshape(-1))
        count, dtype = len(self.value_rows), self.value_rows.dtype
        self.bags = torch.arange(0, count, shape[-1], dtype=dtype, device=store.device)
        self.padding = np.arange(self.scores.shape[-1]) >= np.array(filled)[:, None]
        self.padding[:, : self.columns] = hidden
        self._padded: Tensor | None = None

    def _plan_gather(
        self, layout: PrivateLayout, tails: Int, number: Int, store: KVStore
    ) -> tuple[Int, NDArray[np.bool_]]:
        """Find the regions of the gathered keys, and the first column in which some keys must be hidden.

        Returns the blocks to gather [n, most of a tail], padded, and the slots [n, columns] without a key.
        """
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
        hidden = hidden.reshape(self.size, -1)
        self.columns = hidden.shape[1]
        self.regions = store.regions(blocks, self.kv_heads)
        self.first_hidden = int(hidden.any(0).argmax()) if hidden.any() else self.columns
        self.hidden = store.constant(hidden[:, None, None, self.first_hidden :])
        return blocks, hidden

    def _plan_views(self, views: list[_View], number: Int, slots: Int, store: KVStore) -> list[int]:
        """Cut the pool so that each view is a piece, find its scores, and set its `slots`; return the columns used."""
        self.sizes: list[int] = []
        self.view_rows: list[int] = []
        self.view_scores: list[Tensor] = []
        filled, position = [self.columns] * self.size, 0
        for view in views:
            row = int(number[view.tail])
            place = slice(filled[row], filled[row] + view.tokens)
            self.sizes += [view.slot - position, view.tokens]
            position, filled[row] = view.slot + view.tokens, place.stop
            self.view_rows.append(row)
            self.view_scores.append(self.scores[row, :, :, place])
            slots[row, place] = np.arange(view.slot, position)
        self.sizes.append(store.num_blocks * store.block_size - position)
        return filled

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        query = self.rows.pick(query) * scale
        self._score(store, store.key_parts[layer], query)
        scores = self.scores
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap).masked_fill_(self._padding_of(store), -torch.inf)
        torch.softmax(scores, -1, out=self.weights)
        lse = scores.amax(-1) - self.weights.amax(-1).log_() if need_lse else None
        tables = store.value_parts[layer].tables
        return store.format.weighed(tables, self.value_rows, self.bags, self.weights), lse

    def _padding_of(self, store: KVStore) -> Tensor:
        """Return `padding` [n, 1, 1, width] on the device, which the first layer with a softcap copies there."""
        if self._padded is None:
            self._padded = store.constant(self.padding)[:, None, None]
        return self._padded

    def _score(self, store: KVStore, part: Part, query: Tensor) -> None:
        """Fill `scores`: one product for all gathered keys, one for each view."""
        if self.columns:
            key = store.read(part, self.regions)
            torch.bmm(query.flatten(0, 1), key.transpose(1, 2), out=self.gathered_scores)
        if self.first_hidden < self.columns:
            self.hidden_scores.masked_fill_(self.hidden, -torch.inf)
        if self.view_rows:
            rows, keys = query.unbind(0), store.views(part, self.sizes)
            for key, row, scores in zip(keys, self.view_rows, self.view_scores, strict=True):
                torch.bmm(rows[row], key, out=scores)


def private_attention(
    work: WorkList, items: Int, store: KVStore, kv_heads: int, group: int
) -> Iterator[tuple[Operation, Int]]:
    """Yield the operations of these items, which have one query row each, and the places of their partials.

    A run that is longer than a piece of the format is read piece by piece, as if rows shared it.
    """
    is_long = work.tokens[items] > store.format.piece
    for item in items[is_long].tolist():
        yield SharedAttention(work, item, store, kv_heads), work.row_offset[[item]].astype(np.int64)
    items = items[~is_long]
    layout = PrivateLayout(work, items, store.reads_in_place)
    for batch in layout.batches():
        places = work.row_offset[items[batch]].astype(np.int64)
        rows = work.row_ids[places].astype(np.int64)
        yield PrivateAttention(layout, batch, rows, kv_heads, group, store), places


# ---- many query rows


SCORE_CELLS = 1 << 20
"""Scores that the unfused path holds at once, so that a long prompt does not need rows x keys of memory."""


class SharedAttention:
    """One item of a work list: its keys as a view if they are adjacent, else gathered, and its mask if it needs one."""

    def __init__(self, work: WorkList, item: int, store: KVStore, kv_heads: int) -> None:
        """Find keys, rows and mask, once per step."""
        skip = int(work.kv_start[item]) % work.block_size
        self.tokens, self.skip, self.block_size = int(work.tokens[item]), skip, work.block_size
        offset, count = int(work.block_offset[item]), -(-(skip + self.tokens) // work.block_size)
        blocks = work.block_ids[offset : offset + count].astype(np.int64)
        self.slot: int | None = None
        if store.reads_in_place and int(blocks[-1] - blocks[0]) == count - 1 and bool((np.diff(blocks) == 1).all()):
            self.slot = int(blocks[0]) * work.block_size + skip
        else:
            self.regions = store.regions(blocks, kv_heads)
        rows = work.row_ids[work.row_offset[item] : work.row_offset[item] + work.rows[item]].astype(np.int64)
        self.rows = QueryRows(rows, store.constant)
        self._plan_mask(work, item, rows, store)
        piece = max(1, store.format.piece // work.block_size) * work.block_size
        edges = [0, *range(piece - skip, self.tokens, piece)] if piece - skip > 0 and not self.causal else [0]
        self.pieces = [self._piece(start, stop) for start, stop in pairwise([*edges, self.tokens])]

    def _piece(self, start: int, stop: int) -> _Piece:
        """Return the keys [start, stop) of the item; `start` is 0 or the first of a block."""
        mask = None if self.mask is None else self.mask[:, start:stop]
        if self.slot is not None:
            return _Piece(stop - start, mask, self.slot + start)
        first, skip = divmod(self.skip + start, self.block_size)
        last = -(-(self.skip + stop) // self.block_size)
        return _Piece(stop - start, mask, None, self.regions[:, first:last].contiguous(), skip)

    def _plan_mask(self, work: WorkList, item: int, rows: NDArray[np.int64], store: KVStore) -> None:
        """Set `mask` [rows, tokens] or None, and `causal` if it is the lower triangle that the fused kernel applies."""
        self.causal, self.mask = False, None
        if work.fully_visible[item]:
            return
        start, positions = int(work.kv_start[item]), work.positions[rows].astype(np.int64)
        in_window = work.window is None or int(positions[-1]) - work.window < start
        self.causal = in_window and len(rows) == self.tokens and bool((positions == start + np.arange(len(rows))).all())
        keys = np.arange(start, start + self.tokens)
        visible = keys <= positions[:, None]
        if work.window is not None:
            visible &= keys > positions[:, None] - work.window
        self.mask = store.constant(visible)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        query = self.rows.pick(query)
        return reduce(_merged, (self._over(piece, store, layer, query, scale, softcap) for piece in self.pieces))

    def _over(
        self, piece: _Piece, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend over one piece of the keys."""
        key, value = piece.read(store, layer)
        fused = query.device.type == "cpu" and key.shape[2] == value.shape[2] and softcap is None
        if fused and (self.causal or piece.mask is None):
            return _fused(query, key, value, scale, self.causal)
        return _unfused(query * scale, key, value, piece.mask, softcap)


@dataclass(frozen=True)
class _Piece:
    """Adjacent keys of a shared item, and the mask [rows, tokens] of its rows or None.

    Their place is the first slot, or the regions of their blocks and the slots before the first key.
    """

    tokens: int
    mask: Tensor | None
    slot: int | None
    regions: Tensor | None = None
    skip: int = 0

    def read(self, store: KVStore, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [kv_heads, tokens, dk] and values [kv_heads, tokens, dv]."""
        keys, values = store.key_parts[layer], store.value_parts[layer]
        if self.slot is not None:
            return store.run(keys, self.slot, self.tokens), store.run(values, self.slot, self.tokens)
        assert self.regions is not None
        key, value = store.read(keys, self.regions), store.read(values, self.regions, workspace=1)
        return key.narrow(1, self.skip, self.tokens), value.narrow(1, self.skip, self.tokens)


def _merged(total: tuple[Tensor, Tensor], piece: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add outputs [n, kv_heads, group, dv] and log-sum-exps [n, kv_heads, group] over a piece of keys to `total`."""
    (output, lse), (added, added_lse) = total, piece
    joined = torch.logaddexp(lse, added_lse)
    highest = joined.clamp_min(torch.finfo(lse.dtype).min)  # finite for a row that has seen nothing yet
    kept, share = ((each - highest).exp_()[..., None] for each in (lse, added_lse))
    return output.mul_(kept).addcmul_(added, share), joined


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend by plain matrix products, some rows at a time."""
    rows, kv_heads, group, _ = query.shape
    height = max(1, SCORE_CELLS // (kv_heads * group * key.shape[1]))
    parts = []
    for top in range(0, rows, height):
        mask = None if visible is None else visible[top : top + height]
        parts.append(_attend(query[top : top + height], key, value, mask, softcap))
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend by torch's flash attention for CPUs, which also returns the log-sum-exp."""
    rows, kv_heads, group, _ = query.shape
    if causal:
        query = query.flatten(1, 2).transpose(0, 1)
    else:  # all heads of a group under one product
        query = query.permute(1, 2, 0, 3).reshape(kv_heads, group * rows, -1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = flash(query[None], key[None], value[None], 0.0, causal, scale=scale)
    output, lse = output.view(kv_heads, group, rows, -1), lse.view(kv_heads, group, rows)
    return output.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """[n, kv_heads, group, dk] over [kv_heads, tokens, dk] -> ([n, kv_heads, group, dv], [n, kv_heads, group])."""
    rows, kv_heads, group, _ = query.shape
    folded = query.permute(1, 2, 0, 3).reshape(kv_heads, group * rows, -1)
    scores = (folded @ key.transpose(1, 2)).view(kv_heads, group, rows, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap).mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)  # a row that sees nothing here
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    output = weights.view(kv_heads, group * rows, -1) @ value
    output = output.view(kv_heads, group, rows, -1) / total.clamp_min(torch.finfo(total.dtype).tiny)
    lse = (highest + total.log())[..., 0]
    return output.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


# ---- a step


class Operation(Protocol):
    """Attention of some of a step's query rows over some keys, in each layer of one shape."""

    rows: QueryRows

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Query [T, kv_heads, group, dk] -> outputs [n, kv_heads, group, dv], log-sum-exps [n, kv_heads, group]."""
        ...


Tails = Callable[[WorkList, Int, KVStore, int, int], Iterator[tuple[Operation, Int]]]
"""Makes the operations of single query rows: from a list, its items, a store, kv heads, and query heads of each.

Each operation comes with the places of its partials in `WorkList.row_ids`.
"""

_PLANS: WeakKeyDictionary[WorkList, dict[tuple[KVStore, int, int, Tails], TorchPlan]] = WeakKeyDictionary()


@torch.no_grad()
def attend(
    store: KVStore,
    layer: int,
    query: Tensor,
    work: WorkList,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tails: Tails = private_attention,
) -> Tensor:
    """Attention of query [heads, T, dk], the rows of all sequences in turn, over one layer's KV -> [T, heads, dv].

    `sinks` [heads] are logits that take weight and add no value. `tails` computes single query rows. The first layer of
    a step makes the plan of `work` (0.5 ms at 8 sequences), and all others of the same shape reuse it. Results have the
    dtype of `query` and no gradient.
    """
    kv_heads = store.layers[layer].kv_heads
    rows = query.transpose(0, 1).to(store.compute_dtype)
    rows = rows.reshape(len(rows), kv_heads, len(query) // kv_heads, rows.shape[-1])
    output = plan_of(store, work, kv_heads, rows.shape[2], tails).run(store, layer, rows, scale, softcap, sinks)
    return output.flatten(1, 2).to(query.dtype)


def plan_of(store: KVStore, work: WorkList, kv_heads: int, group: int, tails: Tails) -> TorchPlan:
    """Return the plan of `work` for layers of this shape, made at the first call; it lives as long as the list."""
    plans = _PLANS.setdefault(work, {})
    key = (store, kv_heads, group, tails)
    if key not in plans:
        plans[key] = TorchPlan(store, work, kv_heads, group, tails)
    return plans[key]


class TorchPlan:
    """The operations of one step in each of its layers, which yield partials, and the merge of these."""

    def __init__(
        self, store: KVStore, work: WorkList, kv_heads: int, group: int, tails: Tails = private_attention
    ) -> None:
        """Turn a work list into operations and index tensors."""
        single = (work.rows == 1) & work.fully_visible
        self.operations: list[Operation] = []
        order = []
        for item in np.flatnonzero(~single).tolist():
            self.operations.append(SharedAttention(work, item, store, kv_heads))
            order.append(np.arange(work.row_offset[item], work.row_offset[item] + work.rows[item]))
        for operation, places in tails(work, np.flatnonzero(single), store, kv_heads, group):
            self.operations.append(operation)
            order.append(places)
        # The place of each partial among the partials of its row, in [T, most of a row].
        counts = np.diff(work.merge_offset)
        self.width = int(counts.max(initial=1))
        rank = np.empty(len(work.row_ids), dtype=np.int64)
        rank[work.merge_ids] = np.arange(len(rank)) - np.repeat(work.merge_offset[:-1], counts)
        place = work.row_ids.astype(np.int64) * self.width + rank
        self.places = [store.constant(place[partials]) for partials in order]
        shapes = [(operation.rows.start, operation.rows.count) for operation in self.operations]
        self.plain = self.width == 1 and shapes == [(0, len(counts))]  # one operation has all rows, in order

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Query [T, kv_heads, group, dk] -> output [T, kv_heads, group, dv]."""
        need_lse = self.width > 1 or sinks is not None
        partials = [op.run(store, layer, query, scale, softcap, need_lse=need_lse) for op in self.operations]
        if self.plain and not need_lse:
            return partials[0][0]
        merged = query.new_zeros(*query.shape[:3], store.layers[layer].value_dim)
        if not need_lse:
            for operation, (output, _) in zip(self.operations, partials, strict=True):
                operation.rows.put(merged, output)
            return merged
        shares = self._shares(query, [lse for _, lse in partials if lse is not None], sinks)
        for operation, (output, _), place in zip(self.operations, partials, self.places, strict=True):
            operation.rows.add(merged, output, shares.index_select(0, place))
        return merged

    def _shares(self, query: Tensor, lses: list[Tensor], sinks: Tensor | None) -> Tensor:
        """Return the share of each partial in its row, next to sinks, by place [T * width, kv_heads, group]."""
        heads = query.shape[1:3]
        logits = query.new_full((len(query) * self.width, *heads), -torch.inf)
        for place, lse in zip(self.places, lses, strict=True):
            logits.index_copy_(0, place, lse)
        logits = logits.view(len(query), self.width, *heads)
        if sinks is not None:
            sunk = sinks.to(logits.dtype).view(1, 1, *heads).expand(len(query), 1, *heads)
            logits = torch.cat([logits, sunk], dim=1)
        return torch.softmax(logits, dim=1)[:, : self.width].flatten(0, 1)
