"""Score continuations of one prompt: the requests of `engine.score`, and their results.

A request computes the prompt and its continuation without the last token, and samples nothing. Continuations that
differ only in their last token share a request.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from radixkv.engine.input_processor import Ids, InputProcessor, Prompt
from radixkv.engine.output import Completion, Usage
from radixkv.engine.request import Request, TokenIds
from radixkv.engine.scores import PromptScores
from radixkv.errors import InvalidInput
from radixkv.settings.kinds import is_int

Continuation: TypeAlias = str | Ids


@dataclass(frozen=True, slots=True)
class Score:
    """The log probability of a continuation after its prompt, in the model's own distribution.

    `logprob` is the sum of `token_logprobs`, one for each of `token_ids`. `greedy` says that no token was more likely
    than any of these at its place. `usage` is the cost of the request that computed it. Continuations that differ only
    in their last token share that request.
    """

    logprob: float
    token_logprobs: tuple[float, ...]
    greedy: bool
    token_ids: tuple[int, ...]
    usage: Usage


class ScoreBatch:
    """The requests that score continuations of one prompt."""

    def __init__(
        self,
        inputs: InputProcessor,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> None:
        """Make the requests. Raises InvalidInput and its subclasses."""
        ids = inputs.encode(prompt, reply=True)
        self._start = len(ids)
        self._continuations = [_encoded(inputs, prompt, ids, each) for each in _checked(continuations)]
        self.requests: list[Request] = []
        self._sources: list[tuple[int, int]] = [(0, 0)] * len(self._continuations)  # request, and place of its target
        groups: dict[bytes, list[int]] = {}  # continuations that are fed the same tokens
        for place, each in enumerate(self._continuations):
            groups.setdefault(each[:-1].tobytes(), []).append(place)
        for number, places in enumerate(groups.values()):
            targets = tuple(int(self._continuations[place][-1]) for place in places)
            fed = np.concatenate([ids, self._continuations[places[0]][:-1]])
            self.requests.append(inputs.scored(fed, len(ids), targets, namespace=namespace, timeout=timeout))
            for target, place in enumerate(places):
                self._sources[place] = (number, target)

    def scores(self, completions: Sequence[Completion]) -> list[Score]:
        """Return the score of each continuation, in order; `completions` are those of the requests."""
        return [
            _score(self.requests[number], target, ids, completions[number].usage)
            for ids, (number, target) in zip(self._continuations, self._sources, strict=True)
        ]


def _score(request: Request, target: int, ids: TokenIds, usage: Usage) -> Score:
    """Return the score of the continuation `ids`, which ends with a last target of a finished request."""
    scores = request.scores
    assert isinstance(scores, PromptScores) and scores.last is not None
    chosen = [*scores.chosen.tolist(), float(scores.last.chosen[target])]
    best = [*scores.values[:, 0].tolist(), float(scores.last.values[target, 0])]
    return Score(
        logprob=math.fsum(chosen),
        token_logprobs=tuple(chosen),
        greedy=all(mine >= most for mine, most in zip(chosen, best, strict=True)),
        token_ids=tuple(ids.tolist()),
        usage=usage,
    )


def _checked(continuations: object) -> list[Continuation]:
    """Return the continuations as a list; raises InvalidInput for an argument that looks like a single one."""
    if isinstance(continuations, str | np.ndarray) or not isinstance(continuations, Sequence):
        kind = type(continuations).__name__
        raise InvalidInput(f"score takes a list of continuations, got {kind}: wrap one continuation in a list")
    if any(is_int(each) or isinstance(each, np.integer) for each in continuations):
        raise InvalidInput(
            "score takes a list of continuations and got a bare list of token ids: for one continuation of token ids "
            "write engine.score(prompt, [ids])"
        )
    return list(continuations)


def _encoded(inputs: InputProcessor, prompt: Prompt, ids: TokenIds, continuation: Continuation) -> TokenIds:
    """Return the token ids of a continuation, at least one. Raises InvalidInput and its subclasses."""
    if not isinstance(continuation, Sized):
        raise InvalidInput(f"a continuation is a text or a sequence of token ids, got {type(continuation).__name__}")
    encoded = inputs.encode_after(prompt, ids, continuation) if len(continuation) else np.empty(0, np.int32)
    if not len(encoded):
        raise InvalidInput("a continuation has no tokens, so it has no score: leave it out, or add a token")
    return encoded
