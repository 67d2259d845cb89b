"""Sample on the device: the host neither waits between two launches nor launches once per row.

`DeviceSampler` draws the tokens that `sample` draws from the same logits. The parameters of all rows travel in one
upload, the results of all rows in one download. The number of launches depends on the kinds of parameters in a batch
(penalties, bias, filters, log probabilities, masks), not on its rows. Tokens that a draw adds to a stream's history are
counted on the device, so the next draw can begin before the host has read them. Rows of beam searches are processed
apart from the others, because the processors change their log probabilities and not their logits.
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
from radixkv.sampling.batch_draw import GREEDY, DrawRows, draw
from radixkv.sampling.batch_rows import Batch
from radixkv.sampling.device_candidates import CandidateSearch, Mixture, bits_of
from radixkv.sampling.logits_processors import LogitsProcessor
from radixkv.sampling.params import SampleRow, TokenLogprobs
from radixkv.sampling.sampler import Sampled, merged
from radixkv.sampling.token_counts import TokenCounts
from radixkv.sampling.token_mask import TokenMask

# Draws the random rows of float logits [rows, vocab], given their maxima [rows]: tokens int64 [rows].
Draw = Callable[[Tensor, Tensor, DrawRows], Tensor]


class DeviceSampler:
    """Samples logits where they are. See `Sampler` for the contract.

    Several draws may be in flight. A row with `in_flight` tokens must follow the draw that sampled them, and a stream's
    history must consist of its sampled tokens and tokens that the host appended while none was in flight. The host
    appends all tokens of a stream whose rows have candidates; none is counted before it is in the history. Streams that
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

        The custom `processors` follow the sampling parameters' own.
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
        searched = [at for at, row in enumerate(rows) if row.candidates]
        with self._device.current():
            if not searched:
                return self._launch(logits, self._planned(logits, rows, sources), mask)
            search = CandidateSearch(self._part(logits, rows, sources, searched), searched)
            search.launch(logits, self._counts, self._device)
            drawn = [at for at, row in enumerate(rows) if not row.candidates]
            mask = None if mask is None else mask.part(drawn)
            return self._launch(
                logits, self._part(logits, rows, sources, drawn), mask, Mixture(len(rows), drawn, search)
            )

    def _planned(self, logits: Tensor, rows: Sequence[SampleRow], sources: Sequence[int]) -> Batch:
        return Batch(rows, sources, (logits.shape[0], logits.shape[1]), self._counts, self._processors)

    def _part(self, logits: Tensor, rows: Sequence[SampleRow], sources: Sequence[int], places: Sequence[int]) -> Batch:
        return self._planned(logits, [rows[at] for at in places], [sources[at] for at in places])

    def _launch(
        self, logits: Tensor, batch: Batch, mask: TokenMask | None, mixture: Mixture | None = None
    ) -> DevicePending:
        """Draw the rows of a batch, and download its results together with a search's."""
        best, tokens = logits.max(dim=1)
        bits, maxima = bits_of(best), best
        if not batch.rows:
            return self._pending(tokens[:0], [bits], batch, mixture)
        if batch.plain and mask is None:
            return self._pending(tokens, [bits, tokens, bits], batch, mixture)
        numbers = batch.upload(self._device)
        if batch.filling is not None:
            self._counts.fill(batch.filling, numbers.cleared, numbers.seen, numbers.replied)
        values = logits
        if not batch.in_order:
            values = logits.index_select(0, numbers.sources)
            best, tokens = best.index_select(0, numbers.sources), tokens.index_select(0, numbers.sources)
        if mask is not None or batch.adjusts:
            values = values.clone(memory_format=torch.contiguous_format) if batch.in_order else values
            if mask is not None:
                mask.limit(values)
            values = batch.process(values, numbers, self._counts)
            best, tokens = values.max(dim=1)
        if batch.random:
            tokens = torch.where(numbers.draws.kinds == GREEDY, tokens, self._draw(values, best, numbers.draws))
        found = [bits, tokens, bits if best is maxima else bits_of(best)]
        if batch.most_logprobs is not None:
            table = torch.log_softmax(logits.index_select(0, numbers.reported_sources).float(), dim=-1)
            chosen = table.gather(1, tokens.index_select(0, numbers.reported)[:, None])
            values, ids = table.topk(batch.most_logprobs, dim=1)
            found += [bits_of(chosen), bits_of(values), ids.flatten()]
        pending = self._pending(tokens, found, batch, mixture)
        if batch.filling is not None:
            entries = numbers.slots * batch.vocab + tokens
            self._counts.add(batch.filling, entries, numbers.increments.int(), pending.unread())
        return pending

    def _pending(self, tokens: Tensor, found: list[Tensor], batch: Batch, mixture: Mixture | None) -> DevicePending:
        """Start the download of the results."""
        if mixture is not None:
            tokens = mixture.tokens(tokens, self._device)
            found = found + mixture.search.found
        return DevicePending(tokens, self._device.download([torch.cat(found)]), batch, mixture)


class DevicePending:
    """The draws of one batch of a `DeviceSampler`; see `Pending`."""

    def __init__(self, tokens: Tensor, download: Download, batch: Batch, mixture: Mixture | None = None) -> None:
        """Hold the tokens on the device, and the copy of all results that is under way."""
        self.tokens = tokens
        self._read = False
        self._download = download
        self._batch = batch
        self._mixture = mixture

    def finite(self) -> list[bool]:
        """See Pending."""
        finite: list[bool] = np.isfinite(self._results()[: self._batch.logits_rows].view(np.float64)).tolist()
        return finite

    def result(self) -> Sampled:
        """See Pending."""
        batch, mixture, size = self._batch, self._mixture, len(self._batch.rows)
        numbers, first, end = self._results(), batch.logits_rows, batch.logits_rows + 2 * size
        broken = frozenset((~np.isfinite(numbers[first + size : end].view(np.float64))).nonzero()[0].tolist())
        drawn = Sampled(numbers[first : first + size].tolist(), self._logprobs(numbers[end:]), broken)
        if mixture is None:
            return drawn
        if batch.most_logprobs is not None:
            end += len(batch.reported) * (1 + 2 * batch.most_logprobs)
        searched = mixture.search
        return merged((mixture.drawn, drawn), (searched.places, searched.result(numbers[end:])))

    def unread(self) -> Callable[[], bool]:
        """Return a function that says whether this object exists, and the host has not read its results."""
        reference = weakref.ref(self)

        def unread() -> bool:
            found = reference()
            return found is not None and not found._read

        return unread

    def _results(self) -> NDArray[np.int64]:
        [numbers] = self._download.wait()
        self._read = True
        return numbers

    def _logprobs(self, numbers: NDArray[np.int64]) -> list[TokenLogprobs | None] | None:
        batch = self._batch
        if batch.most_logprobs is None:
            return None
        count, most = len(batch.reported), batch.most_logprobs
        chosen, values, ids, _ = np.split(numbers, [count, count * (1 + most), count * (1 + 2 * most)])
        found: list[TokenLogprobs | None] = [None] * len(batch.rows)
        table = values.view(np.float64).reshape(count, most).tolist()
        tokens = ids.reshape(count, most).tolist()
        for place, (at, own) in enumerate(zip(batch.reported, chosen.view(np.float64).tolist(), strict=True)):
            wanted = batch.rows[at].params.logprobs or 0
            found[at] = TokenLogprobs(own, tuple(zip(tokens[place][:wanted], table[place][:wanted], strict=True)))
        return found
