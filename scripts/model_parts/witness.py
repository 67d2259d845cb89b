"""Stand beside an engine's runner: see every chunk and copy that it runs, and what it answers.

Knows slots and the tokens that were written to them, so that each row of logits comes with the whole history that it is
behind. Does not know models, nor what the logits should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Logits behind the last token of a history; `start` of its tokens were in the pool before, the rest was run."""

    history: tuple[int, ...]
    start: int
    logits: Tensor


class Witness:
    """Takes the place of a runner's `run`, and writes down what passes."""

    def __init__(self, engine: Any) -> None:
        """Watch the runner of `engine` from now on; nothing has run yet."""
        core = engine.core  # an engine shows nobody its logits; it is the engine itself that is on trial
        self._run, self._size = core.runner.run, core.cache.block_size
        self._tokens = np.full((core.cache.num_blocks, self._size), -1, dtype=np.int64)
        self.rows: list[Row] = []
        self.copied = self.joint_decodes = self.mixed_steps = 0
        core.runner.run = self.run

    def run(self, chunks: Sequence[Any], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """As the runner's."""
        logits: Tensor = self._run(chunks, copies)
        read = [self._tokens[source].copy() for source, _ in copies]
        for (_, target), tokens in zip(copies, read, strict=True):
            self._tokens[target] = tokens
        for chunk in chunks:
            self._tokens.reshape(-1)[chunk.slots] = chunk.tokens
        for chunk, row in zip(chunks, logits, strict=True):
            self.rows.append(Row(self._history(chunk), chunk.start, row.detach().clone()))
        self._count([len(chunk.tokens) for chunk in chunks], copies)
        return logits

    def _history(self, chunk: Any) -> tuple[int, ...]:
        """What stands in the pool up to the end of a chunk, as its block table has it."""
        found = self._tokens[chunk.block_table].reshape(-1)[: chunk.start + len(chunk.tokens)]
        assert (found >= 0).all(), "a chunk reads a slot that nobody wrote"
        return tuple(found.tolist())

    def _count(self, lengths: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        self.copied += len(copies)
        self.joint_decodes += len(lengths) > 1 and max(lengths) == 1
        self.mixed_steps += min(lengths) == 1 < max(lengths)
