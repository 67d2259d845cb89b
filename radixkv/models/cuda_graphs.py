"""Record steps as CUDA graphs, one for each size of step, and replay them: launches then cost the host nothing.

`record_graphs` records all sizes when an engine is loaded: decodes, and steps with chunks of prompts. Nothing is
recorded while requests are served. A step runs in the smallest graph that is large enough; a kind of tile that it lacks
is an empty launch there. A step that no graph serves is computed as without graphs, and counted.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from radixkv.device import Device, device_of, refuse_fatal
from radixkv.models.attention_interface import keys_per_tile, recordable_backend
from radixkv.models.experts import MOST_TOKENS, grouped_mm_waits, recordable
from radixkv.models.loaded import AttentionWindow, SequenceInput
from radixkv.models.rounding import agree
from radixkv.models.runner import EagerSteps, ForwardContext, PoolForward, Runner, StepForward
from radixkv.models.step_batch import num_logit_rows
from radixkv.sizing.kv_size import size_text
from radixkv_kernels.graph_capacity import Bucket
from radixkv_kernels.work_list import WorkList

if TYPE_CHECKING:
    from radixkv.models.cuda_inputs import StepInputs

_log = logging.getLogger(__name__)
Replay = Callable[[], Tensor]

ATTEMPTS = 3
"""Times that each graph is tried at load: another process may have taken memory for a moment."""

SMALLEST_CHUNKS = 16
"""Tokens of the smallest bucket for steps with chunks of prompts."""


MOST_PADDING = 256
"""Rows of padding that cost less than launches, about: products of fewer rows take the time to read the weights."""


def record_graphs(runner: Runner, sequences: int, tokens: int, recorder: DeviceRecorder | None = None) -> None:
    """Replay steps of up to `sequences` inputs and `tokens` tokens from now on, if this device and model allow it.

    Records all graphs now and compares some replays with computed steps, so nothing may be cached yet. A model that
    cannot be recorded computes its steps, with one warning per reason; on a GPU they are counted. The graphs take up to
    `SHARE` of the device's memory. A deterministic runner replays decodes only. Costs two forwards for each of about
    forty buckets.
    """
    loaded, store, forward = runner.loaded, runner.store, runner.forward
    device, reason = device_of(store.device), "none could be recorded when the model was loaded"
    if loaded.state:
        reason = "layers with recurrent state record none"
    elif loaded.attention != "triton":
        reason = f"attention={loaded.attention!r} records none"
    elif recorder is not None or device.is_gpu:
        assert isinstance(forward, PoolForward)
        sizes = buckets(sequences, 0 if runner.deterministic else tokens)
        try:
            with torch.inference_mode(), device.current():
                graphs = _graphs_of(runner, forward, sizes, recorder or DeviceRecorder(device))
                if grouped_mm_waits(loaded):
                    message = (
                        "the experts' product waits for this GPU in each layer, except in bfloat16 on sm_90 and "
                        "sm_100: steps of more than %d tokens run without CUDA graphs, and cost the host every launch"
                    )
                    _log.warning(message, MOST_TOKENS)
                graphs.record()
                if graphs.buckets and _replays_the_same(graphs, forward, store.block_size, loaded.dtype):
                    runner.forward = ReplayedForward(graphs, forward, runner.eager, padded=not runner.deterministic)
        except torch.OutOfMemoryError as error:  # for their inputs, or for the steps that are compared
            _log.warning("steps run without CUDA graphs: %s", error)
    if device.is_gpu and runner.forward is forward:
        runner.forward = UnrecordedForward(forward, runner.eager, reason)


def buckets(sequences: int, tokens: int) -> list[Bucket]:
    """Return the sizes that are recorded, decodes first, and the largest first.

    Decodes of 1, 2, 4, multiples of 8, and `sequences`. Steps with chunks of prompts have `SMALLEST_CHUNKS` tokens at
    least, and each power of two is cut into four: at most a quarter of a larger step is padding.

    >>> [bucket.tokens for bucket in buckets(20, 0)]
    [20, 16, 8, 4, 2, 1]
    >>> [bucket.tokens for bucket in buckets(8, 100) if bucket.chunks]
    [100, 96, 80, 64, 48, 32, 16]
    >>> len(buckets(64, 2048)), len(buckets(256, 8192))
    (35, 67)
    """
    decodes = {size for size in (1, 2, 4, *range(8, sequences, 8), sequences) if size <= sequences}
    mixed, size = set[int](), SMALLEST_CHUNKS
    while size < tokens:
        mixed.add(size)
        size += max(SMALLEST_CHUNKS, 1 << (size.bit_length() - 3))
    mixed |= {tokens} if tokens > 1 else set()
    return [
        *(Bucket(size, size) for size in sorted(decodes, reverse=True)),
        *(Bucket(size, min(size, sequences), chunks=True) for size in sorted(mixed, reverse=True)),
    ]


def _graphs_of(runner: Runner, computed: PoolForward, sizes: Sequence[Bucket], recorder: DeviceRecorder) -> StepGraphs:
    """Return the graphs of this runner's steps; none is recorded yet."""
    from radixkv.models.cuda_inputs import StepInputs  # needs Triton

    loaded, store = runner.loaded, runner.store
    split = keys_per_tile(runner.deterministic)
    inputs = StepInputs(store, loaded.layers, sizes, max_length=loaded.max_length, split=split)
    backend = recordable_backend(store, loaded.layers)

    def forward(bucket: Bucket) -> Tensor:
        tokens, positions, slots, logit_rows = inputs.columns(bucket)
        context = ForwardContext(backend, loaded.layers, slots, inputs.plans(bucket))
        with recordable(loaded, bucket.tokens):
            return computed.logits(context, tokens, positions, logit_rows)

    return StepGraphs(inputs, forward, recorder, sizes, device_of(store.device))


def _replays_the_same(graphs: StepGraphs, computed: PoolForward, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the smallest and the largest graphs replay steps that they were not recorded for; warns if not."""
    table, position = np.arange(-(-8 // block_size), dtype=np.int32), 0
    decodes = [bucket for bucket in graphs.buckets if not bucket.chunks]
    for bucket in (*decodes[:1] * 2, *decodes[1:][-1:], *graphs.buckets[-1:]):
        places = np.arange(position, position + 1 + bucket.chunks)
        inputs = [SequenceInput(places.astype(np.int32), position, places, table)]
        work = computed.planner.lists(inputs, bucket.shared_rows)
        replayed = graphs.run(inputs, work, bucket)
        assert replayed is not None, "a step of one sequence does not fit its graph"
        if not agree(replayed.clone(), computed.run(inputs, work=work), dtype):
            _log.warning("steps run without CUDA graphs: this model's replay does not compute the same")
            return False
        position += 1 + bucket.chunks
    return True


class UnrecordedForward:
    """Computes all steps, and counts them."""

    def __init__(self, computed: StepForward, eager: EagerSteps, reason: str) -> None:
        """Count in `eager`, with the `reason` why there are no graphs."""
        self._computed, self._eager, self._reason = computed, eager, reason

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs) + additional, vocab]; all as in `Runner.run`."""
        self._eager.add(self._reason)
        return self._computed.run(inputs, sampled)


class ReplayedForward:
    """Replays the steps for which there is a graph, and computes all others."""

    def __init__(self, graphs: StepGraphs, computed: PoolForward, eager: EagerSteps, *, padded: bool) -> None:
        """Count computed steps in `eager`.

        Unless `padded`, a decode is padded to its own bucket and to no larger one. It is padded in the same way if
        it is computed, because a product of another height may round its rows otherwise.
        """
        self.graphs, self.computed, self._eager, self._padded = graphs, computed, eager, padded

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs) + additional, vocab]; all as in `Runner.run`."""
        serving = self.graphs.serving if self._padded else self.graphs.own
        bucket = serving(inputs)
        work = self.computed.planner.lists(inputs, None if bucket is None else bucket.shared_rows)
        if bucket is not None:
            logits = self.graphs.run(inputs, work, bucket, sampled)
            if logits is not None:
                return logits.clone()  # in the stream's order: the next replay overwrites them
        self._eager.add(self._reason(inputs, bucket))
        return self.computed.run(inputs, sampled, work, None if self._padded else bucket)

    def _reason(self, inputs: Sequence[SequenceInput], bucket: Bucket | None) -> str:
        chunks = has_chunks(inputs)
        if chunks and not self._padded:
            return "a deterministic engine computes chunks of prompts without padding"
        if num_logit_rows(inputs) > max(len(inputs), self.graphs.most_rows):
            return "no graph has as many rows of logits"
        if bucket is None or bucket not in self.graphs.buckets:
            return f"no graph of {'chunks of prompts' if chunks else 'decodes'} has a similar size"
        return "their block tables have too many entries"

    def record_again(self) -> None:
        """Record all graphs again, because weights that they read have moved; between two steps only."""
        with torch.inference_mode(), self.graphs.device.current():
            self.graphs.record()


def has_chunks(inputs: Sequence[SequenceInput]) -> bool:
    """Return whether a step computes several tokens of a sequence."""
    return any(len(each.tokens) != 1 for each in inputs)


class StepGraphs:
    """A recording for each bucket; if one cannot be made, the recording of a larger bucket serves its steps."""

    def __init__(
        self,
        inputs: StepInputs,
        forward: Callable[[Bucket], Tensor],
        recorder: DeviceRecorder,
        sizes: Sequence[Bucket],
        device: Device,
    ) -> None:
        """Let `record` record `forward(bucket)`: logits [bucket.sequences, vocab] from `inputs`, for all `sizes`."""
        self.device = device
        self.missing: dict[str, int] = {}
        """Buckets that are not recorded, by the reason."""
        self.inputs, self._forward, self._recorder, self._sizes = inputs, forward, recorder, sizes
        self._replays: dict[Bucket, Replay] = {}
        self._bytes: dict[Bucket, int] = {}  # that a step takes
        self._logits: Tensor | None = None  # of all graphs

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that are recorded, the smallest first."""
        return sorted(self._replays)

    @property
    def most_rows(self) -> int:
        """The most rows of logits of a recorded step with chunks of prompts."""
        return max((each.sequences for each in self._replays if each.chunks), default=0)

    # ---- at load

    def record(self) -> None:
        """Record all buckets, each after a run that shows whether it can be; drop earlier recordings.

        All buckets are run before one is recorded: a step that waits for the device would break a recording, and with
        it torch's memory. A bucket that fails is tried `ATTEMPTS` times in all, and then left out with one log message
        per reason. Writes no KV. Raises DeviceLost if the device computes nothing more.
        """
        self._replays.clear()
        self._recorder.forget()
        left = list(self._sizes)
        for _ in range(ATTEMPTS):
            self.missing = {}
            with _uncollected():
                ready = [bucket for bucket in left if self._try(self._warm_up, bucket)]
                done = {bucket for bucket in ready if self._try(self._record, bucket)}
            left = [bucket for bucket in left if bucket not in done]
            if not self.missing:
                break
        if left and not self.missing:
            most = size_text(max(self._bytes[bucket] for bucket in left))
            reason = f"a step takes up to {most}, and all graphs may take {SHARE:.0%} of the device's memory"
            self.missing = {reason: len(left)}
        for reason, count in self.missing.items():
            message = "%d of %d CUDA graphs could not be recorded; larger ones or launches serve their steps: %s"
            _log.warning(message, count, len(self._sizes), reason)

    def _try(self, operation: Callable[[Bucket], bool], bucket: Bucket) -> bool:
        """Return the result of an operation; False, with its reason counted, if it raises."""
        try:
            return operation(bucket)
        except Exception as error:
            refuse_fatal(error)
            reason = f"{type(error).__name__}: {error}"
            self.missing[reason] = self.missing.get(reason, 0) + 1
            return False

    def _warm_up(self, bucket: Bucket) -> bool:
        self._empty(bucket)
        self._bytes[bucket] = self._recorder.warm_up(partial(self._step, bucket))
        return True

    def _record(self, bucket: Bucket) -> bool:
        if not self._recorder.has_room(self._bytes[bucket]):
            return False
        self._empty(bucket)
        self._replays[bucket] = self._recorder.record(partial(self._step, bucket))
        return True

    def _empty(self, bucket: Bucket) -> None:
        """Let a bucket's addresses hold a step without any sequence, which writes no KV."""
        self.inputs.clear(bucket)
        self.inputs.send()

    def _step(self, bucket: Bucket) -> Tensor:
        """Compute the step at a bucket's addresses: float32 logits at addresses that all graphs share."""
        logits = self._forward(bucket)
        if self._logits is None:  # in the first warm-up, before any recording
            rows = max(each.sequences for each in self._sizes)
            self._logits = logits.new_empty(rows, logits.shape[1], dtype=torch.float32)
        return self._logits[: bucket.sequences].copy_(logits)

    # ---- while serving

    def serving(self, inputs: Sequence[SequenceInput]) -> Bucket | None:
        """Return the smallest recorded bucket that holds a step; None if there is none, or none of a similar size."""
        tokens, chunks = sum(len(each.tokens) for each in inputs), has_chunks(inputs)
        rows = num_logit_rows(inputs) if chunks else len(inputs)
        fitting = (each for each in self._replays if each.chunks >= chunks and each.sequences >= rows)
        bucket = min((each for each in fitting if each.tokens >= tokens), default=None)
        return None if bucket is None or bucket.tokens - tokens > max(tokens, MOST_PADDING) else bucket

    def own(self, inputs: Sequence[SequenceInput]) -> Bucket | None:
        """Return the smallest bucket of decodes that holds a step, recorded or not; None if there is none."""
        if has_chunks(inputs):
            return None
        fitting = (each for each in self._sizes if not each.chunks and each.tokens >= len(inputs))
        return min(fitting, default=None)

    def run(
        self,
        inputs: Sequence[SequenceInput],
        work: Mapping[AttentionWindow, WorkList],
        bucket: Bucket,
        sampled: Tensor | None = None,
    ) -> Tensor | None:
        """Return float32 logits of the step's rows, which the next call overwrites; None, with nothing done, if not.

        The step must be of the bucket's size at most, additional rows of logits included. It is not run if the bucket
        is not recorded, or if the step's block tables do not fit.
        """
        replay = self._replays.get(bucket)
        if replay is None or not self.inputs.fill(inputs, work, bucket):
            return None
        self.inputs.send(sampled)
        return replay()[: num_logit_rows(inputs) if bucket.chunks else len(inputs)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage now and none meanwhile: to free a tensor or a Triton kernel may end a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


SHARE = 0.03
"""Share of a GPU's memory that all graphs may take. The KV pool leaves a tenth of the memory to everything else."""


class DeviceRecorder:
    """Records graphs that share their memory: only one replays at a time, and its result is read before the next."""

    def __init__(self, device: Device) -> None:
        """Record on `device`, and count the memory that it takes."""
        self._device, self._stream = device, device.stream()
        self._limit = SHARE * device.properties().memory
        self.forget()

    def forget(self) -> None:
        """Count no recording any more: all were dropped."""
        self._taken = 0
        self._pool: Any = None
        """Of a recorded graph: torch may refuse a pool whose captures failed, or whose graphs are gone."""

    def has_room(self, nbytes: int) -> bool:
        """Return whether a recording of a step that takes so many bytes may be made; recordings share memory.

        The graphs' share of memory must have room for it, and the device for the rest of that share.
        """
        if nbytes > self._limit or self._taken >= self._limit:
            return False
        self._device.release_cached()  # memory of the steps that ran before
        return self._device.memory()[0] >= self._limit - self._taken

    def warm_up(self, step: Callable[[], Tensor]) -> int:
        """Run `step` on the recorder's stream, as it will be recorded; return the most bytes that it takes.

        Raises the errors of `step`, and an error if it waits for the device. The run compiles kernels and lets
        libraries allocate, which cannot be recorded. Meanwhile no thread of the process may wait for the device by
        torch.
        """
        self._stream.wait_stream(self._device.current_stream())
        try:
            with self._device.on(self._stream), self._device.peak() as peak, self._device.refuse_synchronisation():
                step()
        finally:  # a step that failed may have launches that still read its inputs
            self._device.current_stream().wait_stream(self._stream)
        return peak.bytes

    def record(self, step: Callable[[], Tensor]) -> Replay:
        """Record `step` on the recorder's stream; return a function that launches the same on the same memory.

        Raises the errors of `step`, and an error if the step cannot be recorded.
        """
        self._device.release_cached()
        before = self._device.memory()[0]
        pool = self._device.graph_pool() if self._pool is None else self._pool
        try:
            graph = self._device.capture(step, stream=self._stream, pool=pool)
        finally:  # the memory of a failed capture may stay taken, see `CudaDevice._abandon`
            self._taken += max(0, before - self._device.memory()[0])
        self._pool = pool
        return graph.replay
