"""Attention along a work list in plain torch, on any device.

A `TorchPlan` is made once per step; each layer then runs its operations, and merges the partials of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv.attention.private_attention import QueryRows, private_attention
from radixkv.attention.shared_attention import SharedAttention
from radixkv_kernels.work_list import WorkList

Int = NDArray[np.int64]


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
        self._plan_merge(work, order, store)

    def _plan_merge(self, work: WorkList, order: list[NDArray[np.int64]], store: KVStore) -> None:
        """Find the place of each partial among the partials of its row, in [T, most of a row]."""
        counts = np.diff(work.merge_offset)
        self.width = int(counts.max(initial=1))
        rank = np.empty(len(work.row_ids), dtype=np.int64)
        rank[work.merge_ids] = np.arange(len(rank)) - np.repeat(work.merge_offset[:-1], counts)
        place = work.row_ids.astype(np.int64) * self.width + rank
        self.places = [store.constant(place[partials]) for partials in order]
        self.plain = self.width == 1 and len(self.operations) == 1 and self.operations[0].rows.covers(len(counts))

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
