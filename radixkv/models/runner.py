"""Work out, once per step for all layers, which query reads which block.

Knows the reaches of a model's layers and the step before. Does not know tensors or how a list is followed.

Answer the attention calls of one forward: each layer's KV to its slots, then attention along that layer's list.

Knows layers and their order. Does not know how a list came about, nor whether it is for now or for a recording.

Run a batch of chunks through a model over the paged pool: tokens, slots and block tables in, logits out.

Knows tensors and block tables. Does not know requests, sampling or who owns a block: the plan of a step comes from
the cache through the engine, and is executed here to the letter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore
from radixkv.models.architecture import ForwardSignature
from radixkv.models.attention_interface import (
    AttentionBackend,
    AttentionCall,
    PlannedBackend,
    backend_of,
    handled_by,
    keys_per_tile,
)
from radixkv.models.cuda_graphs import CudaRecorder, DecodeGraphs, Present, Recorder
from radixkv.models.fallback import OwnAttention
from radixkv.models.kv_recompute import Recheck, compare, obstacle, row_dependent
from radixkv.models.loaded import AttentionWindow, LayerSpec, LoadedModel, SequenceInput
from radixkv.models.rounding import agree
from radixkv_kernels.work_list import WorkList

WorkLists = dict[AttentionWindow, WorkList]


class AttentionPlanner:
    """Builds a work list for each distinct reach of the layers of a model."""

    def __init__(self, layers: Sequence[LayerSpec], block_size: int, min_saving: int) -> None:
        """`min_saving` as in `plan.build`. Raises InvalidInput for layers whose chunks are no whole blocks."""
        for layer in layers:
            if layer.chunk is not None:
                plan.check_chunk(layer.chunk, block_size)
        self._reaches = tuple({layer.attention_window: None for layer in layers})
        self._block_size, self._worth = block_size, min_saving
        self._previous: dict[int | None, WorkList] = {}

    def lists(self, chunks: Sequence[SequenceInput]) -> WorkLists:
        """The list of each reach.

        The tree among the tables is the same for all windows, and mostly that of the step before: each list is built
        from the one before it.
        """
        tables = [chunk.block_table for chunk in chunks]
        query_lengths = [len(chunk.tokens) for chunk in chunks]
        kv_lengths = [chunk.start + n for chunk, n in zip(chunks, query_lengths, strict=True)]
        found = {}
        for attention_window in self._reaches:
            sequences = self._sequences(tables, kv_lengths, query_lengths, attention_window)
            self._previous[attention_window.chunk] = found[attention_window] = plan.build(
                *sequences,
                attention_window.window,
                self._previous.get(attention_window.chunk),
                block_size=self._block_size,
                min_saving=self._worth,
            )
        return found

    def _sequences(
        self,
        tables: list[NDArray[np.int32]],
        kv_lengths: list[int],
        query_lengths: list[int],
        attention_window: AttentionWindow,
    ) -> tuple[Any, list[int], list[int]]:
        """The step's sequences as layers of this reach see them."""
        if attention_window.chunk is None:
            return tables, kv_lengths, query_lengths
        return plan.cut_chunks(tables, kv_lengths, query_lengths, attention_window.chunk, self._block_size)


class ForwardContext:
    """Answers in order: the n-th call is layer n, whatever the module says about itself."""

    def __init__(
        self, backend: AttentionBackend, layers: Sequence[LayerSpec], slots: Tensor, lists: Sequence[Any]
    ) -> None:
        """`lists` has what `backend` follows in each layer, `slots` [T] where new KV goes."""
        self._backend, self._layers, self._slots, self._lists = backend, layers, slots, lists
        self._next = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the layer's new keys and values, then attend."""
        layer, self._next = self._next, self._next + 1
        self._backend.write(layer, self._slots, call.key[0], call.value[0])
        return self._backend.attend(
            layer,
            call.query[0],
            self._lists[layer],
            scale=call.scale,
            softcap=self._layers[layer].softcap,
            sinks=call.sinks,
        )

    def finish(self) -> None:
        """The forward called each layer once, as in the probe."""
        assert self._next == len(self._layers), f"{self._next} attention calls, {len(self._layers)} in the probe"


_log = logging.getLogger(__name__)


class Runner:
    """One model over one pool; `store` is the pool. Not for two threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int = 16,
        *,
        deterministic: bool = False,
        recheck_tokens: int = 0,
    ) -> None:
        """Allocate the pool: num_blocks * store.bytes_per_block bytes, and blocks beside it for `recheck_tokens`.

        If `deterministic`, the bits of a forward depend on the tokens, starts and lengths of its chunks alone: not on
        where the blocks lie, nor on whether two chunks share some. Costs the gathering of all keys that are read.
        """
        self.loaded = loaded
        self.recheck_tokens = recheck_tokens
        self._beside = num_blocks  # the first of the blocks that no cache knows, for `recheck`
        self.store = KVStore(
            [layer.shape for layer in loaded.layers],
            num_blocks + -(-recheck_tokens // block_size) + bool(recheck_tokens),
            block_size,
            device=loaded.device,
            dtype=loaded.dtype,
            always_gather=deterministic,
        )
        self._forward_of = ForwardSignature.of(loaded.model)
        self._own = OwnAttention(loaded, self.store) if loaded.attention == "fallback" else None
        self._backend = backend_of(loaded, self.store, deterministic=deterministic)
        self._deterministic = deterministic
        min_saving = plan.NEVER_SHARE if deterministic else plan.MIN_SAVING
        self._planner = AttentionPlanner(loaded.layers, block_size, min_saving)
        self._graphs: DecodeGraphs | None = None
        self._model: Any = loaded.model
        self._uncompiled = False  # though it was to be compiled, which has been said

    def fuse(self, backend: str = "inductor") -> None:
        """From now on run a compiled model, if it computes the same; before `record_decodes`, and anything is cached.

        `backend` is one of torch.compile's. Compiles at once, for several tokens and for one: some ten seconds each,
        however many layers there are. What fails, would be compiled again and again, or computes something else, runs
        as before, with one warning.
        """
        from radixkv.models import fusion

        if self._own is not None:
            _log.warning("the model runs uncompiled: its attention is not radixkv's to compile around")
            self._uncompiled = True
            return
        expected = self._probed()
        self._model = fusion.Fused(self.loaded.model, backend)
        try:
            first, compiled = self._probed(), fusion.compilations()
            again = self._probed()
            if fusion.compilations() > compiled:
                _log.warning("the model runs uncompiled: it would be compiled anew in each step")
            elif all(agree(found, expected, self.loaded.dtype) for found in (first, again)):
                self._uncompiled = self._model.failed
                return
            else:
                _log.warning("the model runs uncompiled: compiled, it does not compute the same")
        except Exception as error:  # compilers raise what they like
            fusion.warn(error)
        self._model, self._uncompiled = self.loaded.model, True

    def _probed(self) -> Tensor:
        """Logits of a few tokens at the start of the pool: of a prompt, of one more, and of two sequences.

        The prompt has five tokens, which is no size that a model has: a compiler takes equal sizes for the same one.
        """
        size = self.store.block_size
        tables = np.arange(2 * -(-7 // size), dtype=np.int32).reshape(2, -1)

        def chunk(row: int, start: int, end: int) -> SequenceInput:
            places = np.arange(start, end)
            slots = tables[row][places // size].astype(np.int64) * size + places % size
            return SequenceInput(places.astype(np.int32), start, slots, tables[row])

        steps = [[chunk(0, 0, 5)], [chunk(0, 5, 6)], [chunk(0, 6, 7), chunk(1, 0, 2)]]
        return torch.cat([self.run(step) for step in steps])

    def record_decodes(self, most: int, recorder: Recorder | None = None) -> None:
        """From now on replay steps that decode up to `most` sequences from CUDA graphs, if that is possible here.

        Records one step at once, and compares what its replay computes, so nothing may be cached yet. A model that
        cannot be recorded runs as before, with one warning. Takes memory as `CudaRecorder` says.
        """
        if any(layer.chunk for layer in self.loaded.layers):
            _log.info("decode steps run without CUDA graphs: chunks of attention have block tables of their own")
        elif self.loaded.attention == "triton" and (recorder is not None or self.store.device.type == "cuda"):
            with torch.inference_mode(), _on(self.store.device):
                graphs = self._recorded(most, recorder)
                self._graphs = graphs if self._replays_what_it_computes(graphs) else None

    def _recorded(self, most: int, recorder: Recorder | None) -> DecodeGraphs:
        """Graphs of this runner's decode steps, none of which is recorded yet."""
        from radixkv.models.cuda_inputs import DecodeInputs  # needs Triton

        layers, split = self.loaded.layers, keys_per_tile(self._deterministic)
        inputs = DecodeInputs(self.store, layers, most, max_length=self.loaded.max_length, split=split)
        backend = PlannedBackend(self.store)

        def forward(bucket: int, present: Present) -> Tensor:
            tokens, positions, slots = inputs.columns(bucket)
            step = ForwardContext(backend, layers, slots, inputs.plans(bucket, present))
            return self._logits(step, tokens, positions, inputs.last_rows(bucket))

        return DecodeGraphs(
            inputs,
            forward,
            recorder or CudaRecorder(self.store.device),
            most,
            padded=not self._deterministic,
            # What cannot be compiled can often not be recorded either: one warning is enough.
            failure=logging.INFO if self._uncompiled else logging.WARNING,
        )

    def _replays_what_it_computes(self, graphs: DecodeGraphs) -> bool:
        """Whether a graph, recorded for one token, computes another behind it; a warning says why not."""
        table = np.arange(-(-2 // self.store.block_size), dtype=np.int32)
        for position in range(2):
            chunk = SequenceInput(np.array([position], np.int32), position, np.array([position]), table)
            work = self._planner.lists([chunk])
            replayed = graphs.run([chunk], work)
            if replayed is None:
                return False
            replayed, computed = replayed.clone(), self._compute([chunk], work)
            if not agree(replayed, computed, self.loaded.dtype):
                _log.warning("decode steps run without CUDA graphs: this model's replay does not compute the same")
                return False
        return True

    @torch.inference_mode()
    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Execute one step, copies first, then all chunks in one forward; return float logits [len(chunks), vocab].

        Row i belongs to the last token of chunk i. Chunks may be of any mix of lengths, may share blocks that earlier
        steps have written, and write to slots of their own. Beside the pool this takes the activations of T = all
        tokens of the step (some T * hidden * 10 numbers, widest in the MLP) and len(chunks) * vocab logits: never
        T * T scores, and T * vocab only where an architecture cannot leave rows out. An `isolated` chunk takes one
        forward more; the fallback takes one for each chunk.
        """
        with _on(self.store.device):
            self._backend.copy(copies)
            groups = _groups(chunks)
            if len(groups) == 1:
                return self._forward(chunks)
            logits = torch.cat([self._forward([chunks[index] for index in group]) for group in groups])
            return logits[np.argsort(np.concatenate(groups))]

    def _forward(self, chunks: Sequence[SequenceInput]) -> Tensor:
        """All chunks in one forward, or in one replay of it; by the fallback, in a forward each."""
        if self._own is not None:
            return _wide(self._own.run(chunks))
        work = self._planner.lists(chunks)
        logits = None if self._graphs is None else self._graphs.run(chunks, work)
        if logits is None:
            return _wide(self._compute(chunks, work))
        return _wide(logits, copy=True)  # the next replay overwrites it

    def _compute(self, chunks: Sequence[SequenceInput], work: WorkLists) -> Tensor:
        """Logits [len(chunks), vocab] of one forward, in the model's dtype."""
        batch = _Batch(chunks, self.loaded.device)
        lists = [work[layer.attention_window] for layer in self.loaded.layers]
        step = ForwardContext(self._backend, self.loaded.layers, batch.slots, lists)
        return self._logits(step, batch.tokens, batch.positions, batch.last_rows)

    def _logits(self, step: ForwardContext, tokens: Tensor, positions: Tensor, last_rows: Tensor) -> Tensor:
        """One forward of tokens [T] whose attention `step` answers: logits [len(last_rows), vocab]."""
        with handled_by(step):
            logits: Tensor = self._forward_of.logits(
                self._model, tokens, last_rows, positions=positions, use_cache=False
            )
        step.finish()
        return logits

    @property
    def row_dependent(self) -> bool:
        """Whether a row's bits depend on the other rows of its forward, also on those behind it."""
        return row_dependent(self.loaded)

    @property
    def recheck_obstacle(self) -> str | None:
        """Why cached KV cannot be computed again and compared; None if it can."""
        return obstacle(self.loaded, exact=self._deterministic)

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute the KV of the cached tokens [start, end) again, behind what is cached of [0, start), and compare.

        `tokens` [end] and `block_table` describe the whole path; start is a multiple of `recheck_tokens`, and at most
        so many lie behind it. Writes to the blocks beside the pool only. A deterministic runner computes a full chunk,
        as the cached KV was computed, and compares bits: what stands behind a row changes none of its bits. Where it
        does (`row_dependent`), the tokens must be such a full chunk. Costs one forward of these tokens.
        """
        assert start % self.recheck_tokens == 0 and 0 < len(tokens) - start <= self.recheck_tokens
        size, count = self.store.block_size, len(tokens) - start
        assert not self.row_dependent or count == self.recheck_tokens
        first, offset = divmod(start, size)
        copies = [(int(block_table[first]), self._beside)] if offset else []
        new = tokens[start:]
        if self._deterministic:
            new = np.concatenate([new, np.zeros(self.recheck_tokens - count, dtype=np.int32)])
        beside = np.arange(self._beside, self._beside - (-(offset + len(new)) // size), dtype=np.int32)
        slots = self._beside * size + offset + np.arange(len(new))
        self.run(
            [SequenceInput(new, start, slots, np.concatenate([block_table[:first], beside]), isolated=True)], copies
        )
        return compare(self.store, block_table[first:], beside, offset, count, exact=self._deterministic)


def _groups(chunks: Sequence[SequenceInput]) -> list[list[int]]:
    """Indices of the chunks that run in one forward: each that is alone, then all the others."""
    isolated = [[index] for index, chunk in enumerate(chunks) if chunk.isolated]
    others = [index for index, chunk in enumerate(chunks) if not chunk.isolated]
    return [*isolated, others] if others else isolated


class _Batch:
    """All chunks laid end to end: tokens, positions and slots [T], the row of each chunk's last token; in one copy."""

    def __init__(self, chunks: Sequence[SequenceInput], device: torch.device) -> None:
        lengths = [len(chunk.tokens) for chunk in chunks]
        positions = [np.arange(c.start, c.start + n, dtype=np.int64) for c, n in zip(chunks, lengths, strict=True)]
        columns = [np.concatenate([chunk.tokens for chunk in chunks]), np.concatenate(positions)]
        columns += [np.concatenate([chunk.slots for chunk in chunks]), np.cumsum(lengths) - 1]
        there = torch.from_numpy(np.concatenate(columns).astype(np.int64)).to(device)
        self.tokens, self.positions, self.slots, self.last_rows = there.split_with_sizes(
            [sum(lengths)] * 3 + [len(chunks)]
        )


def _wide(logits: Tensor, *, copy: bool = False) -> Tensor:
    """Logits as samplers get them: in float32 at least."""
    return logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32, copy=copy)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """While this is open, kernels are launched on `device`, whatever this thread uses otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
