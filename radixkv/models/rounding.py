"""Compare logits that were computed in two ways, within the rounding of each dtype."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Allowed root-mean-square error relative to the logits' spread. Rounding gives 1e-6 in float32, up to 6e-2 in 16 bits;
an architecture that runs incorrectly is off by 1e-1 and more. (float64 is loose because many models mix in float32.)"""


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the root-mean-square difference over the spread of `expected`; NaN if either has a NaN."""
    logits, expected = logits.double(), expected.double()
    spread = (expected - expected.mean()).square().mean().sqrt().clamp_min(1e-12)
    return float((logits - expected).square().mean().sqrt() / spread)


def agree(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether both are equal up to the rounding of a model in `dtype`; NaN never is."""
    return relative_error(logits, expected) <= TOLERANCE.get(dtype, 1e-1)
