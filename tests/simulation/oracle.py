"""Compute the answer that every request must give from its own history, without pool, batch or schedule.

It samples one row at a time from the model's logits of that history.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from radixkv.engine.request import derive_seed
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from tests.simulation.model import digest_of, follow, greedy_token, logits_of


@dataclass(frozen=True)
class Reply:
    """One stream's answer: `tokens`, and the reason why it ended."""

    tokens: tuple[int, ...]
    finish_reason: str


@lru_cache(maxsize=4096)
def replies(
    prompt: tuple[int, ...], params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], seed: int
) -> tuple[Reply, ...]:
    """Return the answer of each stream; a request without new tokens has one empty answer."""
    if not max_tokens:
        return (Reply((), "length"),)
    seeds = [seed if index == 0 else derive_seed(seed, index) for index in range(params.n)]
    return tuple(_reply(prompt, params, max_tokens, stop_ids, each) for each in seeds)


def _reply(
    prompt: tuple[int, ...], params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], seed: int
) -> Reply:
    history, digest = list(prompt), digest_of(prompt)
    while True:
        token = _next(history, digest, params, len(prompt), stop_ids, seed)
        history.append(token)
        digest = follow(digest, token)
        said = len(history) - len(prompt)
        if token in stop_ids and said >= params.min_tokens:
            return Reply(tuple(history[len(prompt) :]), "stop")
        if said >= max_tokens:
            return Reply(tuple(history[len(prompt) :]), "length")


def _next(
    history: list[int], digest: int, params: SamplingParams, prompt_length: int, stop_ids: frozenset[int], seed: int
) -> int:
    if params.greedy and not params.adjusts_logits:
        return greedy_token(digest)
    logits = torch.from_numpy(logits_of(np.array([digest], np.uint64)))
    row = SampleRow(params, seed, len(history), history, prompt_length, stop_ids)
    return sample(logits, [row]).tokens[0]
