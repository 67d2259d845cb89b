"""Sample tokens from a batch of logits, each row with its own parameters.

A row's token depends on its own logits, parameters, seed and position only: not on the batch, the cache or the device.

Each token has a random number of its own, and the largest ratio of weight and number wins: an exponential race, which
draws tokens in proportion to their weights. Rounding of the logits, which differs between a hit and a miss, changes the
winner only where two ratios are almost equal. Cumulative sums are not as stable: an error in one weight moves the
bounds of all later tokens, and a large vocabulary has thousands of tokens with very small weights.

Every filter is a threshold: top-k, top-p and min-p each give the smallest logit that they keep, and equal logits are
kept or dropped together. So the kept set needs no tie-breaking.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from radixkv.errors import InvalidInput
from radixkv.sampling.batch_draw import lowest, threshold
from radixkv.sampling.logits_processors import LogitsProcessor, adjusted
from radixkv.sampling.params import Candidates, SampleRow, SamplingParams, TokenLogprobs, columns
from radixkv.sampling.race import draw_key, race, race_all
from radixkv.sampling.token_mask import TokenMask

_FIRST_CANDIDATES = 64  # most likely tokens that are sorted first if only top_p or min_p filters
_WIDEN = 8  # factor for the rows whose kept set may reach beyond the candidates
_COLUMNS = columns(SamplingParams)


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens, one per row, and log probabilities for the rows with `logprobs`; None if no row has it.

    Rows in `broken` had no finite maximum, by a NaN or because every token was masked: their tokens are meaningless.
    `candidates` belong to the rows that ask for them; None if no row does. The token of such a row has no meaning,
    and its log probabilities belong to its best candidate. It is in `broken` for a NaN only, else it may have no
    candidates.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    broken: frozenset[int] = frozenset()
    candidates: list[Candidates | None] | None = None


class Pending(Protocol):
    """The draws of one `Sampler.begin`, which may still be running on the device."""

    @property
    def tokens(self) -> Tensor:
        """The sampled tokens, int64 [rows] on the device, for kernels of the same stream; waits for nothing."""
        ...

    def finite(self) -> list[bool]:
        """Wait; return for each row of the logits whether the model computed a finite maximum.

        The KV of a row without one must not be published, whether the row was sampled or not.
        """
        ...

    def result(self) -> Sampled:
        """Wait; return the tokens on the host."""
        ...


class Sampler(Protocol):
    """Samples the tokens of an engine's steps. One thread calls it."""

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> Pending:
        """Start to sample one token for each of `rows`, from row sources[i] of logits [n, vocab] for rows[i].

        `sources` may repeat and leave out rows; None means all rows of the logits in their order. `mask` is of the
        sampled rows and may change the logits, unless the draw may be repeated: a `begin` that raises has changed
        neither the logits nor the sampler, so it can be repeated for a part of the rows. Raises InvalidInput for rows
        that cannot be sampled.
        """
        ...


@dataclass(frozen=True)
class HostPending:
    """Draws that are done. The token tensor and the finite rows are computed when they are first read."""

    logits: Tensor
    sampled: Sampled

    @cached_property
    def tokens(self) -> Tensor:
        """See Pending."""
        return torch.tensor(self.sampled.tokens, dtype=torch.int64, device=self.logits.device)

    def finite(self) -> list[bool]:
        """See Pending."""
        return finite_rows(self.logits)

    def result(self) -> Sampled:
        """See Pending."""
        return self.sampled


class HostSampler:
    """Samples by `sample` before `begin` returns; the best way for logits in host memory."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        """Apply custom logits processors after the sampling parameters' own."""
        self._processors = tuple(processors)

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> HostPending:
        """See Sampler."""
        chosen = logits
        if sources is not None and list(sources) != list(range(len(logits))):  # while every stream decodes, no copy
            chosen = logits.index_select(0, torch.tensor(sources, dtype=torch.int64, device=logits.device))
        return HostPending(logits, sample(chosen, rows, mask, self._processors))


def finite_rows(logits: Tensor) -> list[bool]:
    """Return for each row of logits [rows, vocab] whether it has a finite maximum and no NaN."""
    finite: list[bool] = torch.isfinite(logits.amax(dim=1)).tolist()
    return finite


def sample(
    logits: Tensor, rows: Sequence[SampleRow], mask: TokenMask | None = None, processors: Sequence[LogitsProcessor] = ()
) -> Sampled:
    """Sample one token from each row of logits [len(rows), vocab], which a mask may change.

    The custom `processors` follow the sampling parameters' own.

    A row that cannot be sampled is listed in `broken` and does not affect the others. Raises InvalidInput if the
    numbers of rows differ. A batch of greedy rows costs one argmax, top-k one partial sort, penalties the length of the
    row's history.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise InvalidInput(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    if not rows:
        return Sampled([], None)
    unmasked = logits
    if mask is not None:
        if any(row.params.logprobs is not None for row in rows):  # a batch that raises is drawn again, in parts
            logits = logits.clone()
        mask.limit(logits)
    if any(row.candidates for row in rows):
        return _with_candidates(unmasked, logits, rows, processors)
    return _drawn(unmasked, logits, rows, processors)


def _with_candidates(
    unmasked: Tensor, logits: Tensor, rows: Sequence[SampleRow], processors: Sequence[LogitsProcessor]
) -> Sampled:
    """Draw the rows without candidates as if they were alone, and find the candidates of the others."""
    searched = [index for index, row in enumerate(rows) if row.candidates]
    plain = [index for index, row in enumerate(rows) if not row.candidates]
    own, beams = unmasked[searched], [rows[index] for index in searched]
    found = best_candidates(own, beams, processors)
    drawn = Sampled([], None)
    if plain:
        drawn = _drawn(unmasked[plain], logits[plain], [rows[index] for index in plain], processors)
    broken = frozenset(place for place, each in enumerate(found) if each is None)
    reports = _logprobs(own, beams, [each.tokens[0] if each and each.tokens else 0 for each in found])
    return merged((plain, drawn), (searched, Sampled([0] * len(searched), reports, broken, found)))


def merged(*parts: tuple[Sequence[int], Sampled]) -> Sampled:
    """Return the results of all rows in their order, given those of each part with the places of its rows."""
    size = sum(len(places) for places, _ in parts)
    tokens = [0] * size
    logprobs: list[TokenLogprobs | None] = [None] * size
    candidates: list[Candidates | None] = [None] * size
    for places, part in parts:
        for place, at in enumerate(places):
            tokens[at] = part.tokens[place]
            logprobs[at] = part.logprobs[place] if part.logprobs is not None else None
            candidates[at] = part.candidates[place] if part.candidates is not None else None
    reported = any(part.logprobs is not None for _, part in parts)
    broken = frozenset(places[place] for places, part in parts for place in part.broken)
    return Sampled(tokens, logprobs if reported else None, broken, candidates)


def _drawn(
    unmasked: Tensor, logits: Tensor, rows: Sequence[SampleRow], processors: Sequence[LogitsProcessor]
) -> Sampled:
    processes = processors or any(row.params.adjusts_logits for row in rows)
    processed = adjusted(logits, rows, processors) if processes else logits
    best, tokens = processed.max(dim=-1)
    broken = frozenset((~torch.isfinite(best)).nonzero()[:, 0].tolist())
    drawn: list[int] = tokens.tolist()
    groups = {} if all(row.params.greedy for row in rows) else _by_candidates(rows, logits.shape[1], broken)
    for candidates, members in groups.items():
        for index, token in zip(members, _draw(processed, best, rows, members, candidates), strict=True):
            drawn[index] = token
    return Sampled(drawn, _logprobs(unmasked, rows, drawn), broken)


def _by_candidates(rows: Sequence[SampleRow], vocab: int, broken: frozenset[int]) -> dict[int, list[int]]:
    """Group the random rows by the number of candidates that each sorts first; 0: the whole vocabulary, unsorted.

    The number depends on the row's own parameters only.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        params = row.params
        if params.greedy or index in broken:
            continue
        if params.top_k > 0:
            # More than k candidates show ties with the k-th; powers of two put similar rows into one sort.
            groups[min(1 << max(params.top_k, 15).bit_length(), vocab)].append(index)
        elif params.filtered:
            groups[min(_FIRST_CANDIDATES, vocab)].append(index)
        else:
            groups[0].append(index)
    return groups


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SampleRow], members: list[int], candidates: int) -> list[int]:
    """Sample the rows `members`, which sort the same number of candidates."""
    chosen = [rows[index] for index in members]
    all_rows = len(members) == len(rows)
    draw = _RandomDraw(
        logits if all_rows else logits[members],
        (best if all_rows else best[members])[:, None],
        [row.params for row in chosen],
        torch.tensor([[draw_key(row.seed, row.position)] for row in chosen], device=best.device),
    )
    return draw.from_all() if candidates == 0 else draw.from_candidates(candidates)


class _RandomDraw:
    """Sample rows of logits [rows, vocab], given their maximum [rows, 1], parameters and keys [rows, 1]."""

    def __init__(self, logits: Tensor, best: Tensor, params: list[SamplingParams], keys: Tensor) -> None:
        self.logits, self.best, self.params, self.keys = logits, best, params, keys
        rows = torch.tensor([each.numbers for each in params], dtype=torch.float64, device=logits.device)
        types = (getattr(torch, column.dtype) for column in _COLUMNS.values())
        self._numbers = {name: row.to(dtype) for name, row, dtype in zip(_COLUMNS, rows.T, types, strict=True)}

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits over temperature, shifted so that the maximum is 0: no temperature can overflow."""
        return (logits - self.best).float().div_(self._numbers["temperature"][:, None])

    def from_all(self) -> list[int]:
        """Sample the whole distribution."""
        tokens: list[int] = race_all(self._scaled(self.logits).exp_(), self.keys).tolist()
        return tokens

    def from_candidates(self, candidates: int) -> list[int]:
        """Sample the tokens that top-k, top-p and min-p keep, sorting only the most likely `candidates`.

        Rows whose kept set may reach beyond the candidates are sampled again with more candidates.
        """
        best_logits, ids = self.logits.topk(candidates, dim=1)
        values = self._scaled(best_logits)
        whole = torch.zeros(1)
        if any(each.top_k <= 0 and each.top_p < 1 for each in self.params):
            whole = self._scaled(self.logits).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
        smallest = threshold(values, whole, lowest(self.logits, self._numbers), self._numbers)
        place = race(values.double().exp_() * (values >= smallest), self.keys, ids)
        tokens: list[int] = ids.gather(1, place)[:, 0].tolist()
        if candidates == self.logits.shape[1]:
            return tokens
        unfinished = (values[:, -1:] >= smallest)[:, 0].nonzero()[:, 0].tolist()
        if unfinished:
            wider = min(candidates * _WIDEN, self.logits.shape[1])
            for index, token in zip(unfinished, self._select(unfinished).from_candidates(wider), strict=True):
                tokens[index] = token
        return tokens

    def _select(self, rows: list[int]) -> _RandomDraw:
        return _RandomDraw(self.logits[rows], self.best[rows], [self.params[row] for row in rows], self.keys[rows])


def _logprobs(logits: Tensor, rows: Sequence[SampleRow], tokens: list[int]) -> list[TokenLogprobs | None] | None:
    """Return log probabilities of the model's own distribution, for the rows with `logprobs`."""
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


# ---- beam searches


def best_candidates(
    logits: Tensor, rows: Sequence[SampleRow], processors: Sequence[LogitsProcessor] = ()
) -> list[Candidates | None]:
    """Return the best `candidates` tokens of each row of logits [len(rows), vocab], which is not changed.

    A beam search adds up log probabilities, so the logits processors change log probabilities here, and not logits.
    Transformers' beam search has the same order: a repetition penalty changes the score of a beam by a factor. A row
    whose tokens are all excluded has an empty list, and one with a NaN has None. Costs a log-softmax in float32 and a
    partial sort.
    """
    table = torch.log_softmax(logits.float(), dim=-1)
    scores = adjusted(table, rows, processors)
    most = min(max(row.candidates for row in rows), scores.shape[1])
    values, tokens = scores.topk(most, dim=1)
    own = table.gather(1, tokens)
    lists = zip(tokens.tolist(), values.tolist(), own.tolist(), strict=True)
    return [as_candidates(*lists_of_row, row.candidates) for row, lists_of_row in zip(rows, lists, strict=True)]


def as_candidates(tokens: list[int], scores: list[float], logprobs: list[float], most: int) -> Candidates | None:
    """Return the first `most` candidates of a row in descending order, NaN first, without excluded tokens."""
    if math.isnan(scores[0]):
        return None
    kept = [place for place, score in enumerate(scores[:most]) if score > -math.inf]
    return Candidates(
        [tokens[place] for place in kept], [scores[place] for place in kept], [logprobs[place] for place in kept]
    )
