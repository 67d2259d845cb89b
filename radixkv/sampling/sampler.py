"""Logits to tokens: every row with its own settings, all rows at once.

Knows logits, parameters and token histories. Does not know models, sequences or text. A row's draw depends on its own
logits, parameters, seed and position alone: not on the batch, the cache or the device.

Every filter is a threshold: top-k, top-p and min-p each name the smallest logit that they keep, and equal logits share
one fate. So the kept set needs no tie-breaking, and a draw walks it in the order of token ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import InvalidInput
from radixkv.sampling.logits_processors import adjusted
from radixkv.sampling.params import SampleRow, SamplingParams, TokenLogprobs

_FIRST_CANDIDATES = 64  # how many of the likeliest tokens are looked at first when only top_p or min_p cuts
_WIDEN = 8
_PAGE = 256  # tokens that are weighed together when nothing is cut off
_BELOW_ONE = 1 - 2**-50
_FLOAT = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Sampled:
    """The tokens drawn, one per row; log probabilities for the rows that asked, None if no row did.

    Rows in `broken` had no finite maximum (NaN, or nothing allowed): their tokens mean nothing.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    broken: frozenset[int] = frozenset()


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Draw one token from each row of logits [len(rows), vocab]; `logits` is left as it is.

    A row that cannot be drawn from is named in `broken` and changes nothing for the others. Raises InvalidInput if the
    numbers of rows differ. A batch of greedy rows costs one argmax; top-k costs one partial sort; penalties cost the
    length of the row's history.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise InvalidInput(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    if not rows:
        return Sampled([], None)
    processed = adjusted(logits, rows)
    best, tokens = processed.max(dim=-1)
    broken = frozenset((~torch.isfinite(best)).nonzero()[:, 0].tolist())
    drawn: list[int] = tokens.tolist()
    for plan, members in _plans(rows, logits.shape[1], broken).items():
        for index, token in zip(members, _draw(processed, best, rows, members, plan), strict=True):
            drawn[index] = token
    return Sampled(drawn, _logprobs(logits, rows, drawn), broken)


def _plans(rows: Sequence[SampleRow], vocab: int, broken: frozenset[int]) -> dict[int, list[int]]:
    """Random rows by how many candidates each looks at first, which depends on the row alone; 0: all, unsorted."""
    plans: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        params = row.params
        if params.greedy or index in broken:
            continue
        if params.top_k > 0:
            # One more than k shows whether the k-th has equals; powers of two put similar rows into one sort.
            plans[min(1 << max(params.top_k, 15).bit_length(), vocab)].append(index)
        elif params.top_p < 1 or params.min_p > 0:
            plans[min(_FIRST_CANDIDATES, vocab)].append(index)
        else:
            plans[0].append(index)
    return plans


def _draw(adjusted: Tensor, best: Tensor, rows: Sequence[SampleRow], members: list[int], candidates: int) -> list[int]:
    """Draw for the rows `members`, which share a plan."""
    chosen = [rows[index] for index in members]
    everybody = len(members) == len(rows)
    dice = _Dice(
        adjusted if everybody else adjusted[members],
        (best if everybody else best[members])[:, None],
        [row.params for row in chosen],
        torch.tensor([[_uniform(row.seed, row.position)] for row in chosen], dtype=torch.float64, device=best.device),
    )
    return dice.roll_all() if candidates == 0 else dice.roll(candidates)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only (seed, position) decide; 48 bits, so that no product rounds up to the total."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position % 2**64), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


class _Dice:
    """Rows on their way to a draw: logits [rows, vocab], their maximum [rows, 1], parameters, uniforms [rows, 1]."""

    def __init__(self, logits: Tensor, best: Tensor, params: list[SamplingParams], uniform: Tensor) -> None:
        self.logits, self.best, self.params, self.uniform = logits, best, params, uniform
        # What float32 has no number for would make 0/0 or inf/inf.
        self.temperature = self._column([p.temperature for p in params]).clamp(_FLOAT.tiny, _FLOAT.max).float()

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self.logits.device)[:, None]

    def _scaled(self, logits: Tensor) -> Tensor:
        """Logits over temperature, the likeliest being 0: so no temperature can overflow."""
        return (logits - self.best).float().div_(self.temperature)

    def roll_all(self) -> list[int]:
        """Draw from the entire distribution: a page of tokens by the pages' weights, then a token of the page."""
        weights = self._scaled(self.logits).exp_()
        pages = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _PAGE)).view(len(weights), -1, _PAGE)
        cumulative = pages.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
        target = self.uniform * cumulative[:, -1:]
        page = torch.searchsorted(cumulative, target, right=True)
        rest = target - torch.where(page > 0, cumulative.gather(1, (page - 1).clamp_min(0)), 0.0)
        within = pages.take_along_dim(page[:, :, None], dim=1)[:, 0].cumsum(dim=1, dtype=torch.float64)
        # Two sums of a page may differ in the last bit: stay below the one that is searched.
        place = torch.searchsorted(within, torch.minimum(rest, within[:, -1:] * _BELOW_ONE), right=True)
        tokens: list[int] = (page * _PAGE + place)[:, 0].tolist()
        return tokens

    def roll(self, candidates: int) -> list[int]:
        """Draw from what top-k, top-p and min-p keep, looking at the likeliest `candidates` only.

        Rows whose kept set may reach beyond the candidates are drawn again from more of them.
        """
        best_logits, ids = self.logits.topk(candidates, dim=1)
        values = self._scaled(best_logits)
        weights = values.double().exp()
        threshold = self._threshold(values, weights)
        ids, order = ids.sort(dim=1)
        cumulative = (weights * (values >= threshold)).gather(1, order).cumsum(dim=1)
        place = torch.searchsorted(cumulative, self.uniform * cumulative[:, -1:], right=True)
        tokens: list[int] = ids.gather(1, place)[:, 0].tolist()
        if candidates == self.logits.shape[1]:
            return tokens
        unfinished = (values[:, -1:] >= threshold)[:, 0].nonzero()[:, 0].tolist()
        if unfinished:
            wider = min(candidates * _WIDEN, self.logits.shape[1])
            for index, token in zip(unfinished, self._only(unfinished).roll(wider), strict=True):
                tokens[index] = token
        return tokens

    def _only(self, rows: list[int]) -> _Dice:
        """Some of these rows."""
        return _Dice(self.logits[rows], self.best[rows], [self.params[row] for row in rows], self.uniform[rows])

    def _threshold(self, values: Tensor, weights: Tensor) -> Tensor:
        """The smallest value [rows, 1] that all three filters keep, among candidates sorted from the likeliest."""
        last = values.shape[1] - 1
        top_k = self._column([min(max(p.top_k, 0), self.logits.shape[1]) for p in self.params])
        top_p = self._column([p.top_p for p in self.params])
        min_p = self._column([p.min_p for p in self.params])
        kth = values.gather(1, (top_k.long() - 1).clamp(0, last)).masked_fill(top_k == 0, -torch.inf)
        within = weights * (values >= kth)
        total = within.sum(dim=1, keepdim=True)
        if any(p.top_k <= 0 and p.top_p < 1 for p in self.params):
            everything = self._scaled(self.logits).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
            total = torch.where(top_k > 0, total, everything)
        nucleus = (within.cumsum(dim=1) - within < top_p * total).sum(dim=1, keepdim=True)
        mass = values.gather(1, (nucleus - 1).clamp(0, last)).masked_fill(top_p >= 1, -torch.inf)
        return torch.maximum(torch.maximum(kth, mass), min_p.log().to(values.dtype))


def _logprobs(logits: Tensor, rows: Sequence[SampleRow], tokens: list[int]) -> list[TokenLogprobs | None] | None:
    """Log probabilities under the model's own distribution, for the rows that want them."""
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    found: list[TokenLogprobs | None] = [None] * len(rows)
    table = torch.log_softmax(logits[wanted].float(), dim=-1)
    chosen = table.gather(1, torch.tensor([[tokens[index]] for index in wanted], device=table.device))[:, 0].tolist()
    most = max(rows[index].params.logprobs or 0 for index in wanted)
    values, ids = (part.tolist() for part in table.topk(min(most, table.shape[1]), dim=1))
    for place, index in enumerate(wanted):
        count = rows[index].params.logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        found[index] = TokenLogprobs(chosen[place], top)
    return found
