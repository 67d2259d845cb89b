"""Logits processors: functions that change a row's logits before sampling, for penalties, bias and minimum length.

`PROCESSORS` are applied in order. A parameter that is declared with `adjusts_logits` needs a processor in this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import InvalidInput
from radixkv.sampling.params import SampleRow

# Changes the logits [vocab] of one row in place; does nothing if its parameters have their defaults.
LogitsProcessor: TypeAlias = Callable[[Tensor, SampleRow], None]


def adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply each row's processors to a copy of logits [rows, vocab]; return `logits` itself if no row needs one.

    Raises InvalidInput for a bias of a token id beyond the vocabulary.
    """
    if not any(row.params.adjusts_logits for row in rows):
        return logits
    copy = logits.clone()
    for values, row in zip(copy, rows, strict=True):
        if row.params.adjusts_logits:
            for process in PROCESSORS:
                process(values, row)
    return copy


def repetition_penalty(values: Tensor, row: SampleRow) -> None:
    """Make the tokens of prompt and reply less likely. A token that occurs twice is penalised once."""
    penalty = row.params.repetition_penalty
    if penalty == 1.0 or not len(row.history):
        return
    seen = _as_index(row.history, values.device)
    found = values[seen]
    values[seen] = torch.where(found > 0, found / penalty, found * penalty)


def reply_penalties(values: Tensor, row: SampleRow) -> None:
    """Subtract the presence penalty once, and the frequency penalty for each occurrence, from the reply's tokens."""
    presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
    reply = row.history[row.prompt_length :]
    if (presence or frequency) and len(reply):
        tokens, counts = torch.unique(_as_index(reply, values.device), return_counts=True)
        values[tokens] -= presence + frequency * counts


def logit_bias(values: Tensor, row: SampleRow) -> None:
    """Add the bias of each token that has one."""
    bias = row.params.logit_bias
    if bias:
        check_bias(bias, len(values))
        values[_as_index(list(bias), values.device)] += torch.tensor(
            list(bias.values()), dtype=values.dtype, device=values.device
        )


def minimum_length(values: Tensor, row: SampleRow) -> None:
    """Mask the stop tokens while the reply is shorter than `min_tokens`."""
    drawn = max(len(row.history) - row.prompt_length, 0)
    if drawn < row.params.min_tokens and row.stop_token_ids:
        values[_as_index(sorted(row.stop_token_ids), values.device)] = -torch.inf


PROCESSORS: list[LogitsProcessor] = [repetition_penalty, reply_penalties, logit_bias, minimum_length]

BATCHED = frozenset((repetition_penalty, reply_penalties, logit_bias, minimum_length))
"""The processors that `DeviceSampler` applies to all rows together.

It calls each other processor once per row, after these. The row's history then lacks a token in flight.
"""


def check_bias(bias: Mapping[int, float], vocab: int) -> None:
    """Raise InvalidInput if a token of a bias, which is not empty, is beyond the vocabulary."""
    if max(bias) >= vocab:
        raise InvalidInput(f"logit_bias names token {max(bias)}; this model's ids end at {vocab - 1}")


def _as_index(history: Sequence[int], device: torch.device) -> Tensor:
    """Return token ids as a tensor that can be an index."""
    return torch.from_numpy(np.asarray(history, dtype=np.int64)).to(device)
