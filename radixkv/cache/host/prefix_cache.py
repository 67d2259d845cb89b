"""The facade of a prefix cache with a second tier in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import cast

from radixkv.cache.events import Observer
from radixkv.cache.host.sequence import HostSequence
from radixkv.cache.prefix_cache import PrefixCache, check_positive
from radixkv.cache.tokens import Tokens
from radixkv.cache.types import CacheStats, Purpose


class HostPrefixCache(PrefixCache):
    """A prefix cache over `num_blocks` blocks of the device, and `host_blocks` blocks of the same size on the host."""

    sequence_class = HostSequence

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        eviction: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        *,
        host_blocks: int,
        pin_budget: float = 0.5,
    ) -> None:
        check_positive("host_blocks", host_blocks)
        super().__init__(num_blocks, block_size, eviction, clock, observer, pin_budget=pin_budget)
        self.host_blocks = int(host_blocks)

    def stats(self) -> CacheStats:
        """Counters and gauges now, with those of the host."""
        return replace(super().stats(), host_blocks=self.host_blocks, host_free_blocks=self.host_blocks)

    def open(
        self,
        tokens: Tokens,
        namespace: Hashable = None,
        limit: int | None = None,
        priority: int = 0,
        *,
        purpose: Purpose = "request",
    ) -> HostSequence:
        """Return a sequence that holds the longest prefix that is resident on the device; see PrefixCache.open.

        `loadable` and `load` of the sequence reach the tokens after it that are resident on the host.
        """
        return cast(HostSequence, super().open(tokens, namespace, limit, priority, purpose=purpose))
