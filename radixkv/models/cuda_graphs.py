"""Record decode steps as CUDA graphs, one for each size of batch, and replay them: launches then cost the host nothing.

`record_decodes` gives a runner a `ReplayedForward` if a recorded step computes the same as a launched one. A step that
no graph serves is computed as without graphs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from radixkv.device import Device, device_of
from radixkv.models.attention_interface import keys_per_tile, recordable_backend
from radixkv.models.loaded import AttentionWindow, SequenceInput
from radixkv.models.rounding import agree
from radixkv.models.runner import ForwardContext, PoolForward, Runner
from radixkv_kernels import graph_capacity
from radixkv_kernels.work_list import WorkList

if TYPE_CHECKING:
    from radixkv.models.cuda_inputs import DecodeInputs, Present

_log = logging.getLogger(__name__)
Replay = Callable[[], Tensor]


class Recorder(Protocol):
    """Records the launches of a step."""

    @property
    def full(self) -> bool:
        """Whether the memory that recordings may take is used up."""
        ...

    def record(self, step: Callable[[], Tensor]) -> Replay:
        """Run `step`, and return a function that launches the same on the same memory, that of the result included.

        Raises the errors of `step`, and an error if the step cannot be recorded.
        """
        ...


def record_decodes(runner: Runner, most: int, recorder: Recorder | None = None) -> None:
    """From now on replay steps that decode up to `most` sequences from CUDA graphs, if this device and model allow it.

    Records one step now and compares its replay with a computed step, so nothing may be cached yet. A model that cannot
    be recorded runs as before, with one warning. The graphs take up to `SHARE` of the device's memory.
    """
    loaded, store, forward = runner.loaded, runner.store, runner.forward
    if loaded.state:
        _log.info("decode steps run without CUDA graphs: its layers keep recurrent state")
    elif any(layer.chunk for layer in loaded.layers):
        _log.info("decode steps run without CUDA graphs: chunks of attention have block tables of their own")
    elif loaded.attention == "triton" and (recorder is not None or device_of(store.device).is_gpu):
        assert isinstance(forward, PoolForward)
        with torch.inference_mode(), device_of(store.device).current():
            graphs = _graphs_of(runner, forward, most, recorder or CudaRecorder(device_of(store.device)))
            if _replays_the_same(graphs, forward, store.block_size, loaded.dtype):
                runner.forward = ReplayedForward(graphs, forward)


def _graphs_of(runner: Runner, computed: PoolForward, most: int, recorder: Recorder) -> DecodeGraphs:
    """Return the graphs of this runner's decode steps, none of which is recorded yet."""
    from radixkv.models.cuda_inputs import DecodeInputs  # needs Triton

    loaded, store = runner.loaded, runner.store
    split = keys_per_tile(runner.deterministic)
    inputs = DecodeInputs(store, loaded.layers, most, max_length=loaded.max_length, split=split)
    backend = recordable_backend(store, loaded.layers)

    def forward(bucket: int, present: Present) -> Tensor:
        tokens, positions, slots = inputs.columns(bucket)
        context = ForwardContext(backend, loaded.layers, slots, inputs.plans(bucket, present))
        return computed.logits(context, tokens, positions, inputs.last_rows(bucket))

    # A model that cannot be compiled can often not be recorded either: one warning is enough.
    failure = logging.INFO if computed.uncompiled else logging.WARNING
    return DecodeGraphs(inputs, forward, recorder, most, padded=not runner.deterministic, failure=failure)


def _replays_the_same(graphs: DecodeGraphs, computed: PoolForward, block_size: int, dtype: torch.dtype) -> bool:
    """Whether a graph that was recorded for one token also computes the next; a warning gives the reason if not."""
    table = np.arange(-(-2 // block_size), dtype=np.int32)
    for position in range(2):
        inputs = [SequenceInput(np.array([position], np.int32), position, np.array([position]), table)]
        work = computed.planner.lists(inputs)
        replayed = graphs.run(inputs, work)
        if replayed is None:
            return False
        if not agree(replayed.clone(), computed.compute(inputs, work), dtype):
            _log.warning("decode steps run without CUDA graphs: this model's replay does not compute the same")
            return False
    return True


class ReplayedForward:
    """Replays the decode steps for which there is a graph, and computes all others."""

    def __init__(self, graphs: DecodeGraphs, computed: PoolForward) -> None:
        self.graphs, self.computed = graphs, computed

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs), vocab] of each input's last token."""
        work = self.computed.planner.lists(inputs, self.graphs.max_shared_rows(inputs))
        logits = self.graphs.run(inputs, work, sampled)
        if logits is None:
            return self.computed.compute(inputs, work, sampled)
        return logits.to(torch.float32, copy=True)  # the next replay overwrites it

    def forget(self) -> None:
        """Drop all recordings, because weights that they read have moved; steps are recorded again as they come."""
        self.graphs.replays.clear()


def buckets(most: int) -> list[int]:
    """Return the sizes of batches that are recorded: 1, 2, 4, multiples of 8, and `most`.

    >>> buckets(20)
    [1, 2, 4, 8, 16, 20]
    """
    return sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most})


class DecodeGraphs:
    """Recordings by bucket and kinds of tile, made when first needed, as long as memory lasts.

    If a step's own recording cannot be made, one of a larger bucket or with more kinds of tile serves it.
    """

    def __init__(
        self,
        inputs: DecodeInputs,
        forward: Callable[[int, Present], Tensor],
        recorder: Recorder,
        most: int,
        *,
        padded: bool = True,
        failure: int = logging.WARNING,
    ) -> None:
        """Record `forward(bucket, present)`: logits [bucket, vocab] from `inputs`, for steps of at most `most` rows.

        Unless `padded`, only steps that fill their bucket are recorded: a padded product may round its rows otherwise.
        A failed recording is logged at the level `failure`.
        """
        self._failure = failure
        self._inputs, self._forward, self._recorder, self._padded = inputs, forward, recorder, padded
        self._buckets = buckets(most)
        self.replays: dict[tuple[int, Present], Replay] = {}
        self.failed = False

    def run(
        self,
        inputs: Sequence[SequenceInput],
        work: Mapping[AttentionWindow, WorkList],
        sampled: Tensor | None = None,
    ) -> Tensor | None:
        """Return logits [len(inputs), vocab] of a decode step, or None, with nothing done, if no recording serves it.

        The next call overwrites the result.
        """
        own = self._bucket(inputs)
        bucket = None if own is None else self._likely(own)
        present = None if bucket is None else self._inputs.fill(inputs, work, bucket)
        key = None if own is None or present is None else self._serving(own, present)
        if key is None or (key[0] != bucket and self._inputs.fill(inputs, work, key[0]) is None):
            return None
        self._inputs.send(sampled)
        replay = self._replay(*key)
        return None if replay is None else replay()[: len(inputs)]

    def max_shared_rows(self, inputs: Sequence[SequenceInput]) -> int | None:
        """Return the most rows of shared runs with which a step fits its recording; None if none serves it."""
        bucket = self._bucket(inputs)
        return None if bucket is None else graph_capacity.shared_rows(bucket)

    def _bucket(self, inputs: Sequence[SequenceInput]) -> int | None:
        """Return the number of rows to which a step is padded; None for steps that are not recorded."""
        place = bisect_left(self._buckets, len(inputs))
        if not inputs or place == len(self._buckets) or any(len(sequence.tokens) != 1 for sequence in inputs):
            return None
        bucket = self._buckets[place]
        return bucket if self._padded or bucket == len(inputs) else None

    def _likely(self, own: int) -> int | None:
        """Return the bucket in which a step of bucket `own` probably runs; None if it cannot run in any."""
        if self._can_record:
            return own
        return min((bucket for bucket, _ in self.replays if self._serves(bucket, own)), default=None)

    def _serving(self, own: int, present: Present) -> tuple[int, Present] | None:
        """Return the key of the recording for such a step, or if none can be made, of the nearest one that covers it.

        Rows beyond the step's are padded. A recording finds no tiles of the kinds that the step lacks.
        """
        if (own, present) in self.replays or self._can_record:
            return own, present
        larger = (
            (bucket, kinds)
            for bucket, kinds in self.replays
            if self._serves(bucket, own) and all(has or not wants for has, wants in zip(kinds, present, strict=True))
        )
        return min(larger, key=lambda key: (key[0], sum(key[1])), default=None)

    def _serves(self, bucket: int, own: int) -> bool:
        return bucket == own or (self._padded and bucket > own)

    @property
    def _can_record(self) -> bool:
        return not self.failed and not self._recorder.full

    def _replay(self, bucket: int, present: Present) -> Replay | None:
        """Return the recording for such steps, made now if there is none; None, with a warning, if that fails."""
        key = bucket, present
        if key not in self.replays:
            try:
                self.replays[key] = self._recorder.record(lambda: self._forward(bucket, present))
            except Exception as error:
                self.failed = True
                message = "decode steps run without CUDA graphs from now on: %s: %s"
                _log.log(self._failure, message, type(error).__name__, error)
                return None
        return self.replays[key]


SHARE = 0.03
"""Share of a GPU's memory that all graphs may take. The KV pool leaves a tenth of the memory to everything else."""

WARM_UPS = 2
"""Runs before a recording: they compile kernels and let libraries allocate, which cannot be recorded."""


class CudaRecorder:
    """Records graphs that share their memory: only one replays at a time, and its result is read before the next."""

    def __init__(self, device: Device) -> None:
        """Record on `device`, and count the memory that it takes."""
        self._device = device
        self._pool, self._stream = device.graph_pool(), device.stream()
        self._limit = SHARE * device.properties().memory
        self._taken = 0

    @property
    def full(self) -> bool:
        """Whether the graphs' share of memory is used up, or the device has less memory left than the rest of it."""
        return self._taken >= self._limit or self._device.memory()[0] < self._limit - self._taken

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run `step` some times on a stream of its own, then record it; see `Recorder.record`."""
        before = self._device.memory()[0]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            for _ in range(WARM_UPS):
                step()
        self._device.current_stream().wait_stream(self._stream)
        graph = self._device.capture(step, stream=self._stream, pool=self._pool)
        self._taken += max(0, before - self._device.memory()[0])
        return graph.replay
