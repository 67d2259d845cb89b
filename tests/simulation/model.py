"""A model that only remembers: each slot holds a digest of the history up to it.

Every rule of a step is checked while it runs. Copies come first and in any order, each slot has one writer, and free
blocks are not touched. The slots that a block table reads must form one unbroken history. Newly allocated blocks hold
poison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import PrefixCache
from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import SequenceInput
from radixkv.models.step_batch import logit_places
from radixkv.sampling.row_scores import PendingScores, begin_scores
from radixkv.sizing.recurrent_state import StateRow, StateStep
from tests.plain_runner import PlainRunner

VOCAB, MOST_DROPPED = 16, 64
_MIX, _ADD, _POISON = 6364136223846793005, 1442695040888963407, 0xDEAD_BEEF_DEAD_BEEF
_COLUMNS = np.arange(VOCAB, dtype=np.uint64)
_SALTS = (_COLUMNS + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)

Digests = npt.NDArray[np.uint64]
Item = TypeVar("Item")


def follow(digest: int, token: int) -> int:
    """Return the digest of a history that is one token longer."""
    return ((digest ^ (token + 1)) * _MIX + _ADD) % 2**64


def dropped(first: int) -> int:
    """Return the number of tokens without KV before a text with this first id."""
    return (first - FIRST_PSEUDO) % MOST_DROPPED if first >= FIRST_PSEUDO else 0


def digest_of(tokens: Sequence[int]) -> int:
    """Return the digest of a whole history."""
    digest = 0
    for token in tokens:
        digest = follow(digest, int(token))
    return digest


def logits_of(digests: Digests) -> npt.NDArray[np.float32]:
    """Return logits [n, VOCAB] of histories [n]: distinct in each row, exact in float32, within 0..8."""
    mixed = (digests[:, None] ^ _SALTS) * np.uint64(_MIX)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MIX)
    ranks = (mixed >> np.uint64(44)) * np.uint64(VOCAB) + _COLUMNS  # 20 random bits, then the column: 24 bits
    return ranks.astype(np.float32) * np.float32(2.0**-21)


@lru_cache(maxsize=1 << 12)  # 1 MB: a soak measures memory
def greedy_token(digest: int) -> int:
    """Return the greedy token after a history."""
    return int(logits_of(np.array([digest], np.uint64)).argmax())


def uploaded(chunk: SequenceInput) -> SequenceInput:
    """Return a chunk as the device gets it at the launch: later changes of its tokens and its row have no effect."""
    state = chunk.state
    if state is not None:
        state = StateStep(StateRow(state.row.number), tuple(state.snapshots))
    return chunk._replace(tokens=chunk.tokens.copy(), state=state)


class SlotModel(PlainRunner):
    """Stands in for a model's runner; `fault(chunks, part)` is called at part 0, 1, 2 of 2 of a run and may raise."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        self.size, self._pool = cache.block_size, cache.state.pool
        self.digests = np.zeros((cache.num_blocks, self.size), np.uint64)
        self.tokens = np.zeros((cache.num_blocks, self.size), np.int64)
        # The chunk that computed each slot: its start, its length, and whether it had a forward of its own.
        self.origins = np.zeros((cache.num_blocks, self.size, 3), np.int64)
        self.runs = 0
        self.recheck_tokens = 2 * self.size
        self.broken: AssertionError | None = None  # the first rule that a step broke
        self.fault: Callable[[Sequence[SequenceInput], int], None] = lambda chunks, part: None
        self.garbles: Callable[[], bool] = lambda: False  # whether a run returns too little
        self.gives_nan: Callable[[SequenceInput], bool] = lambda chunk: False  # whether a chunk's logits are NaN
        self.compressed: list[SlotCompressor] = []
        self._rng = random.Random(seed)
        self._poison_allocated_blocks()

    # ---- a step

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Any = None) -> Any:
        self.runs += 1
        with self.watched():
            return self._run(chunks, copies)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note a broken rule: the engine treats it as a fault of the model, and goes on."""
        try:
            yield
        except AssertionError as error:
            self.broken = error
            raise

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return items whose order must not matter in another one."""
        return self._rng.sample(items, len(items))

    def _run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> torch.Tensor:
        self._check_plan(chunks, copies)
        self.fault(chunks, 0)
        self._copy(list(copies))
        for chunk in self.shuffled(chunks):
            self._write(chunk)
            self.fault(chunks, 1)
        logits = self.logits_after(chunks)
        self.fault(chunks, 2)
        logits[self.nan_rows(chunks)] = np.nan
        return torch.from_numpy(logits[:-1] if self.garbles() else logits)

    def logits_after(self, chunks: Sequence[SequenceInput]) -> npt.NDArray[np.float32]:
        """Return the logits of the last token of each chunk, then the additional rows, by chunk and position."""
        digests = [self._read(chunk) for chunk in chunks]
        for chunk in chunks:
            assert 1 <= chunk.logit_rows <= len(chunk.tokens), "more rows of logits than tokens"
            slots = self._slots(chunk, chunk.start)[-chunk.logit_rows : -1]
            digests += self.digests.reshape(-1)[slots].tolist()
        return logits_of(np.array(digests, np.uint64))

    def nan_rows(self, chunks: Sequence[SequenceInput]) -> list[int]:
        """Return the rows of the logits of chunks whose logits are NaN."""
        places = logit_places([chunk.logit_rows for chunk in chunks])
        return [
            row for rows, chunk in zip(places, chunks, strict=True) if self.gives_nan(chunk) for row in rows.tolist()
        ]

    def _check_plan(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> None:
        assert chunks, "a step without chunks"
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert len(set(targets)) == len(targets) and sources.isdisjoint(targets), f"copies {copies} depend on an order"
        free, written = set(self._pool.free), set[int]()
        assert free.isdisjoint(sources) and free.isdisjoint(targets), f"copies {copies} touch free blocks"
        for chunk in chunks:
            table, n = chunk.block_table, len(chunk.tokens)
            assert len(table) * self.size >= chunk.start + n > chunk.start, "a block table too short, or no tokens"
            assert free.isdisjoint(table.tolist()), "a block table names free blocks"
            assert chunk.slots.tolist() == self._slots(chunk, chunk.start), "slots that are not those of the table"
            assert (chunk.tokens < FIRST_PSEUDO).all(), "an id of a compressed prefix is computed"
            assert written.isdisjoint(chunk.slots.tolist()), "two chunks write one slot"
            written.update(chunk.slots.tolist())

    def _slots(self, chunk: SequenceInput, start: int) -> list[int]:
        positions = np.arange(start, chunk.start + len(chunk.tokens))
        slots: list[int] = (chunk.block_table[positions // self.size] * self.size + positions % self.size).tolist()
        return slots

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in self.shuffled(copies):
            for content in (self.digests, self.tokens, self.origins):
                content[target] = content[source]

    def _write(self, chunk: SequenceInput) -> None:
        digests, tokens = self.digests.reshape(-1), self.tokens.reshape(-1)
        digest = int(digests[self._slots(chunk, chunk.start - 1)[0]]) if chunk.start else 0
        offset = dropped(int(self.tokens[chunk.block_table[0], 0])) if chunk.start else 0
        assert chunk.offset == offset, "a wrong position"
        for token, slot in zip(chunk.tokens.tolist(), chunk.slots.tolist(), strict=True):
            digest = follow(digest, token)
            digests[slot], tokens[slot] = digest, token
        self.origins.reshape(-1, 3)[chunk.slots] = (chunk.start, len(chunk.tokens), chunk.isolated)

    def _read(self, chunk: SequenceInput) -> int:
        length = chunk.start + len(chunk.tokens)
        assert self.holds(chunk.block_table, length), f"a block table of {length} tokens leads to another history"
        return int(self.digests.reshape(-1)[self._slots(chunk, length - 1)[0]])

    def launch(self, call: Callable[[], None]) -> None:
        """Run `call` after all that was launched before: at once."""
        call()

    def begin_scores(self, *arguments: Any) -> PendingScores:
        """Start to score rows of logits of `run`: see `radixkv.sampling.row_scores.begin_scores`."""
        return begin_scores(*arguments)

    # ---- an audit

    def recheck(self, tokens: npt.NDArray[np.int32], start: int, block_table: npt.NDArray[np.int32]) -> Recheck:
        """Compute [start, len(tokens)) again, and compare, like `Runner.recheck`."""
        end, size = len(tokens), self.size
        assert tokens[0] < FIRST_PSEUDO, "an audit of a compressed prefix"
        assert start % self.recheck_tokens == 0 < end - start <= self.recheck_tokens, f"a piece [{start}, {end})"
        assert len(block_table) == -(-end // size) and set(self._pool.free).isdisjoint(block_table.tolist())
        held = self.digests[block_table].reshape(-1)
        digest, wrong = int(held[start - 1]) if start else 0, []
        for position in range(start, end):
            digest = follow(digest, int(tokens[position]))
            wrong += [position - start] if digest != held[position] else []
        return Recheck(tuple(wrong), 0, "key", float(bool(wrong)))

    # ---- compressed prefixes

    compression_obstacle: str | None = None

    def compression(self, tokens: npt.NDArray[np.int32], method: str) -> SlotCompressor:
        """Begin to compress a prefix to the ids that the method names."""
        self.compressed.append(SlotCompressor(self, tokens, np.array(method.split(), np.int32)))
        return self.compressed[-1]

    def poison_taken(self) -> None:
        """Poison the blocks that were taken: that is done."""

    # ---- contents of the pool

    def flush(self) -> None:
        """Do what was launched and is not done yet: nothing, as a forward is done when it returns."""

    def holds(self, table: npt.NDArray[np.int32], length: int) -> bool:
        """Return whether the first `length` slots along a block table are one whole history."""
        digests, tokens = self.digests[table].reshape(-1)[:length], self.tokens[table].reshape(-1)[:length]
        before = np.concatenate([np.zeros(1, np.uint64), digests[:-1]])
        expected = (before ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(_MIX) + np.uint64(_ADD)
        return bool((digests == expected[:length]).all())

    def tokens_along(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        """Return the tokens in the first `length` slots along a block table."""
        return self.tokens[table].reshape(-1)[:length]

    def came_from(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        """Return the chunks that computed the first `length` slots along a block table: [length, 3]."""
        return self.origins[table].reshape(-1, 3)[:length]

    def poison(self, blocks: Any) -> None:
        """Overwrite blocks that were taken for new tokens."""
        self.digests[blocks], self.tokens[blocks], self.origins[blocks] = _POISON, -2, -2

    def _poison_allocated_blocks(self) -> None:
        poison = self.poison

        class Poisoned(type(self._pool)):  # type: ignore[misc]  # a pool with limits or without
            __slots__ = ()

            def take(self, *args: Any):  # type: ignore[no-untyped-def]
                taken = super().take(*args)
                poison(taken)
                return taken

        self._pool.__class__ = Poisoned


class SlotCompressor:
    """Compresses one prefix: its slots get the history of its ids, so that answers are known."""

    def __init__(self, model: SlotModel, tokens: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> None:
        self._model, self.tokens, self._ids = model, tokens, ids
        self.pieces = self.written = 0

    def step(self, block_table: npt.NDArray[np.int32]) -> bool:
        self.pieces += 1
        self._model.launch(partial(self._check, block_table.copy()))
        return self.pieces < len(self.tokens) // 16

    def _check(self, table: npt.NDArray[np.int32]) -> None:
        assert self._model.holds(table, len(self.tokens)), "a compression reads a broken history"
        assert (self._model.tokens_along(table, len(self.tokens)) == self.tokens).all(), "another text is compressed"

    def write(self, block_table: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]) -> None:
        model, blocks = self._model, slots // self._model.size
        with model.watched():
            assert {*model._pool.free, *block_table.tolist()}.isdisjoint(blocks.tolist()), "blocks in use are written"
        self.step(block_table)
        self.written = len(slots)
        model.poison_taken()
        model.launch(partial(model._write, SequenceInput(self._ids, 0, slots.copy(), blocks)))
