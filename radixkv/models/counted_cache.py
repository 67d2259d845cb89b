"""A cache for models that count the positions of a packed row by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class Before(DynamicCache):  # type: ignore[misc]  # transformers shows no types
    """An empty cache that reports, for each token of a packed row, the number of earlier tokens in its sequence.

    Earlier tokens of the row are subtracted, because a model adds the row's own numbers.
    """

    def __init__(self, positions: Tensor) -> None:
        """Serve tokens at `positions` [T]."""
        super().__init__()
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return the difference [T] between a token's position and its number in the row."""
        return self._before

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep nothing: the attention that follows stores the KV."""
        return key_states, value_states
