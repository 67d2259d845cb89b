"""Record every input, copy and row of logits of an engine's runner.

The tokens of every slot are tracked, so that each row of logits has the whole history of tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Logits after the last token of a history; the first `start` tokens were in the pool before the step."""

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
        self.copied = self.joint_decodes = self.mixed_steps = 0
        core.runner.run = self.run

    def run(self, chunks: Sequence[Any], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Run a step by the runner, and record it."""
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
        """Return the tokens in the pool up to the end of an input, along its block table."""
        found = self._tokens[chunk.block_table].reshape(-1)[: chunk.start + len(chunk.tokens)]
        assert (found >= 0).all(), "an input reads a slot that was never written"
        return tuple(found.tolist())

    def _count(self, lengths: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        self.copied += len(copies)
        self.joint_decodes += len(lengths) > 1 and max(lengths) == 1
        self.mixed_steps += min(lengths) == 1 < max(lengths)
