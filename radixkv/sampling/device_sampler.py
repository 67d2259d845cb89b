"""Sample on the device: the host neither waits between two launches nor launches once per row.

`DeviceSampler` draws the tokens that `sample` draws from the same logits. The parameters of all rows travel in one
upload, the results of all rows in one download. The number of launches depends on the kinds of parameters in a batch
(penalties, bias, filters, log probabilities, masks), not on its rows. Tokens that a draw adds to a stream's history are
counted on the device, so the next draw can begin before the host has read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device, Download, device_of
from radixkv.errors import InvalidInput
from radixkv.sampling import logits_processors
from radixkv.sampling.batch_draw import GREEDY, DrawRows, draw
from radixkv.sampling.batch_rows import Batch, Numbers
from radixkv.sampling.logits_processors import BATCHED, LogitsProcessor, Shares
from radixkv.sampling.params import SampleRow, TokenLogprobs
from radixkv.sampling.sampler import Sampled
from radixkv.sampling.token_counts import TokenCounts
from radixkv.sampling.token_mask import TokenMask

# Draws the random rows of float logits [rows, vocab], given their maxima [rows]: tokens int64 [rows].
Draw = Callable[[Tensor, Tensor, DrawRows], Tensor]


class DeviceSampler:
    """Samples logits where they are. See `Sampler` for the contract.

    Several draws may be in flight. A row with `in_flight` tokens must follow the draw that sampled them, and a stream's
    history must consist of its sampled tokens and tokens that the host appended while none was in flight. Streams that
    end or are preempted need no call: their slots are taken over, and a stream that resumes is counted again from its
    history. The results of a dropped stream are ignored by the caller.
    """

    def __init__(
        self,
        place: torch.device,
        draw: Draw = draw,
        counts: TokenCounts | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Sample logits on the device `place`; `draw` samples the rows that are not greedy.

        The custom `processors` follow those of the sampling parameters.
        """
        self._device: Device = device_of(place)
        self._draw = draw
        self._counts = counts or TokenCounts(place)
        self._processors = tuple(processors)

    @torch.inference_mode()
    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> DevicePending:
        """See Sampler. The logits are never changed."""
        if sources is None:
            sources = range(len(logits))
        if logits.ndim != 2 or len(sources) != len(rows):
            raise InvalidInput(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
        with self._device.current():
            batch = Batch(rows, sources, (logits.shape[0], logits.shape[1]), self._counts)
            processed = logits_processors.shares(self._processors, rows)
            if batch.adjusts:
                own = [each for each in logits_processors.PROCESSORS if not isinstance(each, BATCHED)]
                processed = logits_processors.shares(own, rows) + processed
            return self._launch(logits, batch, mask, processed)

    def _launch(self, logits: Tensor, batch: Batch, mask: TokenMask | None, processed: Shares) -> DevicePending:
        best, tokens = logits.max(dim=1)
        bits, maxima = _bits(best), best
        if batch.plain and mask is None and not processed:
            return self._pending(tokens, [bits, tokens, bits], batch)
        numbers = batch.upload(self._device)
        if batch.filling is not None:
            self._counts.fill(batch.filling, numbers.cleared, numbers.seen, numbers.replied)
        values = logits
        if not batch.in_order:
            values = logits.index_select(0, numbers.sources)
            best, tokens = best.index_select(0, numbers.sources), tokens.index_select(0, numbers.sources)
        if mask is not None or batch.adjusts or processed:
            values = values.clone(memory_format=torch.contiguous_format) if batch.in_order else values
            if mask is not None:
                mask.limit(values)
            values = self._adjusted(values, batch, numbers)
            logits_processors.process_shares(processed, values, batch.rows)
            best, tokens = values.max(dim=1)
        if batch.random:
            tokens = torch.where(numbers.draws.kinds == GREEDY, tokens, self._draw(values, best, numbers.draws))
        found = [bits, tokens, bits if best is maxima else _bits(best)]
        if batch.most_logprobs is not None:
            table = torch.log_softmax(logits.index_select(0, numbers.reported_sources).float(), dim=-1)
            chosen = table.gather(1, tokens.index_select(0, numbers.reported)[:, None])
            values, ids = table.topk(batch.most_logprobs, dim=1)
            found += [_bits(chosen), _bits(values), ids.flatten()]
        pending = self._pending(tokens, found, batch)
        if batch.filling is not None:
            entries = numbers.slots * batch.vocab + tokens
            self._counts.add(batch.filling, entries, numbers.increments.int(), _unread(pending))
        return pending

    def _pending(self, tokens: Tensor, found: list[Tensor], batch: Batch) -> DevicePending:
        """Start the download of the results."""
        return DevicePending(tokens, self._device.download([torch.cat(found)]), batch)

    def _adjusted(self, values: Tensor, batch: Batch, numbers: Numbers) -> Tensor:
        """Apply the processors of `BATCHED` to values [rows, vocab], which may be changed in place."""
        if batch.filling is not None:
            counts = self._counts.table.index_select(0, numbers.slots)
            if batch.repetition:
                penalty = numbers.repetition[:, None].to(values.dtype)
                values = torch.where(counts > 0, torch.where(values > 0, values / penalty, values * penalty), values)
            if batch.reply:
                replied = counts >> 1
                lost = numbers.presence[:, None] + numbers.frequency[:, None] * replied
                values = values - lost.masked_fill_(replied == 0, 0.0)
        if len(batch.biased):
            values.view(-1).index_add_(0, numbers.biased, numbers.bias.to(values.dtype))
        if len(batch.stops):
            values.view(-1).index_fill_(0, numbers.stops, -torch.inf)
        return values


class DevicePending:
    """The draws of one batch of a `DeviceSampler`; see `Pending`. `read` says whether the host has read the results."""

    def __init__(self, tokens: Tensor, download: Download, batch: Batch) -> None:
        """Hold the tokens on the device, and the copy of all results that is under way."""
        self.tokens = tokens
        self.read = False
        self._download = download
        self._batch = batch

    def finite(self) -> list[bool]:
        """See Pending."""
        finite: list[bool] = np.isfinite(self._results()[: self._batch.logits_rows].view(np.float64)).tolist()
        return finite

    def result(self) -> Sampled:
        """See Pending."""
        first, size = self._batch.logits_rows, len(self._batch.rows)
        numbers = self._results()
        best = numbers[first + size : first + 2 * size]
        broken = frozenset((~np.isfinite(best.view(np.float64))).nonzero()[0].tolist())
        return Sampled(numbers[first : first + size].tolist(), self._logprobs(numbers), broken)

    def _results(self) -> NDArray[np.int64]:
        [numbers] = self._download.wait()
        self.read = True
        return numbers

    def _logprobs(self, numbers: NDArray[np.int64]) -> list[TokenLogprobs | None] | None:
        batch = self._batch
        if batch.most_logprobs is None:
            return None
        count, most = len(batch.reported), batch.most_logprobs
        chosen, values, ids = np.split(numbers[-count * (1 + 2 * most) :], [count, count * (1 + most)])
        found: list[TokenLogprobs | None] = [None] * len(batch.rows)
        table = values.view(np.float64).reshape(count, most).tolist()
        tokens = ids.reshape(count, most).tolist()
        for place, (at, own) in enumerate(zip(batch.reported, chosen.view(np.float64).tolist(), strict=True)):
            wanted = batch.rows[at].params.logprobs or 0
            found[at] = TokenLogprobs(own, tuple(zip(tokens[place][:wanted], table[place][:wanted], strict=True)))
        return found


def _unread(pending: DevicePending) -> Callable[[], bool]:
    """Return a function that says whether a draw exists, and the host has not read its results."""
    reference = weakref.ref(pending)

    def unread() -> bool:
        found = reference()
        return found is not None and not found.read

    return unread


def _bits(numbers: Tensor) -> Tensor:
    """Return floats as the int64s with the bits of their doubles, flat."""
    return numbers.double().flatten().view(torch.int64)
