"""Pack the parameters of a batch's rows into one array of integers, so that they travel to the device in one copy.

On the device they change the logits of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device
from radixkv.sampling.batch_draw import FILTERED, GREEDY, PLAIN, DrawRows
from radixkv.sampling.logits_processors import (
    BATCHED,
    LogitsProcessor,
    check_bias,
    completing_tokens,
    process_shares,
    shares,
)
from radixkv.sampling.params import SampleRow, SamplingParams, columns
from radixkv.sampling.race import draw_key
from radixkv.sampling.token_counts import Filling, TokenCounts

_COLUMNS = columns(SamplingParams)
_WHOLE = [name for name, column in _COLUMNS.items() if column.dtype == "int64"]
_REAL = [name for name in _COLUMNS if name not in _WHOLE]
_OWN = 5  # integers of each row that no parameter gives
_INTEGERS, _FLOATS = _OWN + len(_WHOLE), len(_REAL)  # numbers of each row, by kind


@dataclass(frozen=True)
class Numbers:
    """The numbers of a batch on the device: columns [rows], and lists of entries of the logits or of the counts.

    `biased` and `excluded` are entries of the logits [rows * vocab]; `reported` are the rows with log probabilities.
    """

    sources: Tensor
    slots: Tensor
    increments: Tensor
    draws: DrawRows
    bias: Tensor
    biased: Tensor
    excluded: Tensor
    reported: Tensor
    reported_sources: Tensor
    cleared: Tensor
    seen: Tensor
    replied: Tensor


class Batch:
    """One call of a sampler, planned on the host.

    `adjusts` says whether a processor changes the logits; `random`, whether a row is not greedy; `plain`, whether the
    largest logit of each row in its order is all that is asked for. `filling` is None if no row has penalties;
    `most_logprobs` is the largest number of alternatives, None if no row has log probabilities.
    """

    def __init__(
        self,
        rows: Sequence[SampleRow],
        sources: Sequence[int],
        shape: tuple[int, int],
        counts: TokenCounts,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Plan to sample `rows` from row sources[i] of logits of this shape; raises InvalidInput.

        The custom `processors` follow the sampling parameters' own.
        """
        self.logits_rows, self.vocab = shape
        self.rows, self.sources = rows, sources
        self.in_order = len(rows) == self.logits_rows and all(at == source for at, source in enumerate(sources))
        params = [row.params for row in rows]
        given = any(each.adjusts_logits for each in params)
        self._shares = shares(rows, processors, skip=BATCHED)
        self.adjusts = given or bool(self._shares)
        self._kinds = [_kind(row) for row in rows]
        self.random = any(self._kinds)
        self.reported = [at for at, each in enumerate(params) if each.logprobs is not None]
        self.most_logprobs = (
            min(max(params[at].logprobs or 0 for at in self.reported), self.vocab) if self.reported else None
        )
        self.bias: list[float] = []
        self.biased: list[int] = []
        self.excluded: list[int] = []
        self.repetition = self.reply = False
        self.filling: Filling | None = None
        self.plain = self.in_order and not (self.adjusts or self.random or self.reported)
        if given:
            self._plan_adjustments(counts)

    def _plan_adjustments(self, counts: TokenCounts) -> None:
        self._counted: list[int] = []
        for at, row in enumerate(self.rows):
            params, first = row.params, at * self.vocab
            if not params.adjusts_logits:
                continue
            if params.logit_bias:
                check_bias(params.logit_bias, self.vocab)
                self.biased += [first + token for token in params.logit_bias]
                self.bias += params.logit_bias.values()
            if len(row.history) + row.in_flight - row.prompt_length < params.min_tokens:
                self.excluded += [first + token for token in row.stop_token_ids if token < self.vocab]
            if row.bad_words:
                assert not row.in_flight or all(len(word) == 1 for word in row.bad_words), "a word's start is unknown"
                self.excluded += [first + token for token in completing_tokens(row) if token < self.vocab]
            repetition = params.repetition_penalty != 1.0
            reply = bool(params.presence_penalty or params.frequency_penalty)
            self.repetition |= repetition
            self.reply |= reply
            if repetition or reply:
                self._counted.append(at)
        if self._counted:
            self.filling = counts.plan([self.rows[at] for at in self._counted], self.vocab)

    def upload(self, device: Device) -> Numbers:
        """Start to copy all numbers to the device, in one piece."""
        size, filling = len(self.rows), self.filling
        integers = np.zeros((_INTEGERS, _padded(size)), np.int64)
        floats = np.zeros((_FLOATS, _padded(size)), np.float64)
        numbers = dict(zip(_COLUMNS, np.array([row.params.numbers for row in self.rows]).T, strict=True))
        integers[_OWN:, :size] = [numbers[name] for name in _WHOLE]
        floats[:, :size] = [numbers[name] for name in _REAL]
        integers[0, :size] = self.sources
        if filling is not None:
            integers[1, self._counted] = [slot.index for slot in filling.slots]
            integers[2, self._counted] = 2
        if self.random:
            integers[3, :size] = self._kinds
            integers[4, :size] = [
                draw_key(row.seed, row.position) if kind else 0
                for row, kind in zip(self.rows, self._kinds, strict=True)
            ]
        lists: list[NDArray[np.int64]] = [
            np.array(self.bias, np.float64).view(np.int64),
            *(np.array(each, np.int64) for each in (self.biased, self.excluded, self.reported)),
            np.array([self.sources[at] for at in self.reported], np.int64),
        ]
        lists += [np.empty(0, np.int64)] * 3 if filling is None else [filling.cleared, filling.seen, filling.replied]
        packed = device.upload(np.concatenate([integers.ravel(), floats.view(np.int64).ravel(), *lists]))
        return self._numbers(packed, [len(each) for each in lists])

    def _numbers(self, packed: Tensor, lengths: list[int]) -> Numbers:
        """Return views of the uploaded numbers."""
        size, width = len(self.rows), _padded(len(self.rows))
        middle, head = _INTEGERS * width, (_INTEGERS + _FLOATS) * width
        integers = packed[:middle].view(_INTEGERS, width)[:, :size]
        doubles = packed[middle:head].view(torch.float64).view(_FLOATS, width)
        sources, slots, increments, kinds, keys, *whole = integers.unbind()
        numbers = dict(zip(_WHOLE, whole, strict=True))
        for name, double, single in zip(_REAL, doubles[:, :size], doubles.float()[:, :size], strict=True):
            numbers[name] = double if _COLUMNS[name].dtype == "float64" else single
        bias, biased, excluded, reported, reported_sources, *filled = torch.split(packed[head:], lengths)
        draws = DrawRows(kinds, keys, numbers, PLAIN in self._kinds, FILTERED in self._kinds)
        return Numbers(
            sources,
            slots,
            increments,
            draws,
            bias.view(torch.float64),
            biased,
            excluded,
            reported,
            reported_sources,
            *filled,
        )

    def process(self, values: Tensor, numbers: Numbers, counts: TokenCounts) -> Tensor:
        """Apply all processors to values [rows, vocab], which may be changed in place.

        The token counts have been filled. The number of launches does not depend on the rows.
        """
        if self.filling is not None:
            counted, own = counts.table.index_select(0, numbers.slots), numbers.draws.numbers
            if self.repetition:
                penalty = own["repetition_penalty"][:, None].to(values.dtype)
                values = torch.where(counted > 0, torch.where(values > 0, values / penalty, values * penalty), values)
            if self.reply:
                replied = counted >> 1
                lost = own["presence_penalty"][:, None] + own["frequency_penalty"][:, None] * replied
                values = values - lost.masked_fill_(replied == 0, 0.0)
        if self.biased:
            values.view(-1).index_add_(0, numbers.biased, numbers.bias.to(values.dtype))
        if self.excluded:
            values.view(-1).index_fill_(0, numbers.excluded, -torch.inf)
        process_shares(self._shares, values, self.rows)
        return values


def _padded(rows: int) -> int:
    """Return the length of a column: it starts at a multiple of 16 bytes, so that kernels are compiled once."""
    return -(-rows // 4) * 4


def _kind(row: SampleRow) -> int:
    if row.params.greedy or row.candidates:
        return GREEDY
    return FILTERED if row.params.filtered else PLAIN
