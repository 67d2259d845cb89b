"""Compute rotary frequencies as transformers does, bit for bit: unscaled, or scaled for longer contexts.

A token is rotated by its own position alone. LongRoPE would choose its frequencies by the longest sequence of a batch;
here the choice is made once, for the longest possible sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
"""The parameters of each kind of scaling, in an order: the names of records depend on it."""


@dataclass(frozen=True)
class Rotation:
    """One set of frequencies: of the first `dim` numbers of each head, for sequences of up to `context` tokens.

    `original` is the context before it was extended, `scaling` the parameters of `kind`.
    """

    kind: str
    base: float
    dim: int
    context: int
    original: int
    scaling: Mapping[str, Any]

    def frequencies(self) -> tuple[Tensor, float]:
        """Return frequencies [dim / 2] in float32, and the factor of cosines and sines. Raises KeyError, TypeError."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float, device="cpu") / self.dim
        plain = 1.0 / (self.base**exponents)
        if self.kind == "linear":
            return plain / self.scaling["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(plain), 1.0
        if self.kind == "yarn":
            return self._yarn(exponents)
        return self._longrope(exponents) if self.kind == "longrope" else (plain, 1.0)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Divide low frequencies by a factor, keep high ones, and blend between."""
        factor, low, high = (self.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
        lengths = 2 * math.pi / plain
        slow = torch.where(lengths > self.original / low, plain / factor, plain)
        share = (self.original / lengths - low) / (high - low)
        between = ~(lengths < self.original / high) * ~(lengths > self.original / low)
        return torch.where(between, (1 - share) * slow / factor + share * slow, slow)

    def _yarn(self, exponents: Tensor) -> tuple[Tensor, float]:
        """Divide frequencies with few turns in the original context by a factor, keep those with many."""
        given = self.scaling
        factor = given.get("factor") or self.context / self.original
        attention = given.get("attention_factor")
        if attention is None:
            one, all_ = given.get("mscale"), given.get("mscale_all_dim")
            attention = _grown(factor, one) / _grown(factor, all_) if one and all_ else _grown(factor, 1)
        bounds = [self._pair_with(given.get("beta_fast") or 32), self._pair_with(given.get("beta_slow") or 1)]
        if given.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        first, last = max(bounds[0], 0), min(bounds[1], self.dim - 1)
        last += 0.001 * (first == last)
        ramp = torch.clamp(
            (torch.arange(self.dim // 2, dtype=torch.float, device="cpu") - first) / (last - first), 0, 1
        )
        powers, kept = self.base**exponents, 1 - ramp
        return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)

    def _pair_with(self, turns: float) -> float:
        """Return the number of the pair that makes this number of turns in the original context."""
        return (self.dim * math.log(self.original / (turns * 2 * math.pi))) / (2 * math.log(self.base))

    def _longrope(self, exponents: Tensor) -> tuple[Tensor, float]:
        """Divide each frequency by a factor of its own, for long contexts if the model has one."""
        stretch = self.scaling.get("factor") or self.context / self.original
        attention = self.scaling.get("attention_factor")
        if attention is None:
            attention = math.sqrt(1 + math.log(stretch) / math.log(self.original)) if stretch > 1.0 else 1.0
        name = "long_factor" if self.context > self.original else "short_factor"
        factors = torch.tensor(self.scaling[name], dtype=torch.float, device="cpu")
        return 1.0 / (factors * self.base**exponents), attention


def _grown(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
