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
from radixkv.models.adjust import adjust
from radixkv.models.sampling_params import SamplingParams

__all__ = ["SampleRow", "Sampled", "SamplingParams", "TokenLogprobs", "sample"]

_FIRST_CANDIDATES = 64  # how many of the likeliest tokens are looked at first when only top_p or min_p cuts
_WIDEN = 8


@dataclass(frozen=True)
class SampleRow:
    """One row of a batch of logits: what to draw with, and what was drawn before.

    `history` is the prompt and the reply so far (read only by penalties), of which the first `prompt_length` are the
    prompt. (`seed`, `position`) name the draw: one of each for every token. `stop_token_ids` are what would end the
    reply, masked while it is shorter than `min_tokens`.
    """

    params: SamplingParams
    seed: int
    position: int
    history: Sequence[int] = ()
    prompt_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of the chosen token, and of the likeliest (id, log probability), the likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """The tokens drawn, one per row; log probabilities for the rows that asked, None if no row did."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Draw one token from each row of logits [len(rows), vocab]; `logits` is left as it is.

    Raises InvalidInput if the numbers of rows differ or a row's maximum is not finite. A batch of greedy rows costs one
    argmax; top-k costs one partial sort; penalties cost the length of the row's history.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise InvalidInput(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    if not rows:
        return Sampled([], None)
    adjusted = adjust(logits, rows)
    best, tokens = adjusted.max(dim=-1)
    broken = ~torch.isfinite(best)
    if bool(broken.any()):
        raise InvalidInput(
            f"the logits of row {int(broken.nonzero()[0])} have no finite maximum: NaN, or nothing allowed"
        )
    drawn: list[int] = tokens.tolist()
    for plan, members in _plans(rows, logits.shape[1]).items():
        for index, token in zip(members, _draw(adjusted, best, rows, members, plan), strict=True):
            drawn[index] = token
    return Sampled(drawn, _logprobs(logits, rows, drawn))


def _plans(rows: Sequence[SampleRow], vocab: int) -> dict[int, list[int]]:
    """Random rows by how many candidates each looks at first, which depends on the row alone; 0: all, unsorted."""
    plans: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        params = row.params
        if params.greedy:
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
    device = adjusted.device
    picked = torch.tensor(members, device=device)
    temperature = torch.tensor([[row.params.temperature] for row in chosen], device=device)
    # The likeliest is 0 from here on, so that no temperature can overflow.
    scaled = (adjusted[picked] - best[picked, None]).float() / temperature
    uniform = torch.tensor([[_uniform(row.seed, row.position)] for row in chosen], dtype=torch.float64, device=device)
    if candidates == 0:
        return _invert(scaled.exp(), uniform).tolist()
    return _draw_filtered(scaled, [row.params for row in chosen], uniform, candidates)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only (seed, position) decide; 48 bits, so that no product rounds up to the total."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position % 2**64), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index [rows] whose cumulative weight exceeds uniform [rows, 1] times the total."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]


def _draw_filtered(scaled: Tensor, params: list[SamplingParams], uniform: Tensor, candidates: int) -> list[int]:
    """Draw from what top-k, top-p and min-p keep of scaled [rows, vocab], looking at the likeliest `candidates` only.

    Rows whose kept set may reach beyond the candidates are drawn again from more of them.
    """
    values, ids = scaled.topk(candidates, dim=1)
    weights = values.double().exp()
    threshold = _threshold(scaled, values, weights, params)
    ids, order = ids.sort(dim=1)
    kept = (weights * (values >= threshold)).gather(1, order)
    tokens: list[int] = ids.gather(1, _invert(kept, uniform)[:, None])[:, 0].tolist()
    if candidates == scaled.shape[1]:
        return tokens
    open_ended = (values[:, -1:] >= threshold)[:, 0].nonzero()[:, 0]
    if len(open_ended):
        wider = min(candidates * _WIDEN, scaled.shape[1])
        again = [params[index] for index in open_ended.tolist()]
        for index, token in zip(
            open_ended.tolist(), _draw_filtered(scaled[open_ended], again, uniform[open_ended], wider), strict=True
        ):
            tokens[index] = token
    return tokens


def _threshold(scaled: Tensor, values: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest value [rows, 1] that all three filters keep, among candidates sorted from the likeliest."""
    last = values.shape[1] - 1
    limits = torch.tensor([[p.top_k if p.top_k > 0 else 0, p.top_p, p.min_p] for p in params], dtype=torch.float64)
    top_k, top_p, min_p = (column[:, None] for column in limits.to(values.device).unbind(1))
    kth = values.gather(1, (top_k.long() - 1).clamp(0, last))
    kth = torch.where(top_k > 0, kth, -torch.inf)
    within = weights * (values >= kth)
    total = within.sum(dim=1, keepdim=True)
    if any(p.top_k <= 0 and p.top_p < 1 for p in params):
        total = torch.where(top_k > 0, total, scaled.exp().sum(dim=1, keepdim=True, dtype=torch.float64))
    before = within.cumsum(dim=1) - within
    nucleus = (before < top_p * total).sum(dim=1, keepdim=True)
    mass = torch.where(top_p < 1, values.gather(1, (nucleus - 1).clamp(0, last)), -torch.inf)
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
