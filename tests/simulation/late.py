"""A simulated device: it runs copies, writes and draws late, in the order in which they were launched.

A launch checks its arguments and raises the faults of a scenario. The host reads a result only by waiting for it, which
runs all that was launched before. Some launches are done earlier, at moments that nothing may depend on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import PrefixCache
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import SequenceInput
from radixkv.models.step_batch import num_logit_rows
from radixkv.sampling.params import SampleRow
from radixkv.sampling.row_scores import PendingScores, RowScores, begin_scores
from radixkv.sampling.sampler import Sampled, finite_rows, sample
from radixkv.sampling.token_mask import TokenMask
from tests.simulation.model import VOCAB, SlotModel, uploaded


class LateLogits:
    """Logits of a forward; `values` exists once the forward was run."""

    def __init__(self, rows: int) -> None:
        self.rows, self.values = rows, torch.empty(0)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, part: slice) -> LatePart:
        return LatePart(self, part)


@dataclass(frozen=True)
class LatePart:
    """Some rows of late logits."""

    whole: LateLogits
    part: slice

    @property
    def values(self) -> torch.Tensor:
        """The rows, once the forward was run."""
        return self.whole.values[self.part]

    def __len__(self) -> int:
        return len(range(*self.part.indices(len(self.whole))))


class LateScores:
    """Scores of rows of late logits; they are computed when they are launched, and may be read after a wait."""

    def __init__(self, model: LateSlotModel) -> None:
        self._model = model
        self.scores: PendingScores | None = None

    def result(self, rows: slice = slice(None)) -> RowScores:
        """See PendingScores."""
        if self.scores is None:
            self._model.flush()
        assert self.scores is not None
        return self.scores.result(rows)


class LateSlotModel(SlotModel):
    """A SlotModel whose forwards are launched."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        self._launched: deque[Callable[[], None]] = deque()
        self.unread = 0  # draws that the host has not waited for
        super().__init__(cache, seed)

    # ---- the queue

    def launch(self, call: Callable[[], None]) -> None:
        """Run `call` after all that was launched before."""
        self._launched.append(call)

    def flush(self) -> None:
        """Run all that was launched."""
        with self.watched():
            while self._launched:
                self._launched.popleft()()

    def progress(self) -> None:
        """Run some of it."""
        with self.watched():
            for _ in range(self._rng.choice((0, 0, 1, 3, len(self._launched)))):
                if self._launched:
                    self._launched.popleft()()

    # ---- a step

    def run(  # type: ignore[override]
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: LatePending | None = None
    ) -> LateLogits:
        self.runs += 1
        with self.watched():
            return self._launch(chunks, copies, sampled)

    def _launch(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: LatePending | None
    ) -> LateLogits:
        self.progress()
        self._check_plan(chunks, copies)
        for chunk in chunks:
            assert chunk.sampled_row < 0 or (sampled is not None and len(chunk.tokens) == 1), "nothing to relay"
        self.fault(chunks, 0)
        self.launch(partial(self._copy, list(copies)))
        there = [uploaded(chunk) for chunk in chunks]
        for chunk in self.shuffled(there):
            self.launch(partial(self._write_late, chunk, sampled))
            self.fault(chunks, 1)
        nan = self.nan_rows(chunks)
        logits = LateLogits(num_logit_rows(chunks) - self.garbles())
        self.launch(partial(self._read_late, there, nan, logits))
        self.fault(chunks, 2)
        return logits

    def _write_late(self, chunk: SequenceInput, sampled: LatePending | None) -> None:
        if chunk.sampled_row >= 0:
            assert sampled is not None and sampled.sampled is not None, "a token that was not sampled before"
            token = sampled.sampled.tokens[chunk.sampled_row]
            chunk = chunk._replace(tokens=np.array([token], np.int32))
        self._write(chunk)

    def _read_late(self, chunks: list[SequenceInput], nan: list[int], logits: LateLogits) -> None:
        values = self.logits_after(chunks)
        values[nan] = np.nan
        logits.values = torch.from_numpy(values[: logits.rows])

    def begin_scores(self, logits: Any, *arguments: Any) -> Any:
        """Launch the scoring of rows of logits, which may not exist yet."""
        pending = LateScores(self)

        def score() -> None:
            pending.scores = begin_scores(logits.values, *arguments)

        self.launch(score)
        self.progress()
        return pending

    # ---- the pool

    def recheck(self, tokens: npt.NDArray[np.int32], start: int, block_table: npt.NDArray[np.int32]) -> Recheck:
        assert not self.unread, "an audit while a step is in flight"
        self.flush()
        return super().recheck(tokens, start, block_table)

    def poison(self, blocks: Any) -> None:
        """Poison blocks that were taken: earlier launches may still read them."""
        self.launch(partial(super().poison, list(blocks)))


class LatePending:
    """The draws of one step; `sampled` exists once they were run."""

    def __init__(self, model: LateSlotModel) -> None:
        self._model, self.sampled, self._finite = model, cast("Sampled | None", None), [False]
        self._was_read = False
        model.unread += 1

    @property
    def tokens(self) -> torch.Tensor:
        return cast(torch.Tensor, self)  # for `LateSlotModel.run` alone

    def finite(self) -> list[bool]:
        self._wait()
        return self._finite

    def result(self) -> Sampled:
        self._wait()
        assert self.sampled is not None
        return self.sampled

    def done(self, sampled: Sampled, finite: list[bool]) -> None:
        """Set the results."""
        self.sampled, self._finite = sampled, finite

    def _wait(self) -> None:
        self._model.unread -= not self._was_read
        self._was_read = True
        if self.sampled is None:
            self._model.flush()


@dataclass(frozen=True)
class Uploaded:
    """The rows of a draw as they were at its launch."""

    rows: list[SampleRow]
    sources: list[int]
    limits: torch.Tensor | None


class LateSampler:
    """Launches draws. It follows the tokens of each stream, as the host's history lacks the one in flight."""

    def __init__(self, model: LateSlotModel, pending_class: type[LatePending] = LatePending) -> None:
        self._model, self._pending_class = model, pending_class
        self._last: dict[Hashable, int] = {}  # the last token of each stream

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> LatePending:
        """See Sampler."""
        gaps = {row.position - len(row.history) - row.in_flight for row in rows}
        assert gaps <= {0, *(len(each.tokens) for each in self._model.compressed)}, "a history with a gap"
        assert all(0 <= row.in_flight <= 1 for row in rows)
        limits = None
        if mask is not None:
            limits = torch.full((len(rows), VOCAB), torch.inf)
            mask.limit(limits)
        there = [replace(row, history=list(row.history)) for row in rows]
        pending = self._pending_class(self._model)
        places = list(range(len(logits)) if sources is None else sources)
        self._model.launch(partial(self._draw, logits, Uploaded(there, places, limits), pending))
        self._model.progress()
        return pending

    def _draw(self, logits: Any, there: Uploaded, pending: LatePending) -> None:
        rows = [self._with_history(row) for row in there.rows]
        chosen = logits.values[there.sources]
        if there.limits is not None:
            chosen = torch.minimum(chosen, there.limits)
        sampled = sample(chosen, rows)
        self._last.update((row.stream, token) for row, token in zip(rows, sampled.tokens, strict=True))
        pending.done(sampled, finite_rows(logits.values))

    def _with_history(self, row: SampleRow) -> SampleRow:
        if not row.in_flight:
            return row
        return replace(row, history=[*row.history, self._last[row.stream]], in_flight=0)
