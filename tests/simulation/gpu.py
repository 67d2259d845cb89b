"""Simulated lives on a simulated GPU: the engine's own sampler and relay of tokens, and a model that only remembers.

The forwards run late, in the stream of the GPU, between the uploads, launches and downloads of the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from radixkv.cache import PrefixCache
from radixkv.device import device_of
from radixkv.models.loaded import SequenceInput
from radixkv.models.step_batch import num_logit_rows
from radixkv.sampling.device_sampler import DevicePending, DeviceSampler
from radixkv.sampling.params import SampleRow
from radixkv.sampling.row_scores import PendingScores, begin_scores
from radixkv.sampling.sampler import Sampler
from radixkv.sampling.token_mask import TokenMask
from tests.simulation.late import LateSlotModel
from tests.simulation.model import VOCAB, SlotModel, uploaded
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.world import World
from tests.virtual_gpu.gpu import PLACE, VirtualGpu
from tests.virtual_gpu.launches import installed
from tests.virtual_gpu.memory import READ, WRITE, Span, span_of
from tests.virtual_gpu.tensor import VirtualTensor


class GpuSlotModel(LateSlotModel):
    """A model whose forwards are launched on the GPU that is installed."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        self._gpu = cast(VirtualGpu, device_of(PLACE))
        self.pending: list[Callable[[], bool]] = []
        super().__init__(cache, seed)

    @property
    def unread(self) -> int:
        """Draws that the host has not waited for."""
        return sum(unread() for unread in self.pending)

    @unread.setter
    def unread(self, count: int) -> None:
        self.pending.clear()

    def launch(self, call: Callable[[], None], spans: Sequence[Span] = ()) -> None:
        """Queue `call` in the present stream."""

        def run() -> None:
            with self.watched():
                call()

        self._gpu.enqueue("a forward", run, spans)

    def flush(self) -> None:
        """Wait for all that was launched."""
        event = self._gpu.event()
        event.record()
        event.synchronize()

    def begin_scores(self, *arguments: Any) -> PendingScores:
        """Launch the scoring as the engine does."""
        return begin_scores(*arguments)

    def progress(self) -> None:
        """Do nothing: the GPU runs some work by itself."""

    @torch.inference_mode()
    def _launch(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Any) -> Any:
        self._check_plan(chunks, copies)
        self.fault(chunks, 0)
        logits = torch.empty(num_logit_rows(chunks) - self.garbles(), VOCAB, device=PLACE)
        assert isinstance(logits, VirtualTensor)
        self.launch(partial(self._copy, list(copies)))
        for chunk in self.shuffled([uploaded(chunk) for chunk in chunks]):
            relayed = chunk.sampled_row >= 0
            spans = list(span_of(sampled.lease.memory, sampled.backing, READ)) if relayed else []
            self.launch(partial(self._relay, chunk, sampled.backing if relayed else None), spans)
            self.fault(chunks, 1)
        nan = self.nan_rows(chunks)
        spans = list(span_of(logits.lease.memory, logits.backing, WRITE))
        self.launch(partial(self._read_into, list(chunks), nan, logits.backing), spans)
        self.fault(chunks, 2)
        return logits

    def _relay(self, chunk: SequenceInput, sampled: Tensor | None) -> None:
        if sampled is not None:
            chunk = chunk._replace(tokens=np.array([int(sampled[chunk.sampled_row])], np.int32))
        self._write(chunk)

    def _read_into(self, chunks: list[SequenceInput], nan: list[int], logits: Tensor) -> None:
        values = self.logits_after(chunks)
        values[nan] = np.nan
        logits.copy_(torch.from_numpy(values[: len(logits)]))


class WatchedSampler(DeviceSampler):
    """A device's sampler whose draws a model counts."""

    def __init__(self, model: GpuSlotModel) -> None:
        super().__init__(PLACE)
        self._model = model

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> DevicePending:
        """See Sampler."""
        pending = super().begin(logits, rows, sources, mask)
        model = self._model
        model.pending = [unread for unread in model.pending if unread()] + [pending.unread()]
        return pending


class GpuWorld(World):
    """Runs a scenario on the GPU that is installed; the engine launches each step ahead."""

    device_class = GpuSlotModel

    def drafts(self, ask: Ask) -> bool:
        """Return whether the streams of a request speculate: those that read a history do not."""
        return super().drafts(ask) and not ask.params.adjusts_logits

    def _sampler(self) -> Sampler:
        model = cast(SlotModel, self.model)
        assert isinstance(model, GpuSlotModel)
        return WatchedSampler(model)


def live_on_gpu(scenario: Scenario, verbose: bool = False) -> World:
    """Run a life on a GPU whose order of work depends on the scenario's seed.

    While the engine serves it may wait for nothing but its downloads. In a life with an odd seed, an allocation fails.
    """
    with installed(VirtualGpu(scenario.seed)) as gpu:
        world = GpuWorld(scenario, verbose=verbose)
        # A step that is tried again because of another fault may be down to one request, which then ends.
        if scenario.seed % 2 and not {"forward", "sampler"} & {fault.kind for fault in scenario.faults}:
            gpu.inject("allocation", scenario.seed * 37 % 301)
        with gpu.serving():
            world.run()
        assert not gpu.findings, "\n".join(map(str, gpu.findings))
    return world
