"""The demo with a host tier: blocks that leave the pool are offloaded, and loaded when a prompt needs them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv_monitor.demo import TOKENS_PER_SECOND, DemoRequest, DemoSource

LOADED_PER_SECOND = 20 * TOKENS_PER_SECOND
"""Tokens that are loaded per second of a step."""
LEAST_BLOCKS = 2
"""A shorter run is computed, as in an engine."""


class HostDemoSource(DemoSource):
    """A simulated engine with `host_blocks` blocks in host memory."""

    def __init__(self, seed: int = 7, *, host_blocks: int, **options: Any) -> None:
        self._host_blocks = host_blocks
        self._loads: dict[DemoRequest, int] = {}  # tokens to load in this step
        super().__init__(seed, **options)
        self.facts = replace(self.facts, host_blocks=host_blocks)
        self._counts["host_tokens"] = 0

    def _new_cache(self) -> PrefixCache:
        size, blocks = self.facts.block_size, self.facts.num_blocks
        return PrefixCache(blocks, size, clock=lambda: self._now, host_blocks=self._host_blocks)

    def _stats(self) -> dict[str, float]:
        costs = {"load_seconds_per_token": 1 / LOADED_PER_SECOND, "prefill_seconds_per_token": 1 / TOKENS_PER_SECOND}
        return super()._stats() | costs

    # ---- the simulated step

    def _computing(self) -> Iterable[DemoRequest]:
        return [request for request in self._running if request not in self._loads]

    def _schedule(self) -> None:
        """Start a step: loads, in addition to the tokens to compute."""
        found = ((request, self._loadable(request)) for request in self._running if request.prefills)
        least = LEAST_BLOCKS * self.facts.block_size
        self._loads = {request: tokens for request, tokens in found if tokens >= least}
        super()._schedule()
        self._batch = [*self._loads.items(), *self._batch]
        seconds = sum(self._loads.values()) / LOADED_PER_SECOND
        self._takes, self._ends = self._takes + seconds, self._ends + seconds

    def _loadable(self, request: DemoRequest) -> int:
        """Count the tokens of the prompt, except its last, that could be loaded now."""
        return request.sequences[0].loadable(request.prompt[request.computed : -1])

    def _run(self, batch: list[tuple[DemoRequest, int]]) -> None:
        """End a step: offload the blocks that left the pool since the last one, then load and commit."""
        self._cache.moves()
        self._cache.moves_done()
        super()._run(batch)
        self._loads = {}

    def _prefill(self, request: DemoRequest, tokens: int) -> None:
        if request in self._loads:
            self._load(request, tokens)
        else:
            super()._prefill(request, tokens)

    def _load(self, request: DemoRequest, count: int) -> None:
        """Load tokens of a prompt, unless they were evicted from the host since they were scheduled."""
        sequence = request.sequences[0]
        tokens = request.prompt[request.computed : request.computed + count]
        while self._loadable(request) >= count:
            try:
                sequence.load(tokens)
            except OutOfBlocks:
                if self._preempt_newest() is request:
                    return
            else:
                sequence.commit()
                self._count_loaded(request, count)
                return

    def _count_loaded(self, request: DemoRequest, count: int) -> None:
        request.computed += count
        gained = max(0, request.computed - request.reached)
        request.reached += gained
        self._counts["step_tokens"] += count
        self._counts["host_tokens"] += count
        self._counts["cached_tokens"] += gained
        if gained:  # a preempted request also loads tokens that it had computed
            cached, host = request.record.cached_tokens + gained, request.record.host_tokens + gained
            self._publish(request, cached_tokens=cached, host_tokens=host)
            self._count_session(request, cached_tokens=gained)
