"""Call a transformers model's forward on one row of tokens, with the arguments that this architecture takes.

Knows signatures, and how an architecture learns where a token stands. Does not know pools or who answers attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Forward:
    """What one architecture's forward takes.

    `positions`: it can be told where tokens stand, and calls the first place `first_position`. `counts`: it also looks
    at how many tokens its cache holds. `keeps`: it can be told which rows need logits; else it computes those of all.
    """

    positions: bool
    counts: bool
    keeps: bool
    first_position: int = 0

    @classmethod
    def of(cls, model: Any) -> Forward:
        """Look at signatures and embeddings, and for scores that grow with the position, as those of Llama 4 do."""
        takes = [signature(part.forward).parameters for part in (model, model.base_model)]
        positions = any("position_ids" in parameters for parameters in takes)
        counts = not positions or bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        return cls(positions, counts, "logits_to_keep" in takes[0], _first_position(model) if positions else 0)

    def logits(self, model: Any, tokens: Tensor, rows: Tensor, *, positions: Tensor | None = None, **more: Any) -> Any:
        """Logits [len(rows), vocab] of the rows `rows` of tokens [T]; `more` goes to the model as it is.

        `positions` [T] count from 0; without them the model counts by itself. Costs T * vocab where it keeps all rows.
        """
        if positions is not None and self.positions:
            more["position_ids"] = (positions + self.first_position if self.first_position else positions)[None]
        if positions is not None and self.counts and "past_key_values" not in more:
            more = more | self._counted(positions, len(tokens))
        if self.keeps:
            return model(input_ids=tokens[None], logits_to_keep=rows, **more).logits[0]
        return model(input_ids=tokens[None], **more).logits[0].index_select(0, rows)

    def _counted(self, positions: Tensor, count: int) -> dict[str, Any]:
        """What makes a model that counts by itself count from where the tokens stand."""
        counted: dict[str, Any] = {"past_key_values": _Before(positions)}
        if not self.positions:  # it would make as many ones as tokens stand before, which is another number for each
            counted["attention_mask"] = positions.new_ones(1, count)
        return counted


class _Before(DynamicCache):  # type: ignore[misc]  # transformers shows no types
    """A cache that holds nothing, and says of each token of a packed row how many stand before it in its sequence.

    Less those before it in the row, that is: a model adds its rows' numbers to this.
    """

    def __init__(self, positions: Tensor) -> None:
        """For tokens at `positions` [T]."""
        super().__init__()
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """What the number of a row lacks to be a position [T]."""
        return self._before

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep nothing: the attention behind this does."""
        return key_states, value_states


def _first_position(model: Any) -> int:
    """Encoders that were made into decoders number their tokens from behind the id that pads."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(module.padding_idx, int):
            return module.padding_idx + 1
    return 0
