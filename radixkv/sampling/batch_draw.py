"""Draw the random rows of a batch together, with a fixed number of torch operators.

`draw` is the reference for kernels that do the same in one launch. It sorts whole rows, which takes a GPU longer than a
search for the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from radixkv.sampling.race import race, race_all

GREEDY, PLAIN, FILTERED = 0, 1, 2
"""Kinds of rows: the maximum; a draw from the whole distribution; a draw after top-k, top-p or min-p."""


@dataclass(frozen=True)
class DrawRows:
    """The parameters of a batch's rows, one number for each row, and the kinds of rows that are present.

    kinds     int64: GREEDY, PLAIN or FILTERED
    keys      int64: from `draw_key`
    numbers   the columns of `SamplingParams`, by name
    """

    kinds: Tensor
    keys: Tensor
    numbers: Mapping[str, Tensor]
    has_plain: bool
    has_filtered: bool

    def tensors(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of a kernel that draws from logits [rows, vocab]."""
        own = self.numbers
        return self.kinds, self.keys, own["top_k"], own["temperature"], own["top_p"], lowest(logits, own)


RELATIVE: tuple[Callable[[Tensor, Mapping[str, Tensor]], Tensor], ...] = (lambda logits, numbers: numbers["min_p"],)
"""The filters relative to the largest logit. Each returns the smallest scaled logit [rows] that it keeps, given the
logits [rows, vocab] and the columns. Scaled logits are 0 at their maximum; -inf keeps all."""


def lowest(logits: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """Return the smallest scaled logit [rows] that all filters of `RELATIVE` keep."""
    return reduce(torch.maximum, [bound(logits, numbers) for bound in RELATIVE])


def draw(logits: Tensor, best: Tensor, rows: DrawRows) -> Tensor:
    """Sample float logits [rows, vocab] with maxima [rows]: int64 [rows], undefined tokens for greedy rows."""
    # Shifted so that the maximum is 0: no temperature can overflow.
    scaled = (logits - best[:, None]).float().div_(rows.numbers["temperature"][:, None])
    keys = rows.keys[:, None]
    if not rows.has_filtered:
        return race_all(scaled.exp_(), keys)
    weights = scaled.exp()
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = scaled.sort(dim=1, descending=True).values
    whole = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    kept = scaled >= threshold(ordered, whole, lowest(logits, rows.numbers), rows.numbers)
    found = race(scaled.double().exp_().mul_(kept), keys, ids)[:, 0]
    return torch.where(rows.kinds == FILTERED, found, race_all(weights, keys)) if rows.has_plain else found


def threshold(values: Tensor, whole: Tensor, least: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """Return the smallest scaled logit [rows, 1] that all filters keep.

    `values` [rows, n] are the largest scaled logits in descending order; `whole` [rows, 1] is the weight of all tokens,
    which is read where top_p filters without top_k; `least` [rows] is the result of `lowest`.
    """
    last = values.shape[1] - 1
    top_k, top_p = numbers["top_k"][:, None], numbers["top_p"][:, None]
    kth = values.gather(1, (top_k - 1).clamp(0, last)).masked_fill_(top_k == 0, -torch.inf)
    within = values.double().exp_().mul_(values >= kth)
    total = torch.where(top_k > 0, within.sum(dim=1, keepdim=True), whole)
    nucleus = (within.cumsum(dim=1) - within < top_p * total).sum(dim=1, keepdim=True)
    mass = values.gather(1, (nucleus - 1).clamp(0, last)).masked_fill_(top_p >= 1, -torch.inf)
    return torch.maximum(torch.maximum(kth, mass), least[:, None])
