"""Change logits before anything is drawn: penalties, bias, minimum length.

Knows one row's parameters and history. Does not know how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import InvalidInput

if TYPE_CHECKING:
    from radixkv.sampling.sampler import SampleRow


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits [rows, vocab] with each row's penalties, then its bias, then its minimum length applied.

    Returns `logits` itself if no row asks for anything, else a copy. Raises InvalidInput for a bias beyond the ids.
    """
    if not any(row.params.adjusts_logits for row in rows):
        return logits
    adjusted = logits.clone()
    for values, row in zip(adjusted, rows, strict=True):
        if row.params.adjusts_logits:
            _penalize_seen(values, row)
            _penalize_reply(values, row)
            _add_bias(values, row)
            _mask_stops(values, row)
    return adjusted


def _tokens(history: Sequence[int], device: torch.device) -> Tensor:
    """Token ids as a tensor that can be an index."""
    return torch.from_numpy(np.asarray(history, dtype=np.int64)).to(device)


def _penalize_seen(values: Tensor, row: SampleRow) -> None:
    """The repetition penalty: tokens seen become less likely. (One seen twice is written twice, the same.)"""
    penalty = row.params.repetition_penalty
    if penalty == 1.0 or not len(row.history):
        return
    seen = _tokens(row.history, values.device)
    found = values[seen]
    values[seen] = torch.where(found > 0, found / penalty, found * penalty)


def _penalize_reply(values: Tensor, row: SampleRow) -> None:
    """Presence and frequency penalties: for the tokens of the reply."""
    presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
    reply = row.history[row.prompt_length :]
    if (presence or frequency) and len(reply):
        tokens, counts = torch.unique(_tokens(reply, values.device), return_counts=True)
        values[tokens] -= presence + frequency * counts


def _add_bias(values: Tensor, row: SampleRow) -> None:
    """The bias: added to the logits of the tokens that it names."""
    bias = row.params.logit_bias
    if bias:
        if max(bias) >= len(values):
            raise InvalidInput(f"logit_bias names token {max(bias)}; this model's ids end at {len(values) - 1}")
        values[_tokens(list(bias), values.device)] += torch.tensor(
            list(bias.values()), dtype=values.dtype, device=values.device
        )


def _mask_stops(values: Tensor, row: SampleRow) -> None:
    """The minimum length: no stop token before it is reached."""
    drawn = max(len(row.history) - row.prompt_length, 0)
    if drawn < row.params.min_tokens and row.stop_token_ids:
        values[_tokens(sorted(row.stop_token_ids), values.device)] = -torch.inf
