"""Compute the answer that every request must give from its own history, without pool, batch or schedule.

It samples one row at a time from the model's logits of that history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from radixkv.engine.request import derive_seed
from radixkv.sampling.logits_processors import adjusted
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from tests.simulation.constraint import Rule, State
from tests.simulation.model import VOCAB, digest_of, dropped, follow, greedy_token, logits_of

Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Reply:
    """One stream's answer: `tokens`, the reason why it ended, and how many tokens were there for the last draw."""

    tokens: tuple[int, ...]
    finish_reason: str
    before_last_draw: int = 0
    score: float | None = None  # of a beam


@lru_cache(maxsize=256)  # those of one life: a soak measures memory
def replies(
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    rule: Rule | None = None,
    bad_words: Words = (),
) -> tuple[Reply, ...]:
    """Return the answer of each stream, or of each beam; a request without new tokens has one empty answer."""
    if not max_tokens:
        return (Reply((), "length"),)
    if params.beam_width > 1:
        return _search(prompt, params, max_tokens, stop_ids, bad_words)
    seeds = [seed if index == 0 else derive_seed(seed, index) for index in range(params.n)]
    return tuple(_reply(prompt, params, max_tokens, stop_ids, each, rule, bad_words) for each in seeds)


def _reply(
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    rule: Rule | None,
    bad_words: Words,
) -> Reply:
    """Draw each token, forced ones too: a draw from one token gives the same."""
    history, digest, drawn = list(prompt), digest_of(prompt), 0
    while True:
        said = len(history) - len(prompt)
        state = None if rule is None else rule.after(tuple(history[len(prompt) :]))
        if state is None or not state.forced or not said:
            drawn = said
        token = _next(history, digest, params, len(prompt), stop_ids, seed, state, bad_words)
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
    bad_words: Words,
) -> int:
    if params.greedy and not params.adjusts_logits and state is None:
        return greedy_token(digest)
    logits = torch.from_numpy(logits_of(np.array([digest], np.uint64)))
    if state is not None:
        banned = set(range(logits.shape[1])) - {*state.allowed, *(stop_ids if state.accepts else ())}
        logits[0, list(banned)] = -torch.inf
    logits[0, excluded(history[prompt_length:], bad_words)] = -torch.inf
    return sample(logits, [_row(params, seed, history, prompt_length, stop_ids)]).tokens[0]


def _row(
    params: SamplingParams, seed: int, history: list[int], prompt_length: int, stop_ids: frozenset[int]
) -> SampleRow:
    """Describe a draw, which reads the text after a compressed prefix only."""
    text, position = [token for token in history if token < VOCAB], len(history) + dropped(history[0])
    return SampleRow(params, seed, position, text, prompt_length - len(history) + len(text), stop_ids)


def excluded(reply: Sequence[int], bad_words: Words) -> list[int]:
    """Return the tokens after which a reply would end with a bad word."""
    return [token for token in range(VOCAB) if any(tuple([*reply, token][-len(word) :]) == word for word in bad_words)]


# ---- beam search


def _search(
    prompt: tuple[int, ...], params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], bad_words: Words
) -> tuple[Reply, ...]:
    """Search over all continuations of all beams, step by step; returns the best complete ones, best first."""
    width, running, complete = params.beam_width, [((), 0.0)], list[Reply]()
    for length in range(1, max_tokens + 1):
        rows = [(beam, total, _log_probabilities(prompt, beam, params, stop_ids, bad_words)) for beam, total in running]
        found = [
            (total + value, order, (*beam, token))
            for order, (beam, total, values) in enumerate(rows)
            for token, value in enumerate(values)
            if value > -math.inf
        ]
        found.sort(key=lambda each: (-each[0], each[1:]))
        running = []
        for rank, (total, _, text) in enumerate(found):
            stops = text[-1] in stop_ids and length >= params.min_tokens
            if not stops and length < max_tokens:
                running.append((text, total))
            elif rank < width:
                reason = "stop" if stops else "length"
                complete.append(Reply(text, reason, length - 1, total / length**params.length_penalty))
        running = running[:width]
        complete = sorted(complete, key=lambda reply: -(reply.score or 0))[:width]
        if not running or (len(complete) == width and _is_over(params, running[0][1], complete, length, max_tokens)):
            break
    return tuple(complete)


def _is_over(params: SamplingParams, total: float, complete: list[Reply], length: int, max_tokens: int) -> bool:
    """Return whether the best running beam, with this sum of log probabilities, is not expected to improve."""
    if params.early_stopping is True:
        return True
    hoped = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
    worst = complete[-1].score
    assert worst is not None
    return total / hoped**params.length_penalty <= worst


def _log_probabilities(
    prompt: tuple[int, ...], reply: tuple[int, ...], params: SamplingParams, stop_ids: frozenset[int], bad_words: Words
) -> list[float]:
    """Return the log probability of each next token, as the logits processors change it."""
    history = [*prompt, *reply]
    table = log_probabilities([digest_of(history)])
    table[0, excluded(reply, bad_words)] = -torch.inf
    values: list[float] = adjusted(table, [_row(params, 0, history, len(prompt), stop_ids)])[0].tolist()
    return values


# ---- scores


def log_probabilities(digests: Sequence[int]) -> torch.Tensor:
    """Return the log probability of each next token after histories [n]: [n, VOCAB]."""
    return torch.log_softmax(torch.from_numpy(logits_of(np.array(digests, np.uint64))), dim=-1)


def prompt_scores(prompt: Sequence[int]) -> torch.Tensor:
    """Return the log probability of each next token after each token of a prompt: [len(prompt), VOCAB]."""
    return log_probabilities([digest_of(prompt[:end]) for end in range(1, len(prompt) + 1)])
