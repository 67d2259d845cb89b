"""Run a batch of chunks through a model over the paged pool: tokens, slots and block tables in, logits out.

Knows tensors and block tables. Does not know requests, sampling or who owns a block: the plan of a step comes from
the cache through the engine, and is executed here to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import worklist
from radixkv.attention.kv_store import KVStore
from radixkv.models.backends import Backend, backend_of
from radixkv.models.hook import AttentionCall, handled_by
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv.models.recheck import Recheck, compare, obstacle
from radixkv_kernels.work_list import WorkList


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + n) of one sequence, which this step computes and stores; a decode is a chunk of one.

    `slots` says where the n tokens' KV goes, `block_table` covers everything from token 0 to the chunk's end. A chunk
    that is `alone` gets a forward of its own: a matrix product of other height may round its rows differently.
    """

    tokens: NDArray[np.int32]
    start: int
    slots: NDArray[np.int64]
    block_table: NDArray[np.int32]
    alone: bool = False


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
        self._backend = backend_of(loaded, self.store, deterministic=deterministic)
        self._deterministic = deterministic
        self._worth = worklist.NEVER if deterministic else worklist.WORTH
        self._windows = tuple({layer.window: None for layer in loaded.layers})
        self._previous: WorkList | None = None

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Execute one step, copies first, then all chunks in one forward; return float logits [len(chunks), vocab].

        Row i belongs to the last token of chunk i. Chunks may be of any mix of lengths, may share blocks that earlier
        steps have written, and write to slots of their own. Beside the pool this takes the activations of T = all
        tokens of the step (some T * hidden * 10 numbers, widest in the MLP) and len(chunks) * vocab logits: never
        T * vocab, and never T * T scores. A chunk that is `alone` takes one forward more.
        """
        self._backend.copy(copies)
        groups = _groups(chunks)
        if len(groups) == 1:
            return self._forward(chunks)
        logits = torch.cat([self._forward([chunks[index] for index in group]) for group in groups])
        return logits[np.argsort(np.concatenate(groups))]

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """All chunks in one forward."""
        batch = _Batch(chunks, self.loaded.device)
        step = _Step(self._backend, self.loaded.layers, batch.slots, self._plan(chunks))
        with handled_by(step):
            output = self.loaded.model(
                input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, logits_to_keep=batch.last_rows
            )
        step.finish()
        logits: Tensor = output.logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def recheck_obstacle(self) -> str | None:
        """Why cached KV cannot be computed again and compared; None if it can."""
        return obstacle(self.loaded, exact=self._deterministic)

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute the KV of the cached tokens [start, end) again, behind what is cached of [0, start), and compare.

        `tokens` [end] and `block_table` describe the whole path; start is a multiple of `recheck_tokens`, and at most
        so many lie behind it. Writes to the blocks beside the pool only. A deterministic runner computes a full chunk,
        as the cached KV was computed, and compares bits: what stands behind a row changes none of its bits. Costs one
        forward of these tokens.
        """
        assert start % self.recheck_tokens == 0 and 0 < len(tokens) - start <= self.recheck_tokens
        size, count = self.store.block_size, len(tokens) - start
        first, offset = divmod(start, size)
        copies = [(int(block_table[first]), self._beside)] if offset else []
        new = tokens[start:]
        if self._deterministic:
            new = np.concatenate([new, np.zeros(self.recheck_tokens - count, dtype=np.int32)])
        beside = np.arange(self._beside, self._beside - (-(offset + len(new)) // size), dtype=np.int32)
        slots = self._beside * size + offset + np.arange(len(new))
        self.run([Chunk(new, start, slots, np.concatenate([block_table[:first], beside]), alone=True)], copies)
        return compare(self.store, block_table[first:], beside, offset, count, exact=self._deterministic)

    def _plan(self, chunks: Sequence[Chunk]) -> dict[int | None, WorkList]:
        """Work out, for each distinct window, which query reads which block; once per step, for all layers.

        The tree among the tables is the same for all windows, and mostly that of the step before: each list is built
        from the one before it.
        """
        tables = [chunk.block_table for chunk in chunks]
        query_lengths = [len(chunk.tokens) for chunk in chunks]
        kv_lengths = [chunk.start + n for chunk, n in zip(chunks, query_lengths, strict=True)]
        work = {}
        for window in self._windows:
            self._previous = work[window] = worklist.build(
                tables,
                kv_lengths,
                query_lengths,
                window,
                self._previous,
                block_size=self.store.block_size,
                worth=self._worth,
            )
        return work


def _groups(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Indices of the chunks that run in one forward: each that is alone, then all the others."""
    alone = [[index] for index, chunk in enumerate(chunks) if chunk.alone]
    others = [index for index, chunk in enumerate(chunks) if not chunk.alone]
    return [*alone, others] if others else alone


class _Batch:
    """All chunks laid end to end: tokens and positions [1, T], slots [T], the row of each chunk's last token."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        lengths = [len(chunk.tokens) for chunk in chunks]
        positions = [np.arange(c.start, c.start + n, dtype=np.int64) for c, n in zip(chunks, lengths, strict=True)]
        tokens = np.concatenate([chunk.tokens for chunk in chunks]).astype(np.int64)
        self.tokens = torch.from_numpy(tokens).to(device)[None]
        self.positions = torch.from_numpy(np.concatenate(positions)).to(device)[None]
        self.slots = torch.from_numpy(np.concatenate([chunk.slots for chunk in chunks])).to(device)
        self.last_rows = torch.from_numpy(np.cumsum(lengths) - 1).to(device)


class _Step:
    """Answers the attention calls of one forward: the n-th call is layer n, whatever the module says about itself."""

    def __init__(
        self, backend: Backend, layers: Sequence[LayerSpec], slots: Tensor, work: dict[int | None, WorkList]
    ) -> None:
        self._backend, self._layers, self._slots, self._work = backend, layers, slots, work
        self._next = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the layer's new keys and values, then attend along the work list of its window."""
        layer, self._next = self._next, self._next + 1
        spec = self._layers[layer]
        self._backend.write(layer, self._slots, call.key[0], call.value[0])
        work = self._work[spec.window]
        return self._backend.attend(
            layer, call.query[0], work, scale=call.scale, softcap=spec.softcap, sinks=call.sinks
        )

    def finish(self) -> None:
        """The forward called each layer once, as in the probe."""
        assert self._next == len(self._layers), f"{self._next} attention calls, {len(self._layers)} in the probe"
