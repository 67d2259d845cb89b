"""Attention along a work list in plain torch, on any device.

Knows the store, the list and the arithmetic. Does not know models, requests or the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv_kernels.work_list import WorkList

from .kv_store import KVStore


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
    """Attention of query [heads, T, dk], the rows of all sequences in turn, over one layer's KV -> [T, heads, dv]."""
    shape = store.layers[layer]
    acc = torch.float32 if store.dtype in (torch.bfloat16, torch.float16) else store.dtype
    grouped = query.to(acc).unflatten(0, (shape.kv_heads, -1)) * scale
    group, partials = grouped.shape[1], len(work.row_ids)
    output = grouped.new_empty(shape.kv_heads, group, partials, shape.value_dim)
    weight = grouped.new_empty(shape.kv_heads, group, partials)
    row_ids = torch.from_numpy(work.row_ids).long().to(store.device)
    positions = torch.from_numpy(work.positions).long().to(store.device)
    for item in range(work.num_items):
        start, count = int(work.kv_start[item]), int(work.tokens[item])
        rows = slice(int(work.row_offset[item]), int(work.row_offset[item] + work.rows[item]))
        skip = start % work.block_size
        blocks = work.block_ids[work.block_offset[item] :]
        key, value = (x[:, skip:].to(acc) for x in store.gather(layer, blocks, skip + count))
        picked = grouped[:, :, row_ids[rows]].flatten(1, 2)
        scores = (picked @ key.transpose(1, 2)).unflatten(1, (group, -1))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if not work.fully_visible[item]:
            seen_from = positions[row_ids[rows]][:, None]
            keys = torch.arange(start, start + count, device=store.device)
            visible = keys <= seen_from
            if work.window is not None:
                visible &= keys > seen_from - work.window
            scores = scores.masked_fill(~visible, float("-inf"))
        weight[:, :, rows] = torch.logsumexp(scores, dim=-1)
        safe = weight[:, :, rows].masked_fill(weight[:, :, rows] == float("-inf"), 0.0)
        output[:, :, rows] = ((scores - safe[..., None]).exp().flatten(1, 2) @ value).unflatten(1, (group, -1))
    return _merge(output, weight, work, sinks).to(query.dtype)


def _merge(output: Tensor, weight: Tensor, work: WorkList, sinks: Tensor | None) -> Tensor:
    """Weigh each row's partials, in the order of their keys."""
    kv_heads, group, _, dim = output.shape
    merged = output.new_zeros(work.num_rows, kv_heads, group, dim)
    for row in range(work.num_rows):
        parts = torch.from_numpy(work.merge_ids[work.merge_offset[row] : work.merge_offset[row + 1]]).long()
        logits = weight[:, :, parts.to(weight.device)]
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(logits.dtype).view(kv_heads, group, 1)], dim=-1)
        share = torch.softmax(logits, dim=-1)[..., : len(parts)]
        merged[row] = (output[:, :, parts.to(weight.device)] * share[..., None]).sum(2)
    return merged.flatten(1, 2)
