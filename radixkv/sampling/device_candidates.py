"""Find the candidates of beam searches on the device, as `radixkv.sampling.sampler` does in host memory.

The results are a part of the download of the whole batch. The number of launches does not depend on the rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.device import Device
from radixkv.sampling.batch_rows import Batch
from radixkv.sampling.params import TokenLogprobs
from radixkv.sampling.sampler import Sampled, as_candidates
from radixkv.sampling.token_counts import TokenCounts


class CandidateSearch:
    """The rows of a batch that ask for candidates.

    `places` are their places in the whole batch. `found` are the results on the device, flat int64s: the tokens, the
    bits of their scores and of their log probabilities, then the alternatives of rows with log probabilities.
    """

    def __init__(self, batch: Batch, places: Sequence[int]) -> None:
        """Launch nothing yet; all rows of `batch` have candidates."""
        self.batch, self.places = batch, places
        self.found: list[Tensor] = []
        self._most = min(max(row.candidates for row in batch.rows), batch.vocab)

    def launch(self, logits: Tensor, counts: TokenCounts, device: Device) -> None:
        """Start to find the candidates in logits [n, vocab], which are not changed.

        The slots of `counts` are in use as long as this object exists.
        """
        batch = self.batch
        chosen, numbers = logits, None
        if not batch.in_order or batch.adjusts:
            numbers = batch.upload(device)
            chosen = logits if batch.in_order else logits.index_select(0, numbers.sources)
        scores = table = torch.log_softmax(chosen.float(), dim=-1)
        if batch.adjusts and numbers is not None:
            if batch.filling is not None:
                counts.hold(batch.filling, existence(self))
                counts.fill(batch.filling, numbers.cleared, numbers.seen, numbers.replied)
            scores = batch.process(table.clone(), numbers, counts)
        values, tokens = scores.topk(self._most, dim=1)
        self.found = [tokens.flatten(), bits_of(values), bits_of(table.gather(1, tokens))]
        if batch.most_logprobs is not None:
            top, ids = table.topk(batch.most_logprobs, dim=1)
            self.found += [ids.flatten(), bits_of(top)]

    def result(self, numbers: NDArray[np.int64]) -> Sampled:
        """Return the results of `places`, given the downloaded numbers of `found`."""
        rows, size = self.batch.rows, len(self.batch.rows) * self._most
        tokens, scores, logprobs, rest = np.split(numbers, [size, 2 * size, 3 * size])
        shape = len(rows), self._most
        table = [each.reshape(shape).tolist() for each in (tokens, scores.view(np.float64), logprobs.view(np.float64))]
        found = [
            as_candidates(ids, values, own, row.candidates) for row, ids, values, own in zip(rows, *table, strict=True)
        ]
        broken = frozenset(place for place, each in enumerate(found) if each is None)
        return Sampled(
            [0] * len(rows), self._logprobs(rest, logprobs.view(np.float64)[:: self._most].tolist()), broken, found
        )

    def _logprobs(self, numbers: NDArray[np.int64], chosen: list[float]) -> list[TokenLogprobs | None] | None:
        rows, most = self.batch.rows, self.batch.most_logprobs
        if most is None:
            return None
        ids, values = np.split(numbers, 2)
        table = [each.reshape(len(rows), most).tolist() for each in (ids, values.view(np.float64))]
        found: list[TokenLogprobs | None] = []
        for row, own, tokens, top in zip(rows, chosen, *table, strict=True):
            wanted = row.params.logprobs
            found.append(
                None if wanted is None else TokenLogprobs(own, tuple(zip(tokens[:wanted], top[:wanted], strict=True)))
            )
        return found


@dataclass(frozen=True)
class Mixture:
    """A batch of `size` rows: some are `drawn`, at these places, and the others belong to a search for candidates."""

    size: int
    drawn: Sequence[int]
    search: CandidateSearch

    def tokens(self, drawn: Tensor, device: Device) -> Tensor:
        """Return the tokens of all rows on the device, given the tokens of the drawn rows; the others have no
        meaning."""
        tokens = drawn.new_zeros(self.size)
        return tokens.index_copy_(0, device.upload(np.array(self.drawn, np.int64)), drawn) if self.drawn else tokens


def existence(owner: object) -> Callable[[], bool]:
    """Return a function that says whether an object still exists."""
    reference = weakref.ref(owner)
    return lambda: reference() is not None


def bits_of(numbers: Tensor) -> Tensor:
    """Return floats as the int64s with the bits of their doubles, flat."""
    return numbers.double().flatten().view(torch.int64)
