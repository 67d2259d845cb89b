"""Measure the gaps between the tokens of decoding streams while a long prompt arrives.

Runs radixkv only: its engine put together from parts, and its runner alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from radixkv import Engine, Handle, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner

from .servers import BLOCK

STREAMS, SHORT, LONG = 8, 64, 4000
BEFORE, BEHIND = 16, 8  # tokens that each stream has when the prompt arrives, and gets after its first token
WHOLE = 1 << 13  # a chunk that no prompt here fills
CHUNKS = (WHOLE, 512, 128)


@dataclass(frozen=True)
class Gaps:
    """Gaps between tokens of the streams from the long prompt's arrival to its first token; all in ms."""

    chunk: int
    gaps: tuple[float, ...]
    quiet: float
    ttft: float


def measure(loaded: LoadedModel, chunk: int) -> Gaps:
    """One arrival, with chunks of `chunk`."""
    steps = BEFORE + -(-LONG // chunk) + BEHIND + 8
    blocks = -(-LONG // BLOCK) + STREAMS * -(-(SHORT + steps) // BLOCK) + 4 * STREAMS
    config = EngineConfig(
        max_sequences=STREAMS + 1, max_batch_tokens=chunk + STREAMS, prefill_chunk=chunk, monitor=False
    )
    with Engine(loaded, Runner(loaded, blocks, BLOCK), PrefixCache(blocks, BLOCK), config) as engine:
        draw = np.random.default_rng(1)
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        prompts = draw.integers(3, loaded.vocab_size, (STREAMS, SHORT)).astype(np.int32)
        streams = [_Reader(engine.submit(prompt, params)) for prompt in prompts]
        for stream in streams:
            stream.ready.wait()
        sent = time.perf_counter()
        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        engine.submit(draw.integers(3, loaded.vocab_size, LONG).astype(np.int32), one).result()
        answered = time.perf_counter()
        for stream in streams:
            stream.thread.join()
    during = [gap for stream in streams for gap in stream.gaps(sent, answered)]
    quiet = [gap for stream in streams for gap in stream.gaps(0, sent)]
    return Gaps(chunk, tuple(during), statistics.median(quiet), (answered - sent) * 1e3)


class _Reader:
    """Reads a stream on a thread of its own and notes when each token came."""

    def __init__(self, handle: Handle) -> None:
        self.ready = threading.Event()
        self._handle = handle
        self._times: list[float] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for _ in self._handle:
            self._times.append(time.perf_counter())
            if len(self._times) == BEFORE:
                self.ready.set()
        self.ready.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Gaps in ms that touch [begin, end]."""
        times = np.array(self._times)
        touching = (times[1:] > begin) & (times[:-1] < end)
        return (np.diff(times)[touching] * 1e3).tolist()


def budgeted_step(loaded: LoadedModel, chunk: int, times: int = 5) -> float:
    """Milliseconds of a forward of 8 decodes and the long prompt's last chunk: the dearest step there is."""
    long_blocks, each = -(-LONG // BLOCK), -(-(SHORT + BEFORE) // BLOCK)
    runner = Runner(loaded, long_blocks + STREAMS * each, BLOCK)
    chunks = []
    for stream in range(STREAMS):
        table = np.arange(long_blocks + stream * each, long_blocks + (stream + 1) * each, dtype=np.int32)
        chunks.append(_chunk(table, SHORT + BEFORE - 1, 1))
    chunks.append(_chunk(np.arange(long_blocks, dtype=np.int32), max(0, LONG - chunk), min(chunk, LONG)))
    spent = []
    for _ in range(times + 1):
        start = time.perf_counter()
        runner.run(chunks)
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent[1:])


def _chunk(table: np.ndarray, start: int, count: int) -> SequenceInput:
    places = np.arange(start, start + count)
    tokens = (places % 97 + 3).astype(np.int32)
    return SequenceInput(tokens, start, table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK, table)
