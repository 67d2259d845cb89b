"""Record every input, copy and row of logits of an engine's runner, and let it compute additional rows.

The tokens of every slot are tracked, so that each row of logits has the whole history of tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from radixkv.models.loaded import SequenceInput
from radixkv.models.step_batch import logit_places, num_logit_rows

MOST_ROWS = 6


@dataclass(frozen=True)
class Row:
    """Logits after the last of a history of tokens; the first `start` tokens were in the pool before the step."""

    history: tuple[int, ...]
    start: int
    logits: Tensor


class Witness:
    """Replaces a runner's `run`, and records its calls."""

    def __init__(self, engine: Any) -> None:
        """Watch the runner of `engine` from now on; nothing has run yet."""
        core = engine.core  # an engine's public interface has no logits
        self._run, self._size = core.runner.run, core.cache.block_size
        self._tokens = np.full((core.cache.num_blocks, self._size), -1, dtype=np.int64)
        self.rows: list[Row] = []
        self._asked = 0
        self.copied = self.joint_decodes = self.mixed_steps = 0
        core.runner.run = self.run

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Run a step by the runner, and record it.

        Chunks of prompts ask for up to `MOST_ROWS` rows, of which the engine sees the last.
        """
        asked = [self._with_rows(chunk) for chunk in chunks]
        logits: Tensor = self._run(asked, copies)
        read = [self._tokens[source].copy() for source, _ in copies]
        for (_, target), tokens in zip(copies, read, strict=True):
            self._tokens[target] = tokens
        for chunk in chunks:
            self._tokens.reshape(-1)[chunk.slots] = chunk.tokens
        assert len(logits) == num_logit_rows(asked), "the runner returned another number of rows"
        for chunk, places in zip(asked, logit_places([chunk.logit_rows for chunk in asked]), strict=True):
            history = self._history(chunk)
            for before, place in enumerate(places[::-1]):  # the last row comes first
                row = logits[place].detach().clone()
                self.rows.append(Row(history[: len(history) - before], chunk.start, row))
        self._count([len(chunk.tokens) for chunk in chunks], copies)
        return logits[: len(chunks)]

    def _with_rows(self, chunk: SequenceInput) -> SequenceInput:
        """Return a chunk that asks for more rows, and for a changing number of them."""
        self._asked += 1
        return chunk._replace(logit_rows=min(len(chunk.tokens), 1 + self._asked % MOST_ROWS))

    def _history(self, chunk: SequenceInput) -> tuple[int, ...]:
        """Return the tokens in the pool up to the end of an input, along its block table."""
        found = self._tokens[chunk.block_table].reshape(-1)[: chunk.start + len(chunk.tokens)]
        assert (found >= 0).all(), "an input reads a slot that was never written"
        return tuple(found.tolist())

    def _count(self, lengths: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        self.copied += len(copies)
        self.joint_decodes += len(lengths) > 1 and max(lengths) == 1
        self.mixed_steps += min(lengths) == 1 < max(lengths)
