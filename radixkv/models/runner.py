"""Run one step: tokens, slots and block tables of several sequences in, logits out.

`Runner` owns the pool. It copies blocks first, then computes all inputs in one forward. `PoolForward` is that forward:
`AttentionPlanner` builds the work lists, and `ForwardContext` answers the layers' attention calls along them. A step
writes to the slots that its inputs name, and to no others. `fusion` and `cuda_graphs` replace parts of the forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import plan
from radixkv.attention.host_store import STAGED, HostCosts, HostLoad, HostStore
from radixkv.attention.kv_store import KVStore
from radixkv.device import device_of
from radixkv.models import compression, kv_recompute, step_costs
from radixkv.models.attention_interface import (
    AttentionBackend,
    AttentionCall,
    ForwardSignature,
    RotaryCall,
    backend_of,
    handled_by,
)
from radixkv.models.compression import Compression
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import AttentionWindow, LayerSpec, LoadedModel, SequenceInput
from radixkv.models.recurrent.forward import RecurrentForward, StateArena
from radixkv.models.step_batch import StepBatch, logit_places
from radixkv_kernels.graph_capacity import Bucket
from radixkv_kernels.work_list import WorkList

_log = logging.getLogger(__name__)
WorkLists = dict[AttentionWindow, WorkList]


@dataclass
class EagerSteps:
    """Counts the forwards that no CUDA graph served, on a GPU."""

    count: int = 0

    def __post_init__(self) -> None:
        """Begin with no reason."""
        self._reasons = set[str]()

    def add(self, reason: str) -> None:
        """Count a forward; log each reason once."""
        self.count += 1
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("a step runs without a CUDA graph: %s", reason)


class StepForward(Protocol):
    """Computes the logits of a step whose copies are done."""

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs) + additional, vocab]; rows and `sampled` as in `Runner.run`."""
        ...


class Runner:
    """One model over one pool; `store` is the pool. Not safe for two threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int = 16,
        *,
        deterministic: bool = False,
        recheck_tokens: int = 0,
        state_slots: int = 0,
        host_blocks: int = 0,
        host_states: int = 0,
    ) -> None:
        """Allocate num_blocks * store.bytes_per_block bytes, and spare blocks for `recheck_tokens`.

        `host` is the memory for `host_blocks` offloaded blocks, which take as many bytes each; None without them.

        A model with recurrent state also takes `state_slots` slots of `loaded.state_bytes`, and `host_states` more in
        host memory: `states`. The caller runs the copies between them.

        If `deterministic`, the bits of a forward depend only on the tokens, starts and lengths of its inputs: not on
        the blocks' ids, nor on whether inputs share blocks. This costs a gather of all keys that are read.
        """
        self.loaded, self.deterministic, self.recheck_tokens = loaded, deterministic, recheck_tokens
        self._device = device_of(loaded.device)
        self._spare_block = num_blocks  # the first block that belongs to no cache, for `recheck`
        self.store = KVStore(
            [layer.shape for layer in loaded.stored_layers],
            num_blocks + -(-recheck_tokens // block_size) + bool(recheck_tokens),
            block_size,
            device=loaded.device,
            dtype=loaded.dtype,
            always_gather=deterministic,
            kv_dtype=loaded.kv_dtype,
        )
        self.host = HostStore(self.store, host_blocks) if host_blocks else None
        self.backend = backend_of(loaded, self.store, deterministic=deterministic)
        self.eager = EagerSteps()
        self.forward: StepForward
        if loaded.attention == "fallback":
            from radixkv.models.fallback import OwnAttention  # imports transformers, which not every model needs

            self.forward = OwnAttention(loaded, self.store)
        else:
            min_saving = plan.NEVER_SHARE if deterministic else plan.MIN_SAVING
            planner = AttentionPlanner(loaded.layers, block_size, min_saving, self.backend.short_chunk)
            self.forward = PoolForward(loaded, self.backend, planner)
        self.states: StateArena | None = None
        if loaded.state:
            self.states = StateArena(loaded.state, state_slots, loaded.device, host_states)
            self.forward = RecurrentForward(self.forward.run, self.states)

    def stats(self) -> dict[str, int]:
        """Return counters of recurrent states and of steps without CUDA graphs, as in EngineStats."""
        states = {} if self.states is None else self.states.stats()
        return {**states, "eager_steps": self.eager.count}

    @torch.inference_mode()
    def run(
        self,
        inputs: Sequence[SequenceInput],
        copies: Sequence[tuple[int, int]] = (),
        sampled: Tensor | None = None,
    ) -> Tensor:
        """Execute one step, copies first, then all inputs in one forward; return float logits of the wanted rows.

        `sampled` int64 [rows] on the device has the tokens of inputs with a `sampled_row`. On a GPU nothing waits for
        it on the host, and the logits are memory of their own that no later step overwrites.

        Row i of the logits [len(inputs) + additional, vocab] belongs to the last token of input i. The additional rows
        follow: for each input in order, the rows of the `logit_rows - 1` tokens before its last one, by position
        (`logit_places`). A caller that wants several rows keeps them within `max_logit_rows`.

        Inputs may have any lengths, may share blocks that earlier steps have written, and write to different slots. The
        step's T tokens take about T * hidden * 10 activations (the MLP is widest) and rows * vocab logits. They never
        take T * T scores, and T * vocab logits only if the architecture cannot leave rows out. An `isolated` input
        takes one more forward; the fallback takes one each.
        """
        with self._device.current():
            self.backend.copy(copies)
            isolated = [index for index, each in enumerate(inputs) if each.isolated]
            if isolated:
                logits = self._run_isolated(inputs, isolated, sampled)
            else:
                logits = self.forward.run(inputs, sampled)
            return logits if logits.dtype == torch.float64 else logits.float()

    def _run_isolated(self, inputs: Sequence[SequenceInput], isolated: list[int], sampled: Tensor | None) -> Tensor:
        """Run each isolated input in a forward of its own, then all others in one."""
        others = [index for index, each in enumerate(inputs) if not each.isolated]
        groups = [*([index] for index in isolated), *([others] if others else [])]
        logits = torch.cat([self.forward.run([inputs[index] for index in group], sampled) for group in groups])
        places, order = logit_places([each.logit_rows for each in inputs]), list[int]()
        for group in groups:
            order += group
            order += chain.from_iterable(places[index][:-1].tolist() for index in group)
        return logits[self._device.upload(np.argsort(order))]

    @property
    def block_size(self) -> int:
        """The tokens of a block."""
        return self.store.block_size

    @property
    def room(self) -> int:
        """The longest sequence that fits into an empty pool, in tokens."""
        return min(self._spare_block * self.block_size, self.loaded.max_length)

    def host_costs(self, chunk: int) -> HostCosts:
        """Measure the seconds per token of a load and of a prefill of up to `chunk`: see `step_costs.host_costs`."""
        return step_costs.host_costs(self, chunk)

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Measure the seconds of forwards of 1 to 16 rows: see `step_costs.row_costs`."""
        return step_costs.row_costs(self)

    # ---- images of blocks, which move between engines

    @property
    def image_bytes(self) -> int:
        """Bytes of the image of a block: the keys and values of all layers."""
        return self.store.bytes_per_block

    @cached_property
    def _staging(self) -> HostStore:
        return HostStore(self.store, STAGED)

    def read_images(self, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Copy up to STAGED blocks of the pool: [blocks, image_bytes]; slots after the first `tokens` are zero.

        The layout is the layout of `HostStore.image`. The first call allocates the memory of STAGED blocks.
        """
        images = np.empty((len(blocks), self.image_bytes), np.uint8)
        self._staging.offload([(block, number) for number, block in enumerate(blocks)])
        for number, image in enumerate(images):
            image[:] = self._staging.image(number)
        self._staging.blank(images[-1], tokens - (len(blocks) - 1) * self.store.block_size)
        return images

    def load_images(self, load: HostLoad, images: NDArray[np.uint8]) -> None:
        """Run the copies of a plan, then copy tokens of up to STAGED images to its slots.

        `load.sources` counts in slots of `images` [images, image_bytes]: image * block_size + offset.
        """
        for number, image in enumerate(images):
            self._staging.put_image(number, image)
        self._staging.load([load])

    # ---- computing cached KV again

    @property
    def row_dependent(self) -> bool:
        """Whether a row's bits depend on the other rows of its forward, later ones included."""
        return kv_recompute.row_dependent(self.loaded)

    @property
    def recheck_obstacle(self) -> str | None:
        """Why cached KV cannot be recomputed and compared; None if it can."""
        return kv_recompute.recompute_obstacle(self.loaded, exact=self.deterministic)

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Recompute the KV of the cached tokens [start, end) after the cached [0, start), and compare.

        `tokens` [end] and `block_table` describe the whole path; `start` is a multiple of `recheck_tokens`, and at most
        `recheck_tokens` follow it. Writes to the spare blocks only. A deterministic runner computes a full chunk, as
        the cached KV was computed, and compares bits: later rows change no bits of a row. For `row_dependent` models
        they do, so the tokens must be a full chunk. Costs one forward of these tokens.
        """
        assert start % self.recheck_tokens == 0 and 0 < len(tokens) - start <= self.recheck_tokens
        size, count, spare = self.store.block_size, len(tokens) - start, self._spare_block
        assert not self.row_dependent or count == self.recheck_tokens
        first, offset = divmod(start, size)
        copies = [(int(block_table[first]), spare)] if offset else []
        new = tokens[start:]
        if self.deterministic:
            new = np.concatenate([new, np.zeros(self.recheck_tokens - count, dtype=np.int32)])
        spares = np.arange(spare, spare - (-(offset + len(new)) // size), dtype=np.int32)
        slots = spare * size + offset + np.arange(len(new))
        table = np.concatenate([block_table[:first], spares])
        self.run([SequenceInput(new, start, slots, table, isolated=True)], copies)
        return kv_recompute.compare(self.store, block_table[first:], spares, offset, count, exact=self.deterministic)

    # ---- compressing a cached prefix

    @property
    def compression_obstacle(self) -> str | None:
        """Why a prefix cannot be compressed; None if it can."""
        return compression.obstacle(self.loaded)

    def compression(self, tokens: NDArray[np.int32], method: str) -> Compression:
        """Begin to score the cached prefix `tokens` by a method of `compression.METHODS`."""
        return Compression(self.loaded, self.store, tokens, method)


class PoolForward:
    """Computes all inputs of a step in one forward of `model`, with attention over the pool."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, planner: AttentionPlanner) -> None:
        """Use the layers and the model of `loaded`."""
        self.model: Any = loaded.model
        self.planner = planner
        self._signature = ForwardSignature.of(loaded.model)
        self._backend, self._layers, self._device = backend, loaded.layers, device_of(loaded.device)
        self._windows = [layer.attention_window for layer in loaded.layers]

    def run(
        self,
        inputs: Sequence[SequenceInput],
        sampled: Tensor | None = None,
        work: WorkLists | None = None,
        bucket: Bucket | None = None,
    ) -> Tensor:
        """Compute a step along its `work`, which is planned here by default; return logits as `Runner.run` does.

        They are in the model's dtype. The step is padded to a bucket's size if there is one, which only the Triton
        backend can, and has no additional rows then.
        """
        work = self.planner.lists(inputs) if work is None else work
        rows, sequences = (0, 0) if bucket is None else (bucket.tokens, bucket.sequences)
        batch = StepBatch(inputs, self._device, sampled, rows=rows, sequences=sequences)
        if rows:
            work = {window: each.padded(rows) for window, each in work.items()}
        lists = [work[window] for window in self._windows]
        context = ForwardContext(self._backend, self._layers, batch.slots, lists)
        logits = self.logits(context, batch.tokens, batch.positions, batch.logit_rows)
        return logits if bucket is None else logits[: len(inputs)]

    def logits(self, context: ForwardContext, tokens: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Run one forward of tokens [T] whose attention `context` answers: logits [len(logit_rows), vocab]."""
        with handled_by(context):
            logits: Tensor = self._signature.logits(
                self.model, tokens, logit_rows, positions=positions, use_cache=False
            )
        context.finish()
        return logits


class AttentionPlanner:
    """Builds a step's work list for each distinct attention window of a model's layers."""

    def __init__(self, layers: Sequence[LayerSpec], block_size: int, min_saving: int, short_chunk: int = 1) -> None:
        """Pass `min_saving` and `short_chunk` to `plan.build`.

        Raises InvalidInput for layers whose chunks are not whole blocks.
        """
        for layer in layers:
            if layer.chunk is not None:
                plan.check_chunk(layer.chunk, block_size)
        self._windows = tuple({layer.attention_window: None for layer in layers})
        self._block_size, self._min_saving, self._short_chunk = block_size, min_saving, short_chunk
        self._previous: dict[int | None, WorkList] = {}

    def lists(self, inputs: Sequence[SequenceInput], max_shared_rows: int | None = None) -> WorkLists:
        """Build the list of each window; `max_shared_rows` as in `plan.build`.

        All windows see the same tree of tables, mostly the tree of the step before, so each list is built from the
        last.
        """
        tables = [each.block_table for each in inputs]
        query_lengths = [len(each.tokens) for each in inputs]
        kv_lengths = [each.start + n for each, n in zip(inputs, query_lengths, strict=True)]
        found = {}
        for window, chunk in self._windows:
            sequences: tuple[Any, list[int], list[int]] = tables, kv_lengths, query_lengths
            if chunk is not None:
                sequences = plan.cut_chunks(*sequences, chunk, self._block_size)
            work = plan.build(
                *sequences,
                window,
                self._previous.get(chunk),
                block_size=self._block_size,
                min_saving=self._min_saving,
                max_shared_rows=max_shared_rows,
                short_chunk=self._short_chunk,
            )
            self._previous[chunk] = found[AttentionWindow(window, chunk)] = work
        return found


class ForwardContext:
    """Answers the attention calls of one forward in order: the n-th call is layer n, regardless of its module."""

    def __init__(
        self, backend: AttentionBackend, layers: Sequence[LayerSpec], slots: Tensor, work: Sequence[Any]
    ) -> None:
        """Write new KV to `slots` [T]; `work` holds each layer's list or plan, as `backend` takes it."""
        self._backend, self._layers, self._slots, self._work = backend, layers, slots, work
        self._next = 0
        self.attend_rows = None if backend.rotate is None else self._attend_rows

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the layer's new keys and values, then attend."""
        layer, self._next = self._next, self._next + 1
        self._backend.write(layer, self._slots, call.key.squeeze(0), call.value.squeeze(0))
        # squeeze takes half the time of an index
        return self._attend(layer, call.query.squeeze(0), call.scale, call.sinks)

    def _attend_rows(self, call: RotaryCall) -> Tensor:
        """Rotate the rows of a layer of `native.fused` and store its keys and values, then attend."""
        assert self._backend.rotate is not None
        layer, self._next = self._next, self._next + 1
        return self._attend(layer, self._backend.rotate(layer, self._slots, call), call.scale)

    def _attend(self, layer: int, query: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        softcap = self._layers[layer].softcap
        return self._backend.attend(layer, query, self._work[layer], scale=scale, softcap=softcap, sinks=sinks)

    def finish(self) -> None:
        """Check that the forward called each layer once, as in the probe."""
        assert self._next == len(self._layers), f"{self._next} attention calls, {len(self._layers)} in the probe"
