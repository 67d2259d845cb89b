"""Attention along a work list in plain torch, on any device.

Knows how to follow a list: what is planned once per step, and the few calls that each layer makes. Does not know
models, requests or the tree.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv_kernels.work_list import WorkList

from .kv_store import KVStore
from .spans import Span
from .tails import Layout, TailBatch

_PLANS: WeakKeyDictionary[WorkList, dict[tuple[KVStore, int, int], Plan]] = WeakKeyDictionary()


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
) -> Tensor:
    """Attention of query [heads, T, dk], the rows of all sequences in turn, over one layer's KV -> [T, heads, dv].

    `sinks` [heads] are logits that take weight and give nothing. The first layer to follow `work` plans the step
    (0.1-0.3 ms at 8 sequences); all others of the same shape reuse that. Results have the dtype of `query`; they
    carry no gradient.
    """
    kv_heads = store.layers[layer].kv_heads
    rows = query.transpose(0, 1).to(store.compute_dtype)
    rows = rows.reshape(len(rows), kv_heads, len(query) // kv_heads, rows.shape[-1])
    output = _plan(store, work, kv_heads, rows.shape[2]).run(store, layer, rows, scale, softcap, sinks)
    return output.flatten(1, 2).to(query.dtype)


def _plan(store: KVStore, work: WorkList, kv_heads: int, group: int) -> Plan:
    """The plan of `work` for layers of this shape, made when first asked for; it lives as long as the list."""
    plans = _PLANS.setdefault(work, {})
    key = (store, kv_heads, group)
    if key not in plans:
        plans[key] = Plan(store, work, kv_heads, group)
    return plans[key]


class Plan:
    """What one step does in each of its layers: operations that yield partials, and the merge of these."""

    def __init__(self, store: KVStore, work: WorkList, kv_heads: int, group: int) -> None:
        """Turn a work list into operations and index tensors."""
        single = (work.rows == 1) & work.fully_visible
        self.operations: list[TailBatch | Span] = []
        order = []
        for item in np.flatnonzero(~single).tolist():
            self.operations.append(Span(work, item, store, kv_heads))
            order.append(np.arange(work.row_offset[item], work.row_offset[item] + work.rows[item]))
        tails = np.flatnonzero(single)
        layout = Layout(work, tails, store.runs_are_views)
        for batch in layout.batches():
            places = work.row_offset[tails[batch]]
            rows = work.row_ids[places].astype(np.int64)
            self.operations.append(TailBatch(layout, batch, rows, kv_heads, group, store))
            order.append(places)
        self._plan_merge(work, np.concatenate([np.empty(0, dtype=np.int64), *order]), store)

    def _plan_merge(self, work: WorkList, order: NDArray[np.int64], store: KVStore) -> None:
        """`parts` [T, most partials of a row]: where each row's partials stand, in the order of their keys."""
        place = np.empty(len(order) + 1, dtype=np.int64)
        place[order] = np.arange(len(order))
        place[-1] = len(order)  # one that weighs nothing, to pad with
        counts = np.diff(work.merge_offset)
        column = np.arange(int(counts.max(initial=1)))
        index = np.minimum(work.merge_offset[:-1, None] + column, len(order) - 1)
        parts = place[np.where(column < counts[:, None], work.merge_ids[index] if len(order) else 0, -1)]
        self.merges = bool(parts.shape[1] > 1)
        self.in_order = not self.merges and bool((parts[:, 0] == np.arange(len(parts))).all())
        self.parts = torch.from_numpy(parts).to(store.device)

    def run(
        self, store: KVStore, layer: int, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Query [T, kv_heads, group, dk] -> output [T, kv_heads, group, dv]."""
        if not self.operations:
            return query.new_empty(*query.shape[:3], store.layers[layer].value_dim)
        need_lse = self.merges or sinks is not None
        partials = [op.run(store, layer, query, scale, softcap, need_lse=need_lse) for op in self.operations]
        output = partials[0][0] if len(partials) == 1 else torch.cat([part[0] for part in partials])
        if not need_lse:
            return output if self.in_order else output.index_select(0, self.parts[:, 0])
        return self._merge(output, torch.cat([lse for _, lse in partials if lse is not None]), sinks)

    def _merge(self, output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
        """Weigh each row's partials by their log-sum-exps; sinks take their share here, once."""
        lse = torch.cat([lse, lse.new_full((1, *lse.shape[1:]), -torch.inf)])
        logits = lse[self.parts]  # [T, partials, kv_heads, group]
        if sinks is not None:
            column = sinks.to(logits.dtype).view(1, 1, *lse.shape[1:]).expand(len(logits), -1, -1, -1)
            logits = torch.cat([logits, column], dim=1)
        share = torch.softmax(logits, dim=1)
        merged = output.new_zeros(len(self.parts), *output.shape[1:])
        for part, weight in zip(self.parts.clamp_max(len(output) - 1).unbind(1), share.unbind(1), strict=False):
            merged.addcmul_(output[part], weight[..., None])
        return merged
