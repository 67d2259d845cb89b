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
from tests.simulation.constraint import Rule, State
from tests.simulation.model import digest_of, follow, greedy_token, logits_of


@dataclass(frozen=True)
class Reply:
    """One stream's answer: `tokens`, the reason why it ended, and how many tokens were there for the last draw."""

    tokens: tuple[int, ...]
    finish_reason: str
    before_last_draw: int = 0


@lru_cache(maxsize=256)  # those of one life: a soak measures memory
def replies(
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    rule: Rule | None = None,
) -> tuple[Reply, ...]:
    """Return the answer of each stream; a request without new tokens has one empty answer."""
    if not max_tokens:
        return (Reply((), "length"),)
    seeds = [seed if index == 0 else derive_seed(seed, index) for index in range(params.n)]
    return tuple(_reply(prompt, params, max_tokens, stop_ids, each, rule) for each in seeds)


def _reply(
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    rule: Rule | None,
) -> Reply:
    """Draw each token, forced ones too: a draw from one token gives the same."""
    history, digest, drawn = list(prompt), digest_of(prompt), 0
    while True:
        said = len(history) - len(prompt)
        state = None if rule is None else rule.after(tuple(history[len(prompt) :]))
        if state is None or not state.forced or not said:
            drawn = said
        token = _next(history, digest, params, len(prompt), stop_ids, seed, state)
        history.append(token)
        digest = follow(digest, token)
        said += 1
        text = tuple(history[len(prompt) :])
        if token in stop_ids and said >= params.min_tokens:
            return Reply(text, "stop", drawn)
        if rule is not None and rule.after(text).finished:
            return Reply(text, "stop", drawn)
        if said >= max_tokens:
            return Reply(text, "length", drawn)


def _next(
    history: list[int],
    digest: int,
    params: SamplingParams,
    prompt_length: int,
    stop_ids: frozenset[int],
    seed: int,
    state: State | None,
) -> int:
    if params.greedy and not params.adjusts_logits and state is None:
        return greedy_token(digest)
    logits = torch.from_numpy(logits_of(np.array([digest], np.uint64)))
    if state is not None:
        banned = set(range(logits.shape[1])) - {*state.allowed, *(stop_ids if state.accepts else ())}
        logits[0, list(banned)] = -torch.inf
    row = SampleRow(params, seed, len(history), history, prompt_length, stop_ids)
    return sample(logits, [row]).tokens[0]
