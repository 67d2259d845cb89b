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

    `logit_rows` are the rows [inputs + additional] that need logits: the last row of each input, then the additional
    rows of each input. `unknown` are the rows whose tokens are not known, and `sampled_rows` their rows in the tensor
    of sampled tokens.
    """

    tokens: NDArray[np.signedinteger]  # [T]
    positions: Int  # [T]
    slots: Int  # [T]
    logit_rows: Int
    unknown: Int
    sampled_rows: Int


def step_columns(inputs: Sequence[SequenceInput], rows: int = 0, sequences: int = 0) -> StepColumns:
    """Lay inputs end to end; pad them to `rows` rows and `sequences` rows with logits, if they have fewer.

    A padded row has slot -1, which is not written. Padded rows with logits are row 0.
    """
    lengths = [len(each.tokens) for each in inputs]
    firsts = [each.start + each.offset for each in inputs]
    last_rows = np.cumsum(lengths)
    last_rows -= 1
    columns = (
        np.concatenate([each.tokens for each in inputs]),
        np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, lengths, strict=True)]),
        np.concatenate([each.slots for each in inputs]),
        last_rows,
    )
    if last_rows[-1] >= len(inputs) and num_logit_rows(inputs) > len(inputs):  # decodes have one row each
        columns = (*columns[:3], _logit_rows(inputs, last_rows))
    if rows:
        sizes, paddings = (rows, rows, rows, sequences), (0, 0, -1, 0)
        columns = tuple(map(_padded, columns, sizes, paddings))  # type: ignore[assignment]
    unknown = [index for index, each in enumerate(inputs) if each.sampled_row >= 0]
    if not unknown:
        return StepColumns(*columns, _NONE, _NONE)
    return StepColumns(*columns, last_rows[unknown], np.array([inputs[index].sampled_row for index in unknown]))


_NONE: Int = np.empty(0, dtype=np.int64)


def _logit_rows(inputs: Sequence[SequenceInput], last_rows: Int) -> Int:
    """Return the rows that need logits: the last row of each input, then the additional rows of each input."""
    longer = [(each, last) for each, last in zip(inputs, last_rows.tolist(), strict=True) if each.logit_rows > 1]
    assert all(each.logit_rows <= len(each.tokens) for each, _ in longer), "more rows of logits than tokens"
    return np.concatenate([last_rows, *(np.arange(last - each.logit_rows + 1, last) for each, last in longer)])


def num_logit_rows(inputs: Sequence[SequenceInput]) -> int:
    """Return the number of rows of logits of a step, additional ones included."""
    return sum(each.logit_rows for each in inputs)


def logit_places(counts: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the rows of `Runner.run`'s logits that belong to each input, by position, for inputs' `logit_rows`.

    Row i is the last token of input i; the additional rows follow, in the order of the inputs.

    >>> [rows.tolist() for rows in logit_places([1, 3, 2])]
    [[0], [3, 4, 1], [5, 2]]
    """
    places, first = [], len(counts)
    for last, count in enumerate(counts):
        places.append(np.append(np.arange(first, first + count - 1), last))
        first += count - 1
    return places


def _padded(column: NDArray[np.signedinteger], size: int, padding: int) -> Int:
    """Return a column with padding at its end."""
    full: Int = np.full(size, padding, dtype=np.int64)
    full[: len(column)] = column
    return full


class StepBatch:
    """All inputs laid end to end on a device, in one copy: tokens, positions and slots [T], and `logit_rows`."""

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
        self.tokens, self.positions, self.slots, self.logit_rows, unknown, sampled_rows = there
        if len(columns.unknown):
            relay(self.tokens, unknown, sampled_rows, sampled)


def relay(tokens: Tensor, rows: Tensor, sampled_rows: Tensor, sampled: Tensor | None) -> None:
    """Copy `sampled[sampled_rows]` to `tokens[rows]`, int64 on one device; in two launches, or none for no rows."""
    if len(rows):
        assert sampled is not None, "an input has a token that is not known, and no sampled tokens were passed"
        tokens.index_copy_(0, rows, sampled.index_select(0, sampled_rows))
