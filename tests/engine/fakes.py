"""A model whose memory is the pool: a wrong slot, copy or block table gives wrong answers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain as chain_of
from typing import Any, Unpack, cast

import numpy as np
import torch

from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.cache.types import Load
from radixkv.chat import Engine
from radixkv.config import EngineConfig, EngineConfigFields
from radixkv.models.loaded import LayerSpec, LoadedModel, SequenceInput
from tests.plain_runner import PlainRunner

VOCAB = 50
STOP = 49


MIX, ADD = 6364136223846793005, 1442695040888963407


def chain(before: int, token: int) -> int:
    """Return a token's content, which depends on the whole history."""
    return ((before ^ token) * MIX + ADD) % 2**64


@functools.lru_cache(maxsize=10_000)
def logits_of(history: int, vocab: int = VOCAB) -> np.ndarray:
    logits = np.random.default_rng(history).standard_normal(vocab).astype(np.float32) * 2
    logits.flags.writeable = False
    return logits


def greedy_reply(prompt: Sequence[int], count: int, vocab: int = VOCAB) -> list[int]:
    """Return the answer that FakeRunner must give, computed from the history alone, without pool or blocks."""
    state, reply = 0, []
    for token in prompt:
        state = chain(state, int(token))
    for _ in range(count):
        reply.append(int(logits_of(state, vocab).argmax()))
        state = chain(state, reply[-1])
    return reply


@dataclass
class FakeModel:
    tokenizer: Any = None
    vocab_size: int = VOCAB
    max_length: int = 10_000
    stop_token_ids: frozenset[int] = frozenset({STOP})
    name: str = "fake"
    layers: tuple[LayerSpec, ...] = (LayerSpec(1, 1, 1, 1),)
    attention: str = "torch"
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model: Any = None
    kv_dtype: str = "auto"

    @property
    def codec(self) -> Any:
        return self.tokenizer

    def without_weights(self) -> FakeModel:
        return self


class FakeRunner(PlainRunner):
    """Stores (history, token) per slot and reads every history back through the block table.

    `brain(tokens)` overrides the next token; `fault()` is called in each step and may raise.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab: int = VOCAB,
        brain: Callable[[list[int]], int] | None = None,
        fault: Callable[[Sequence[SequenceInput]], None] | None = None,
    ) -> None:
        self.size, self.vocab, self.brain, self.fault = block_size, vocab, brain, fault
        self.state = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.tokens = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.steps: list[list[tuple[int, int]]] = []  # per step, (start, tokens) of each chunk
        self.gate: threading.Semaphore | None = None  # with one, each step waits for it
        self.began = threading.Semaphore(0)
        self.compression_obstacle = None

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.began.release()
        if self.gate is not None:
            self.gate.acquire()
        self.steps.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
        self.copy(copies)
        written: set[int] = set()
        for chunk in chunks:
            assert written.isdisjoint(chunk.slots.tolist()), "two chunks write one slot"
            written.update(chunk.slots.tolist())
            self._write(chunk)
        if self.fault is not None:
            self.fault(chunks)
        ends = [(chunk, len(chunk.tokens)) for chunk in chunks]
        for chunk in chunks:
            ends += [(chunk, end) for end in range(len(chunk.tokens) - chunk.logit_rows + 1, len(chunk.tokens))]
        return torch.from_numpy(np.stack([self._logits(chunk, end) for chunk, end in ends]))

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        pairs = list(copies)
        for content in (self.state, self.tokens):
            blocks = content.reshape(-1, self.size)
            sources = [blocks[source].copy() for source, _ in pairs]
            for (_, target), source in zip(pairs, sources, strict=True):
                blocks[target] = source

    @property
    def image_bytes(self) -> int:  # type: ignore[override]
        return 16 * self.size

    def read_images(self, blocks: Sequence[int], tokens: int) -> np.ndarray:
        slots = (np.array(blocks)[:, None] * self.size + np.arange(self.size)).ravel()
        slots[tokens:] = slots[0]
        images = np.stack([each[slots].view(np.int64) for each in (self.state, self.tokens)])
        images[:, tokens:] = 0
        return images.reshape(2, len(blocks), self.size).swapaxes(0, 1).reshape(len(blocks), -1).view(np.uint8)

    def load_images(self, load: Load, images: np.ndarray) -> None:
        self.copy(load.plan.copies)
        states, tokens = images.view(np.int64).reshape(-1, 2, self.size).swapaxes(0, 1).reshape(2, -1)
        self.state[load.plan.slots] = states[load.sources].view(np.uint64)
        self.tokens[load.plan.slots] = tokens[load.sources]

    def compression(self, tokens: np.ndarray, method: str) -> FakeCompressor:
        return FakeCompressor(self, tokens)

    def _slot(self, chunk: SequenceInput, position: int) -> int:
        return int(chunk.block_table[position // self.size]) * self.size + position % self.size

    def _write(self, chunk: SequenceInput) -> None:
        state = int(self.state[self._slot(chunk, chunk.start - 1)]) if chunk.start else 0
        for token, slot in zip(chunk.tokens.tolist(), chunk.slots.tolist(), strict=True):
            state = chain(state, token)
            self.state[slot], self.tokens[slot] = state, token

    def _logits(self, chunk: SequenceInput, end: int) -> np.ndarray:
        """Return the logits after the first `end` tokens of a chunk."""
        positions = np.arange(chunk.start + end)
        slots = chunk.block_table[positions // self.size] * self.size + positions % self.size
        states, tokens = self.state[slots], self.tokens[slots]
        before = np.concatenate([np.zeros(1, np.uint64), states[:-1]])
        expected = (before ^ tokens.astype(np.uint64)) * np.uint64(MIX) + np.uint64(ADD)
        assert (states == expected).all(), "a block table leads to the tokens of another sequence"
        if self.brain is None:
            return logits_of(int(states[-1]), self.vocab)
        logits = np.zeros(self.vocab, dtype=np.float32)
        logits[self.brain(tokens.tolist())] = 100
        return logits


class FakeCompressor:
    """Keeps the last tokens of a prefix, as if it had no others."""

    def __init__(self, runner: FakeRunner, tokens: np.ndarray) -> None:
        self.runner, self.text, self.pieces = runner, tokens, 3

    def step(self, block_table: np.ndarray) -> bool:
        places = np.arange(len(self.text))
        slots = block_table[places // self.runner.size] * self.runner.size + places % self.runner.size
        assert (self.runner.tokens[slots] == self.text).all(), "these are not the blocks of the exact prefix"
        self.pieces -= 1
        return self.pieces > 0

    def write(self, block_table: np.ndarray, slots: np.ndarray) -> None:
        assert not self.pieces and not set(slots // self.runner.size) & set(block_table.tolist())
        state = 0
        for token, slot in zip(self.text[len(self.text) - len(slots) :].tolist(), slots.tolist(), strict=True):
            state = chain(state, token)
            self.runner.state[slot], self.runner.tokens[slot] = state, token


class FakeHost:
    """Host memory of a FakeRunner. `fault(kind)` is called after each "offload" and "load", and may raise."""

    def __init__(self, runner: FakeRunner, num_blocks: int) -> None:
        self.runner = runner
        self.state = np.zeros((num_blocks, runner.size), dtype=np.uint64)
        self.tokens = np.full((num_blocks, runner.size), -2, dtype=np.int64)
        self.fault: Callable[[str], None] = lambda kind: None
        self.loads: list[list[int]] = []  # per step, the tokens of each load

    def _contents(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.state, self.runner.state), (self.tokens, self.runner.tokens)]

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        assert moves
        for images, pool in self._contents():
            for source, target in moves:
                images[target] = pool.reshape(-1, self.runner.size)[source]
        self.fault("offload")

    def load(self, loads: Sequence[Load]) -> None:
        assert loads
        self.runner.copy(chain_of.from_iterable(each.plan.copies for each in loads))
        for images, pool in self._contents():
            for each in loads:
                pool[each.plan.slots] = images.reshape(-1)[each.sources]
        self.loads.append([len(each.sources) for each in loads])
        self.fault("load")


def add_host(runner: FakeRunner, num_blocks: int, speed: float = 10.0) -> FakeHost:
    """Give a fake host memory, from which a token loads `speed` times as fast as it is computed."""
    host = FakeHost(runner, num_blocks)
    runner.host, runner.host_costs = host, lambda chunk: HostCosts(1.0, speed)  # type: ignore[method-assign]
    return host


class RowCopies:
    """Copies histories from slot to slot."""

    def __init__(self, rows: dict[int, int]) -> None:
        self._rows = rows

    def run(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            self._rows[target] = self._rows.get(source, 0) if source >= 0 else 0


class StatefulFakeRunner(FakeRunner):
    """A FakeRunner of a model with recurrent state: a row holds the history of its sequence."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: dict[int, int] = {}
        self.states = RowCopies(self.rows)
        self.taken: list[int] = []  # the positions of all snapshots inside chunks

    def _write(self, chunk: SequenceInput) -> None:
        super()._write(chunk)
        assert chunk.state is not None
        before = int(self.state[self._slot(chunk, chunk.start - 1)]) if chunk.start else 0
        assert self.rows[chunk.state.row.number] == before, "a row has the state of another history"
        for count, slot in chunk.state.snapshots:
            self.rows[slot] = int(self.state[chunk.slots[count - 1]])
            self.taken.append(chunk.start + count)
        self.rows[chunk.state.row.number] = int(self.state[chunk.slots[-1]])


def sized(sequences: int, batch_tokens: int, chunk: int, **settings: Unpack[EngineConfigFields]) -> EngineConfig:
    """Settings of a core. Its cache has the real block size: with one token here, chunks may end inside blocks."""
    return EngineConfig(
        max_sequences=sequences, max_batch_tokens=batch_tokens, prefill_chunk=chunk, block_size=1, **settings
    )


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    model: FakeModel | None = None,
    brain: Callable[[list[int]], int] | None = None,
    fault: Callable[[Sequence[SequenceInput]], None] | None = None,
    runner_class: type[FakeRunner] = FakeRunner,
    snapshots: int | None = None,
    host_blocks: int | None = None,
    **settings: Unpack[EngineConfigFields],
) -> tuple[Engine, FakeRunner]:
    """With `snapshots` the model has recurrent state; with `host_blocks` the engine has a host tier."""
    model = model or FakeModel()
    config = EngineConfig(**{"monitor": False, **settings})
    options = {} if host_blocks is None else {"host_blocks": host_blocks}
    if snapshots is not None:
        options |= {"state_rows": config.max_sequences, "state_snapshots": snapshots}
        runner_class = StatefulFakeRunner
    runner = runner_class(num_blocks, block_size, model.vocab_size, brain, fault)
    if host_blocks is not None:
        add_host(runner, host_blocks)
    cache = PrefixCache(num_blocks, block_size, **options)
    return Engine(cast(LoadedModel, model), runner, cache, config), runner


def check(engine: Engine) -> None:
    """Check every invariant of the cache, and that no block is held while no request runs."""
    engine.client.thread.ask(engine.core.cache.check)
    stats = engine.stats()
    if not stats.running and not stats.waiting:
        assert stats.cache.sequences == 0
        assert stats.cache.pinned_blocks or not stats.cache.held_blocks
