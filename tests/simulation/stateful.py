"""A simulated model with recurrent state: each slot of its arena holds a digest of the history that it stands for.

A forward that raises leaves garbage in the rows and snapshots of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.models.loaded import SequenceInput
from radixkv.sizing.recurrent_state import EMPTY, StateStep
from tests.simulation.model import SlotModel, follow, uploaded

_GARBAGE = 0xBAD_57A7E


class StatefulSlotModel(SlotModel):
    """A SlotModel whose chunks start from the state of a row, and update it."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        super().__init__(cache, seed)
        self.states = StateSlots(self, cache.copies.host_start + cache.copies.num_host)

    def run(self, chunks: Sequence[SequenceInput], *args: Any) -> Any:
        try:
            return super().run(chunks, *args)
        except BaseException:
            self.launch(partial(self._spoil, [uploaded(chunk) for chunk in chunks]))
            raise

    def _spoil(self, chunks: list[SequenceInput]) -> None:
        for chunk in chunks:
            step = _step(chunk)
            self.states.digests[[step.row.number, *(slot for _, slot in step.snapshots)]] = _GARBAGE

    def _write(self, chunk: SequenceInput) -> None:
        super()._write(chunk)
        step, states = _step(chunk), self.states.digests
        row, snapshots = step.row.number, dict(step.snapshots)
        assert list(snapshots) == sorted(snapshots) and len(snapshots) == len(step.snapshots), "snapshots out of order"
        assert all(0 < tokens <= len(chunk.tokens) for tokens in snapshots), "a snapshot outside its chunk"
        digest = int(self.digests.reshape(-1)[self._slots(chunk, chunk.start - 1)[0]]) if chunk.start else 0
        assert states[row] == digest, f"row {row} has the state of another history than {chunk.start} tokens"
        for count, token in enumerate(chunk.tokens.tolist(), 1):
            digest = follow(digest, token)
            if count in snapshots:
                states[snapshots[count]] = digest
        states[row] = digest


class StateSlots:
    """The digests of all slots."""

    def __init__(self, model: StatefulSlotModel, count: int) -> None:
        self._model = model
        self.digests = np.full(count, _GARBAGE, np.uint64)

    def run(self, copies: Iterable[tuple[int, int]]) -> None:
        """See StateMemory."""
        self._model.launch(partial(self._copy, list(copies)))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.digests[target] = 0 if source == EMPTY else self.digests[source]


def _step(chunk: SequenceInput) -> StateStep:
    assert chunk.state is not None, "a chunk without a row"
    return chunk.state
