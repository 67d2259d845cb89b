"""Lay the inputs of a step end to end, and replace tokens that only the device has.

While a step samples, the next one can be prepared: an input may have a token that the host has not read yet. Its
`sampled_row` is the token's row in the tensor of sampled tokens, which the device copies into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device
from radixkv.models.loaded import SequenceInput

Int = NDArray[np.int64]


class StepColumns(NamedTuple):
    """The inputs of a step, as arrays of int64; tokens may be int32 if nothing is padded.

    `unknown` are the rows whose tokens are not known, and `sampled_rows` their rows in the tensor of sampled tokens.
    """

    tokens: NDArray[np.signedinteger]  # [T]
    positions: Int  # [T]
    slots: Int  # [T]
    last_rows: Int  # [sequences] the row of each input's last token
    unknown: Int
    sampled_rows: Int


def step_columns(inputs: Sequence[SequenceInput], rows: int = 0, sequences: int = 0) -> StepColumns:
    """Lay inputs end to end; pad them to `rows` rows and `sequences` last rows, if they have fewer.

    A padded row has slot -1, which is not written. Padded last rows are row 0.
    """
    lengths = [len(each.tokens) for each in inputs]
    last_rows = np.cumsum(lengths)
    last_rows -= 1
    columns = (
        np.concatenate([each.tokens for each in inputs]),
        np.concatenate([np.arange(each.start, each.start + n) for each, n in zip(inputs, lengths, strict=True)]),
        np.concatenate([each.slots for each in inputs]),
        last_rows,
    )
    if rows:
        sizes, paddings = (rows, rows, rows, sequences), (0, 0, -1, 0)
        columns = tuple(map(_padded, columns, sizes, paddings))  # type: ignore[assignment]
    unknown = [index for index, each in enumerate(inputs) if each.sampled_row >= 0]
    if not unknown:
        return StepColumns(*columns, _NONE, _NONE)
    return StepColumns(*columns, last_rows[unknown], np.array([inputs[index].sampled_row for index in unknown]))


_NONE: Int = np.empty(0, dtype=np.int64)


def _padded(column: NDArray[np.signedinteger], size: int, padding: int) -> Int:
    """Return a column with padding at its end."""
    full: Int = np.full(size, padding, dtype=np.int64)
    full[: len(column)] = column
    return full


class StepBatch:
    """All inputs laid end to end on a device, in one copy: tokens, positions and slots [T], and the last rows."""

    def __init__(
        self,
        inputs: Sequence[SequenceInput],
        device: Device,
        sampled: Tensor | None = None,
        *,
        rows: int = 0,
        sequences: int = 0,
    ) -> None:
        """Start the copy to `device`; `sampled` int64 has the tokens of inputs with a `sampled_row`.

        `rows` and `sequences` as in `step_columns`.
        """
        columns = step_columns(inputs, rows, sequences)
        there = device.upload(np.concatenate(columns, dtype=np.int64)).split_with_sizes([*map(len, columns)])
        self.tokens, self.positions, self.slots, self.last_rows, unknown, sampled_rows = there
        if len(columns.unknown):
            relay(self.tokens, unknown, sampled_rows, sampled)


def relay(tokens: Tensor, rows: Tensor, sampled_rows: Tensor, sampled: Tensor | None) -> None:
    """Copy `sampled[sampled_rows]` to `tokens[rows]`, int64 on one device; in two launches, or none for no rows."""
    if len(rows):
        assert sampled is not None, "an input has a token that is not known, and no sampled tokens were passed"
        tokens.index_copy_(0, rows, sampled.index_select(0, sampled_rows))
