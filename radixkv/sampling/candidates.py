"""Find the most likely next tokens of the rows that belong to a beam search.

A beam search adds up log probabilities, so the logits processors change log probabilities here, and not logits.
Transformers' beam search has the same order: a repetition penalty changes the score of a beam by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.sampling.logits_processors import LogitsProcessor, adjusted
from radixkv.sampling.params import Candidates, SampleRow


def best_candidates(
    logits: Tensor, rows: Sequence[SampleRow], processors: Sequence[LogitsProcessor] = ()
) -> list[Candidates | None]:
    """Return the best `candidates` tokens of each row of logits [len(rows), vocab], which is not changed.

    A row whose tokens are all excluded has an empty list, and one with a NaN has None. Costs a log-softmax in float32
    and a partial sort.
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
