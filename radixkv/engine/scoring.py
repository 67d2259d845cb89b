"""Score the tokens of prompts: the log probability of each token in the model's own distribution.

The logits of row r, the token at position r of a prompt, give the score of the token at position r + 1. A scored
request needs the logits of many rows, and cached KV has no logits. So its hit ends where the first missing score needs
a row.

A preempted request keeps its scores, and goes on at the first missing one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from radixkv.sampling.params import TokenLogprobs
from radixkv.sampling.row_scores import RowScores

TokenIds: TypeAlias = npt.NDArray[np.int32]
_ITERATED = 256  # entries that an iteration makes at once


class Scoring:
    """The scores of a prompt's tokens from position `first` on, as far as they are computed.

    `missing` is the first position without a score, the length of the prompt at the end. Index i of the arrays is
    position first + i: `chosen` and `ranks` [n] are the log probability and the rank of the prompt's token, `ids` and
    `values` [n, top] are the most likely tokens, best first. `last` has the scores of `last_targets`: tokens that may
    follow the prompt.
    """

    def __init__(
        self, prompt: TokenIds, first: int, top: int, *, most_rows: int, last_targets: tuple[int, ...] = ()
    ) -> None:
        """Score from position `first` >= 1 on. One step computes at most `most_rows` additional rows of logits."""
        count = len(prompt) - first
        assert first >= 1 and count >= 0
        self.prompt, self.first, self.top, self.most_rows = prompt, first, top, most_rows
        self.last_targets = last_targets
        self.missing = first
        self.chosen = np.full(count, np.nan, np.float32)
        self.ranks = np.zeros(count, np.int32)
        self.ids = np.full((count, top), -1, np.int32)
        self.values = np.full((count, top), np.nan, np.float32)
        self.last: RowScores | None = None

    @property
    def hit_limit(self) -> int:
        """The number of tokens that may be a hit: the first missing score needs the logits of the next token."""
        return self.missing - 1 if self.missing < len(self.prompt) else sys.maxsize

    @cached_property
    def key(self) -> bytes:
        """The tokens as big-endian bytes, 4 each: sorted keys are sorted prompts."""
        return self.prompt.astype(">u4").tobytes()

    @property
    def nbytes(self) -> int:
        """The memory of the scores and of the key."""
        return 4 * len(self.prompt) + sum(x.nbytes for x in (self.chosen, self.ranks, self.ids, self.values))

    def first_scores(self, count: int) -> RowScores:
        """Return the first `count` scores; views of these arrays."""
        return RowScores(self.chosen, self.ranks, self.ids, self.values)[:count]

    def rows(self, start: int, end: int) -> int:
        """Return the number of last tokens of the chunk [start, end) that need logits: 1 at least."""
        if self.missing >= len(self.prompt):
            return 1
        return max(end - max(self.missing - 1, start), 1)

    def longest(self, start: int, rows: int) -> int:
        """Return the length of the longest chunk from `start` on with at most `rows` rows of logits."""
        if self.missing >= len(self.prompt):
            return sys.maxsize
        return max(self.missing - 1 - start, 0) + rows

    def put(self, scores: RowScores) -> None:
        """Record the scores of the positions from `missing` on."""
        count = len(scores.chosen)
        part = slice(self.missing - self.first, self.missing - self.first + count)
        self.chosen[part], self.ranks[part] = scores.chosen, scores.ranks
        self.ids[part], self.values[part] = scores.ids[:, : self.top], scores.values[:, : self.top]
        self.missing += count

    def reset(self) -> None:
        """Forget all scores, because the model's weights have changed."""
        self.missing, self.last = self.first, None

    def prompt_logprobs(self) -> PromptLogprobs:
        """Return the log probabilities of all tokens of the prompt, which are computed. O(1)."""
        assert self.missing == len(self.prompt)
        return PromptLogprobs(self)


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """The log probabilities of a prompt's tokens: an entry for each token, None for the first.

    Entries are made where they are read, which is the caller's thread: those of 32,000 tokens with 20 alternatives take
    0.4 s, and the engine's thread would stall all other requests. Equal to any sequence with equal entries.
    """

    __slots__ = ("_scoring",)

    def __init__(self, scoring: Scoring) -> None:
        """Read the scores of a prompt, which are all computed and do not change any more."""
        self._scoring = scoring

    def __len__(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self._scoring.prompt)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprobs | None, ...]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | tuple[TokenLogprobs | None, ...] | None:
        """Return an entry, or a tuple of those of a slice."""
        if isinstance(at, slice):
            return tuple(self[place] for place in range(len(self))[at])
        place = range(len(self))[at]
        return next(self._entries(place, place + 1))

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        """Yield the entries in order."""
        for start in range(0, len(self), _ITERATED):
            yield from self._entries(start, min(start + _ITERATED, len(self)))

    def __eq__(self, other: object) -> bool:
        """Compare the entries."""
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of a tuple of the entries."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<log probabilities of {len(self)} tokens>"

    def _entries(self, start: int, end: int) -> Iterator[TokenLogprobs | None]:
        """Yield the entries of the positions [start, end)."""
        scoring = self._scoring
        yield from (None for _ in range(start, min(scoring.first, end)))
        part = slice(max(start - scoring.first, 0), max(end - scoring.first, 0))
        ids, values = scoring.ids[part].tolist(), scoring.values[part].tolist()
        top = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        chosen, ranks = scoring.chosen[part].tolist(), scoring.ranks[part].tolist()
        yield from (TokenLogprobs(*each) for each in zip(chosen, top, ranks, strict=True))
