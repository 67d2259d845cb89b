"""Attention of many query rows over one run of keys: a shared prefix, or the context of a prefill."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv.attention.private_attention import QueryRows
from radixkv_kernels.work_list import WorkList

SCORE_CELLS = 1 << 20
"""Scores that the unfused path holds at once, so that a long prompt does not need rows x keys of memory."""


class SharedAttention:
    """One item of a work list: its keys as a view if they are adjacent, else gathered, and its mask if it needs one."""

    def __init__(self, work: WorkList, item: int, store: KVStore, kv_heads: int) -> None:
        """Find keys, rows and mask, once per step."""
        skip = int(work.kv_start[item]) % work.block_size
        self.tokens, self.skip = int(work.tokens[item]), skip
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
        key, value = self._keys(store, layer)
        fused = query.device.type == "cpu" and key.shape[2] == value.shape[2] and softcap is None
        if fused and (self.causal or self.mask is None):
            return _fused(query, key, value, scale, self.causal)
        return self._unfused(query * scale, key, value, softcap)

    def _keys(self, store: KVStore, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [kv_heads, tokens, dk] and values [kv_heads, tokens, dv]."""
        pools = store.keys[layer], store.values[layer]
        if self.slot is not None:
            key, value = (store.slots(pool).narrow(1, self.slot, self.tokens).to(store.compute_dtype) for pool in pools)
        else:
            key, value = (
                store.read(pool, self.regions, w).narrow(1, self.skip, self.tokens) for w, pool in enumerate(pools)
            )
        return key, value

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Attend by plain matrix products, some rows at a time."""
        rows, kv_heads, group, _ = query.shape
        height = max(1, SCORE_CELLS // (kv_heads * group * self.tokens))
        parts = []
        for top in range(0, rows, height):
            mask = None if self.mask is None else self.mask[top : top + height]
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
