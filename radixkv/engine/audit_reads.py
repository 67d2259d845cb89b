"""Read cached runs between two steps, for audits: host-resident tokens are loaded into other blocks for that time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.tokens import is_compressed
from radixkv.engine.core import Core
from radixkv.engine.request import TokenIds

if TYPE_CHECKING:
    from radixkv.cache.host import HostRun
    from radixkv.cache.types import CachedRun


class CachedRuns:
    """Finds and reads cached runs of all tiers."""

    def __init__(self, core: Core) -> None:
        """Read the cache of `core` until the core is closed."""
        self._core = core

    def random(self, rng: Random) -> CachedRun | HostRun | None:
        """Return a random run of cached tokens of any tier, or of text read from a disk.

        Returns None if nothing is cached, or for a compressed prefix, which its ids cannot compute.
        """
        run = self._random(rng)
        return None if run is None or is_compressed(run.tokens[:1].tobytes()) else run

    def count(self, *, compressed: bool) -> int:
        """Return the number of compressed prefixes in memory, or of exact texts, by their first tokens."""
        roots = self._core.cache.state.tree.roots.values()
        return sum(is_compressed(first) == compressed for root in roots for first in (*root.children, *root.below))

    def _random(self, rng: Random) -> CachedRun | HostRun | None:
        read = self._core.records.random_run(rng)
        if read is not None and self._fits(read.tokens, read.namespace):
            return read
        cache, stats = self._core.cache, self._core.cache.stats()
        on_host, on_device = stats.host_blocks - stats.host_free_blocks, stats.num_blocks - stats.free_blocks
        if on_host and rng.random() * (on_host + on_device) < on_host:
            run = None if cache.state.host is None else cache.state.host.random_run(rng)
            if run is not None and self._fits(run.tokens, run.namespace):
                return run
        return cache.random_run(rng)

    @contextmanager
    def blocks(self, tokens: TokenIds, namespace: Hashable) -> Iterator[NDArray[np.int32] | None]:
        """Yield the block table of a cached text, to be read only while this is open; None if some is not cached.

        If the load of its host-resident part raises, that part is dropped.
        """
        cache, host, match = self._core.cache, self._core.host, self._core.cache.match(tokens, namespace)
        if host is None or not match.host or match.length + match.host < len(tokens):
            yield match.blocks if match.length == len(tokens) else None
            return
        with closing(cache.open(tokens, namespace, purpose="audit")) as sequence:
            if host.load_between_steps(sequence, tokens[sequence.length :]):
                yield sequence.block_table
                return
        cache.discard(tokens, namespace, match.length)
        yield None

    def _fits(self, tokens: TokenIds, namespace: Hashable) -> bool:
        """Return whether the pool has room for the host-resident part of a text."""
        cache, match = self._core.cache, self._core.cache.match(tokens, namespace)
        need = -(-len(tokens) // cache.block_size) - match.length // cache.block_size + match.idle_blocks
        return need <= cache.available_blocks
