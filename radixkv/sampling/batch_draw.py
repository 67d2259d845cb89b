"""Draw the random rows of a batch together, with a fixed number of torch operators.

`draw` is the reference for kernels that do the same in one launch. It sorts whole rows, which takes a GPU longer than a
search for the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.sampling.race import race, race_all

GREEDY, PLAIN, FILTERED = 0, 1, 2
"""Kinds of rows: the maximum; a draw from the whole distribution; a draw after top-k, top-p or min-p."""

TEMPERATURES = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The range of temperatures: beyond the normal numbers of float32 they would give 0/0 or inf/inf."""


@dataclass(frozen=True)
class DrawRows:
    """The parameters of a batch's rows, one number for each row, and the kinds of rows that are present.

    kinds         int64: GREEDY, PLAIN or FILTERED
    keys          int64: from `draw_key`
    top_k         int64: at most the vocabulary; 0 keeps all
    temperature   float32, within the finite normal numbers
    top_p         float64
    least         float32: the logarithm of min_p, -inf for none
    """

    kinds: Tensor
    keys: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    least: Tensor
    has_plain: bool
    has_filtered: bool


def draw(logits: Tensor, best: Tensor, rows: DrawRows) -> Tensor:
    """Sample float logits [rows, vocab] with maxima [rows]: int64 [rows], undefined tokens for greedy rows."""
    # Shifted so that the maximum is 0: no temperature can overflow.
    scaled = (logits - best[:, None]).float().div_(rows.temperature[:, None])
    keys = rows.keys[:, None]
    if not rows.has_filtered:
        return race_all(scaled.exp_(), keys)
    weights = scaled.exp()
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    kept = scaled >= _threshold(scaled, weights, rows)
    found = race(scaled.double().exp_().mul_(kept), keys, ids)[:, 0]
    return torch.where(rows.kinds == FILTERED, found, race_all(weights, keys)) if rows.has_plain else found


def _threshold(scaled: Tensor, weights: Tensor, rows: DrawRows) -> Tensor:
    """Return the smallest value [rows, 1] that all three filters keep."""
    values = scaled.sort(dim=1, descending=True).values
    last = values.shape[1] - 1
    top_k, top_p = rows.top_k[:, None], rows.top_p[:, None]
    kth = values.gather(1, (top_k - 1).clamp(0, last)).masked_fill_(top_k == 0, -torch.inf)
    within = values.double().exp_().mul_(values >= kth)
    total = torch.where(
        top_k > 0, within.sum(dim=1, keepdim=True), weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    )
    nucleus = (within.cumsum(dim=1) - within < top_p * total).sum(dim=1, keepdim=True)
    mass = values.gather(1, (nucleus - 1).clamp(0, last)).masked_fill_(top_p >= 1, -torch.inf)
    return torch.maximum(torch.maximum(kth, mass), rows.least[:, None])
