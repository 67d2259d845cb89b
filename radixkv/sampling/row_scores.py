"""Score chosen tokens by many rows of logits: log probabilities, ranks and the most likely alternatives.

`begin_scores` serves prompt log probabilities and the scores of given texts. It computes on the device of the logits,
in slices of rows, so its memory does not grow with the rows. Its results travel to the host in one download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device, Download, device_of
from radixkv.errors import InvalidInput

MOST_LOGITS = 1 << 26
"""Numbers in the additional rows of logits of one step, about, at most: 256 MB in float32."""

SLICE_LOGITS = 1 << 22
"""Numbers in a slice of rows whose log probabilities are computed together: 16 MB in float32.

On a CPU, slices four times as large take 1.4 times as long. On a GPU, all rows of a step have up to 16 slices, of about
ten launches each.
"""


def max_logit_rows(vocab: int) -> int:
    """Return the most additional rows of logits that one step may have, for a vocabulary of `vocab` tokens.

    >>> max_logit_rows(32_000), max_logit_rows(1 << 30)
    (2097, 1)
    """
    return max(1, MOST_LOGITS // vocab)


@dataclass(frozen=True)
class RowScores:
    """The scores of rows: log probabilities of the model's own distribution, before any processor or temperature.

    `chosen` float32 [r] belong to the target tokens, and `ranks` int32 [r] are 1 plus the number of tokens with a
    larger one. Rows without a target have NaN and rank 0. `ids` int32 [r, top] and `values` float32 [r, top] are the
    most likely tokens, in falling order.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    ids: NDArray[np.int32]
    values: NDArray[np.float32]

    def __getitem__(self, rows: slice) -> RowScores:
        """Return the scores of some of the rows; views of these arrays."""
        return RowScores(self.chosen[rows], self.ranks[rows], self.ids[rows], self.values[rows])


class PendingScores:
    """Scores that the device may still compute; see `begin_scores`."""

    def __init__(self, download: Download, rows: int) -> None:
        """Hold the copy of the results that is under way."""
        self._download, self._rows = download, rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def result(self, rows: slice = slice(None)) -> RowScores:
        """Wait; return the scores of some rows, by default of all.

        Raises InvalidInput if one of these rows holds NaN or has no finite maximum.
        """
        chosen, values, numbers, ids = self._download.wait()
        ranks, valid = numbers
        broken = np.arange(self._rows)[rows][valid[rows] == 0]
        if len(broken):
            raise InvalidInput(
                f"row {broken[0]} of {self._rows} scored rows of logits has no finite maximum: the model computed NaN "
                "or infinity"
            )
        return RowScores(chosen, ranks, ids, values)[rows]


@torch.inference_mode()
def begin_scores(
    logits: Tensor, targets: Sequence[int], top: int, sources: Sequence[int] | None = None
) -> PendingScores:
    """Start to score tokens targets[i] by rows sources[i] of logits [n, vocab], and the `top` most likely ones.

    A target of -1 is no token. `sources` may repeat and leave out rows; None means all rows of the logits in their
    order. At most `vocab` alternatives are returned. Raises InvalidInput for targets outside of the vocabulary.

    The logits are not changed, and may be on any device. On a GPU nothing waits before `result`, so the next step may
    be launched, and the results travel in one download. Costs one log-softmax and one selection for each row, and takes
    up to about five times the memory of a slice.
    """
    wanted = np.asarray(targets, np.int64)
    rows = len(logits) if sources is None else len(sources)
    if logits.ndim != 2 or wanted.shape != (rows,):
        raise InvalidInput(f"{len(targets)} targets do not fit {rows} rows of logits of shape {tuple(logits.shape)}")
    vocab = logits.shape[1]
    if top < 0:
        raise InvalidInput(f"top={top}: a number of alternatives is at least 0")
    if rows and not -1 <= wanted.min() <= wanted.max() < vocab:
        raise InvalidInput(f"targets must be -1 or tokens of the vocabulary, 0 to {vocab - 1}")
    device = device_of(logits.device)
    with device.current():
        numbers = wanted if sources is None else np.concatenate([wanted, np.asarray(sources, np.int64)])
        there = device.upload(numbers)
        download = _launch(logits, there[:rows], None if sources is None else there[rows:], min(top, vocab), device)
        return PendingScores(download, rows)


def _launch(logits: Tensor, targets: Tensor, sources: Tensor | None, top: int, device: Device) -> Download:
    """Score all rows in slices, and start the download: chosen, values, (ranks, whether the row is finite), ids."""
    rows, step = len(targets), max(1, SLICE_LOGITS // logits.shape[1])
    chosen, values = logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, top, dtype=torch.float32)
    numbers = targets.new_empty(2, rows, dtype=torch.int32)
    ids = targets.new_empty(rows, top, dtype=torch.int32)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        table = logits[part] if sources is None else logits.index_select(0, sources[part])
        table = torch.log_softmax(table.float(), dim=-1)
        wanted = targets[part, None]
        found = table.gather(1, wanted.clamp(min=0)).masked_fill_(wanted < 0, torch.nan)
        chosen[part] = found[:, 0]
        numbers[0, part] = (table > found).sum(dim=1, dtype=torch.int32) + (wanted >= 0)[:, 0]
        numbers[1, part] = ~table[:, 0].isnan()  # a row without a finite maximum has no other values
        if top:
            values[part], ids[part] = table.topk(top, dim=1)
    return device.download([chosen, values, numbers, ids])
