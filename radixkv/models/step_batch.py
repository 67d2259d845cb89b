"""Lay the inputs of a step end to end, and replace tokens that only the device has.

While a step samples, the next one can be prepared: an input may have a token that the host has not read yet. Its
`sampled_row` is the token's row in the tensor of sampled tokens, which the device copies into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device
from radixkv.models.loaded import SequenceInput

Int = NDArray[np.int64]


class StepBatch:
    """All inputs laid end to end: tokens, positions and slots [T], the row of each input's last token; in one copy."""

    def __init__(self, inputs: Sequence[SequenceInput], device: Device, sampled: Tensor | None = None) -> None:
        """Start the copy to `device`; `sampled` int64 [rows] has the tokens of inputs with a `sampled_row`."""
        lengths = [len(each.tokens) for each in inputs]
        positions = [np.arange(each.start, each.start + n) for each, n in zip(inputs, lengths, strict=True)]
        last_rows = np.cumsum(lengths) - 1
        columns = [np.concatenate([each.tokens for each in inputs]), np.concatenate(positions)]
        columns += [np.concatenate([each.slots for each in inputs]), last_rows]
        columns += unknown_tokens(inputs, last_rows)
        there = device.upload(np.concatenate(columns).astype(np.int64))
        self.tokens, self.positions, self.slots, self.last_rows, places, rows = there.split_with_sizes(
            [len(column) for column in columns]
        )
        relay(self.tokens, places, rows, sampled)


def unknown_tokens(inputs: Sequence[SequenceInput], last_rows: Int) -> tuple[Int, Int]:
    """Return the places of unknown tokens among a step's tokens, and the row of `sampled` that has each."""
    unknown = [index for index, each in enumerate(inputs) if each.sampled_row >= 0]
    rows = np.fromiter((inputs[index].sampled_row for index in unknown), dtype=np.int64, count=len(unknown))
    return last_rows[unknown], rows


def relay(tokens: Tensor, places: Tensor, rows: Tensor, sampled: Tensor | None) -> None:
    """Copy `sampled[rows]` to `tokens[places]`, all int64 on one device; costs two launches, and none for no rows."""
    if len(rows):
        assert sampled is not None, "an input has a token that is not known, and no sampled tokens were passed"
        tokens.index_copy_(0, places, sampled.index_select(0, rows))
