"""A simulated model with recurrent state: each slot of its arena holds a digest of the history that it stands for.

A forward that raises leaves garbage in the rows and snapshots of its chunks, unless it has not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from radixkv.cache import PrefixCache
from radixkv.cache.recurrent import StatefulPrefixCache
from radixkv.cache.recurrent.sequence import Spacing
from radixkv.models.loaded import SequenceInput
from radixkv.recurrent_state import EMPTY, StateStep
from tests.simulation.model import SlotModel, follow
from tests.simulation.scenario import Scenario

_GARBAGE = 0xBAD_57A7E


def stateful_parts(scenario: Scenario) -> tuple[Any, type[SlotModel]]:
    """Return the classes of cache and model, with the scenario's rows and slots."""
    states, config = scenario.states, scenario.config
    assert states is not None
    grid = config.prefill_chunk if config.deterministic else 1
    spacing = Spacing(grid, states.prompt, states.long, states.least)
    cache = partial(StatefulPrefixCache, rows=config.max_sequences, snapshots=states.snapshots, spacing=spacing)
    return cache, StatefulSlotModel


class StatefulSlotModel(SlotModel):
    """A SlotModel whose chunks start from the state of a row, and update it."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        super().__init__(cache, seed)
        assert isinstance(cache, StatefulPrefixCache)
        self.queue = cache.copies
        self.states = np.full(cache.copies.num_rows + cache.copies.num_snapshots, _GARBAGE, np.uint64)

    def _run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> torch.Tensor:
        drains = self.queue.drains
        try:
            return super()._run(chunks, copies)
        except BaseException:
            for chunk in chunks if self.queue.drains > drains else ():
                step = _step(chunk)
                self.states[[step.row.number, *(slot for _, slot in step.snapshots)]] = _GARBAGE
            raise

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        super()._copy(copies)
        for source, target in self.queue.drain():
            self.states[target] = 0 if source == EMPTY else self.states[source]

    def _write(self, chunk: SequenceInput) -> None:
        super()._write(chunk)
        step = _step(chunk)
        row, snapshots = step.row.number, dict(step.snapshots)
        assert list(snapshots) == sorted(snapshots) and len(snapshots) == len(step.snapshots), "snapshots out of order"
        assert all(0 < tokens <= len(chunk.tokens) for tokens in snapshots), "a snapshot outside its chunk"
        digest = int(self.digests.reshape(-1)[self._slots(chunk, chunk.start - 1)[0]]) if chunk.start else 0
        assert self.states[row] == digest, f"row {row} has the state of another history than {chunk.start} tokens"
        for count, token in enumerate(chunk.tokens.tolist(), 1):
            digest = follow(digest, token)
            if count in snapshots:
                self.states[snapshots[count]] = digest
        self.states[row] = digest


def _step(chunk: SequenceInput) -> StateStep:
    assert chunk.state is not None, "a chunk without a row"
    return chunk.state
