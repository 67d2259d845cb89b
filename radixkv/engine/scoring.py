"""Score the tokens of prompts: the log probability of each token in the model's own distribution.

The logits of row r, the token at position r of a prompt, give the score of the token at position r + 1. A scored
request needs the logits of many rows, and cached KV has no logits. So its hit ends where the first missing score needs
a row.

`Scoring` has the scores of one request, and takes those of each chunk. A preempted request keeps them, and goes on at
the first missing one. `ChunkScores` are the scores of one chunk, which a device may still compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.engine.fault_isolation import in_halves
from radixkv.sampling.params import TokenLogprobs
from radixkv.sampling.row_scores import PendingScores, RowScores, begin_scores

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.engine.request import Request
    from radixkv.engine.scheduler import Work

TokenIds: TypeAlias = npt.NDArray[np.int32]
PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]


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
        """Return an entry for each token of the prompt, None for those before `first`. O(n * top)."""
        assert self.missing == len(self.prompt)
        top = (tuple(zip(*pair, strict=True)) for pair in zip(self.ids.tolist(), self.values.tolist(), strict=True))
        scored = (TokenLogprobs(*each) for each in zip(self.chosen.tolist(), top, self.ranks.tolist(), strict=True))
        return (*(None for _ in range(self.first)), *scored)


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a step's logits that score one chunk: row sources[i] scores token targets[i].

    The last `last` of them are the last targets of the request, and the others are tokens of the prompt.
    """

    request: Request
    targets: list[int]
    sources: list[int]
    last: int


@dataclass(frozen=True)
class ChunkScores:
    """The scores of one chunk, which a device may still compute: a part of the scores of its step."""

    request: Request
    pending: PendingScores
    part: slice
    last: int  # the number of last targets

    def take(self) -> int:
        """Wait for the scores, and record them in the request; returns their number.

        Raises InvalidInput if the model computed NaN.
        """
        scores, scoring = self.pending.result(self.part), self.request.scoring
        assert scoring is not None
        count = len(scores.chosen)
        if self.last < count:
            scoring.put(scores[: count - self.last])
        if self.last:
            scoring.last = scores[count - self.last :]
        return count


def begin_chunk_scores(
    work: Sequence[Work], logits: Tensor, fail: Callable[[Request, Exception], None]
) -> list[ChunkScores]:
    """Start to score the chunks of a step, from its logits [len(work) + additional rows, vocab].

    See `Forward.run` for the order of the rows. `fail` ends a request whose rows raise. Waits for nothing. Raises
    ValueError if rows are missing.
    """
    wanted = sum(each.logit_rows for each in work)
    if len(logits) != wanted:
        raise ValueError(f"a forward of {len(work)} chunks returned {len(logits)} rows of logits, not {wanted}")

    def begin(parts: list[ScoredRows]) -> PendingScores:
        top = max(each.request.scoring.top for each in parts if each.request.scoring is not None)
        targets = list(chain.from_iterable(each.targets for each in parts))
        return begin_scores(logits, targets, top, list(chain.from_iterable(each.sources for each in parts)))

    scored = _scored_rows(work)
    begun: list[ChunkScores] = []
    for parts, pending in in_halves(scored, begin, lambda each: each.request, fail) if scored else ():
        end = 0
        for each in parts:
            start, end = end, end + len(each.targets)
            begun.append(ChunkScores(each.request, pending, slice(start, end), each.last))
    return begun


def _scored_rows(work: Sequence[Work]) -> list[ScoredRows]:
    """Return the rows that score the chunks of a step, without chunks that need none."""
    found: list[ScoredRows] = []
    extra = len(work)  # the first additional row of the chunk
    for row, each in enumerate(work):
        request, inner = each.stream.request, range(extra, extra + each.logit_rows - 1)
        extra = inner.stop
        scoring = request.scoring
        if scoring is None or request.channel.ended or each.end < scoring.missing:
            continue
        prompt, end = scoring.prompt, each.end
        last = scoring.last_targets if end == len(prompt) else ()
        targets = [*prompt[end - len(inner) : end + 1].tolist(), *last]
        if targets:
            found.append(ScoredRows(request, targets, [*inner, *[row] * (len(targets) - len(inner))], len(last)))
    return found
