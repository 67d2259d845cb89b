"""Define the interface of a server under load, and implement it for radixkv. The folder `peers` has the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.models.loaded import LoadedModel
from radixkv.models.runner import Runner

BLOCK = 16
FLOAT32_TIE = 1e-3
"""Logits (spread: 0.5 to 3) that the order of float32 additions may exchange; seen here: 3e-6 beside float64."""
WATCH_EVERY_S = 0.2


@dataclass(frozen=True)
class Counted:
    """Totals of a server: tokens found in its cache, tokens run through its model (padding included), preemptions.

    `kv_bytes` is the KV memory that it took, `held_bytes` the most of it that running requests held at once. None: it
    does not say.
    """

    hit_tokens: int
    computed_tokens: int
    preemptions: int | None
    kv_bytes: int
    held_bytes: int | None = None


class Server(Protocol):
    """An engine that is up; `stream` may be called from many threads at once."""

    name: str
    tie: float  # logits nearer than this may change places with another engine's, by rounding alone

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Greedy reply ids as they arrive, exactly `tokens` of them."""
        ...

    def counted(self) -> Counted: ...
    def close(self) -> None: ...


class RadixKV:
    """radixkv through its public engine, with or without its prefix cache."""

    tie = FLOAT32_TIE

    def __init__(self, loaded: LoadedModel, *, slots: int, kv_tokens: int, prefix_cache: bool = True) -> None:
        """An engine over a pool of `kv_tokens` that runs `slots` requests at once."""
        self.name = "radixkv" if prefix_cache else "radixkv, no cache"
        self._bytes_per_token = bytes_per_token(loaded.config)
        blocks = kv_tokens // BLOCK
        self._engine = Engine(
            loaded,
            Runner(loaded, blocks, BLOCK),
            PrefixCache(blocks, BLOCK),
            EngineConfig(max_sequences=slots, prefix_cache=prefix_cache, monitor=False),
            bytes_per_block=BLOCK * self._bytes_per_token,
        )
        self._held_blocks = 0
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Chunks of one request, as a user of `submit` gets them."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        handle = self._engine.submit(prompt, params)
        for chunk in handle:
            yield list(chunk.token_ids)

    def counted(self) -> Counted:
        """The engine's own counters."""
        stats = self._engine.stats()
        held = self._held_blocks * BLOCK * self._bytes_per_token
        computed = stats.computed_tokens + stats.recomputed_tokens
        return Counted(stats.cached_tokens, computed, stats.preemptions, stats.kv_bytes, held)

    def close(self) -> None:
        """Close the engine."""
        self._closing.set()
        self._watcher.join()
        self._engine.close()

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_EVERY_S):
            self._held_blocks = max(self._held_blocks, self._engine.stats().cache.held_blocks)


def bytes_per_token(config: Any) -> int:
    """Bytes of float32 KV that a Llama's token takes."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * dim * 4)
