"""Score the chunks of a step by its logits: all rows of all chunks together, which a device may do in the background.

A row that is not finite fails its own request only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from radixkv.engine.fault_isolation import in_halves
from radixkv.engine.request import Request
from radixkv.engine.scheduler import Work
from radixkv.sampling.row_scores import PendingScores, begin_scores

if TYPE_CHECKING:
    from torch import Tensor


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
