"""Attention over block tables in plain torch: the reference for the tests of every backend.

Gathers each sequence's whole context, and computes in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Sequence[Sequence[int]],
    kv_lengths: Sequence[int],
    query_lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's last `query_length` positions over its `kv_length` keys -> [T, heads, dv].

    `query` is [heads, T, dk], the rows of all sequences in turn; the pools are
    [kv_heads, blocks, block_size, dk or dv]; `sinks` is [heads]. Costs O(rows x keys) memory per sequence.
    """
    outputs, row = [], 0
    for table, kv_length, query_length in zip(block_tables, kv_lengths, query_lengths, strict=True):
        key, value = (_gather(pool, table, kv_length) for pool in (key_pool, value_pool))
        rows = query[:, row : row + query_length]
        outputs.append(_attend_one(rows, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks))
        row += query_length
    return torch.cat([query.new_empty(0, len(query), value_pool.shape[-1]), *outputs])


def _gather(pool: Tensor, table: Sequence[int], length: int) -> Tensor:
    """Return one sequence's keys or values, [kv_heads, length, dim]."""
    blocks = torch.as_tensor(list(table), dtype=torch.long, device=pool.device)
    return pool[:, blocks].flatten(1, 2)[:, :length]


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend [heads, n, dk] over [kv_heads, length, dk], [kv_heads, length, dv] -> [n, heads, dv]."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(query.shape[1], key.shape[1], window, query.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return (weights @ value).transpose(0, 1)


def _visible(query_length: int, kv_length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [query_length, kv_length] of the keys that each row sees."""
    row = torch.arange(kv_length - query_length, kv_length, device=device)[:, None]
    column = torch.arange(kv_length, device=device)[None]
    visible = column <= row
    return visible if window is None else visible & (column > row - window)
