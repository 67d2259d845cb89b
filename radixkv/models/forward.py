"""Call a transformers model's forward on one row of tokens, with the arguments that this architecture takes.

Knows signatures, and where an architecture's positions begin. Does not know pools, caches or who answers attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Forward:
    """What one architecture's forward takes.

    `positions`: it can be told where tokens stand; if not, it counts them itself. `first_position` is what it calls the
    first one. `keeps`: it can be told which rows need logits; if not, it computes those of all rows.
    """

    positions: bool
    keeps: bool
    first_position: int = 0

    @classmethod
    def of(cls, model: Any) -> Forward:
        """Look at the signatures of `model`, and at its embeddings."""
        takes = [signature(part.forward).parameters for part in (model, model.base_model)]
        positions = any("position_ids" in parameters for parameters in takes)
        return cls(positions, "logits_to_keep" in takes[0], _first_position(model))

    def logits(self, model: Any, tokens: Tensor, rows: Tensor, *, positions: Tensor | None = None, **more: Any) -> Any:
        """Logits [len(rows), vocab] of the rows `rows` of tokens [T]; `more` goes to the model as it is.

        `positions` [T] count from 0; without them the model counts by itself. Costs T * vocab where it keeps all rows.
        """
        if positions is not None and self.positions:
            more["position_ids"] = (positions + self.first_position if self.first_position else positions)[None]
        if self.keeps:
            return model(input_ids=tokens[None], logits_to_keep=rows, **more).logits[0]
        return model(input_ids=tokens[None], **more).logits[0].index_select(0, rows)


def _first_position(model: Any) -> int:
    """Encoders that were made into decoders number their tokens from behind the id that pads."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(module.padding_idx, int):
            return module.padding_idx + 1
    return 0
