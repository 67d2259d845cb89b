"""A sequence whose next tokens may be resident on the host: it can load them in place of a forward."""

from __future__ import annotations

from array import array
from collections.abc import Set
from typing import cast

import numpy as np
import numpy.typing as npt

from radixkv.cache.events import TierObserver
from radixkv.cache.host.tier import HostNode
from radixkv.cache.host.tree import HostTree
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, refuse_negative
from radixkv.cache.types import Hint, Load, Node
from radixkv.errors import InvalidInput


class HostSequence(Sequence):
    """A sequence that can load KV from the host. Made by HostPrefixCache.open and by fork."""

    __slots__ = ("_hit", "_loading", "_tier", "_tree")

    def __init__(self, state: CacheState, node: Node, length: int, table: array[int]) -> None:
        super().__init__(state, node, length, table)
        self._tree = cast(HostTree, state.tree)
        self._tier = self._tree.tier
        self._loading: dict[int, int] | None = None  # host block -> the end of the tokens that the load reads there

        self._hit = False  # whether a request's commit of loaded tokens is under way

    def loadable(self, tokens: Tokens) -> int:
        """Count the leading `tokens`, which would follow the committed ones, whose KV could be loaded from the host.

        0 while a plan is pending or tokens are unpublished. O(tokens compared) by memcmp + O(nodes).
        """
        self._refuse_closed()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        return sum(count for _, count in self._path(raw))

    def load(self, tokens: Tokens) -> Load:
        """Plan to copy the KV of exactly these tokens from the host; run it after the step's copies, then `commit`.

        The host keeps the KV unchanged until `commit` or `close`. Raises InvalidInput if not all of the tokens are
        loadable, and OutOfBlocks, PlanPending and SequenceClosed as `extend` does. All leave everything as it was.
        O(tokens).
        """
        self._refuse_pending()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        path = self._path(raw)
        asked, found = len(raw) // WIDTH, sum(count for _, count in path)
        if found < asked:
            raise InvalidInput(f"load of {asked} tokens: {found} of them are resident on the host, see loadable()")
        sources, reads = _sources(path, self._state.pool.block_size)
        tier = self._tier
        tier.hold(reads)  # before extend, whose evictions must not free these blocks
        try:
            plan = self.extend(tokens)
        except BaseException:
            tier.release(reads)
            raise
        self._loading = reads
        if path and self.purpose != "audit":
            self._tree.touch_host([node for node, _ in path])
        return Load(plan, sources)

    def commit(self, publish: bool = True) -> None:
        """Commit as PrefixCache does; with `publish`, the host blocks of loaded tokens are freed. O(new tokens)."""
        reads = self._loading
        if reads is None:
            super().commit(publish)
            return
        self._loading = None
        state, tier, count = self._state, self._tier, len(self._planned or b"") // WIDTH
        state.counters.committed_tokens -= count  # they were computed and committed before
        state.counters.hit_tokens += count * (self.purpose == "request")
        tier.loaded_tokens += count
        if self.cached_length == self.length:
            self.cached_length += count
        tier.release(reads)
        self._hit = self.purpose == "request"
        super().commit(publish)
        self._hit = False
        if state.tree.observer is not None:
            cast(TierObserver, state.tree.observer).loaded(self.id, count)

    def close(self, hint: Hint | None = None) -> None:
        """Release all blocks and locks, and the host blocks of a pending load."""
        super().close(hint)
        if self._loading is not None:
            self._tier.release(self._loading)
            self._loading = None

    def reads_host(self, blocks: Set[int], start: int) -> bool:
        """Whether a pending load reads tokens from `start` on in one of these host blocks."""
        return any(end > start and block in blocks for block, end in (self._loading or {}).items())

    def host_reads(self) -> Set[int]:
        """The host blocks that a pending load reads."""
        return (self._loading or {}).keys()

    def _path(self, raw: bytes) -> list[tuple[HostNode, int]]:
        """The host nodes that a load of `raw` would read, each with the number of tokens."""
        if self._planned is not None or self._tail:
            return []
        return self._tier.follow(self.node, raw)

    def _publish(self) -> None:
        if not self._tier.below:
            super()._publish()
            return
        start = self.length - len(self._tail) // WIDTH
        super()._publish()
        self._tree.settle(self.node, start, hit=self._hit)


def _sources(path: list[tuple[HostNode, int]], size: int) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
    """The host slots of the leading tokens of nodes, and the blocks that have them with the end of these tokens."""
    parts = [np.empty(0, np.int64)]
    reads: dict[int, int] = {}
    for node, count in path:
        first, end = node.start // size, node.start + count
        blocks = node.blocks[: -(-end // size) - first]
        slots = np.add.outer(np.frombuffer(blocks, np.int32).astype(np.int64) * size, np.arange(size)).ravel()
        parts.append(slots[node.start - first * size : end - first * size])
        reads.update((block, min(end, (first + at + 1) * size)) for at, block in enumerate(blocks))
    return np.concatenate(parts), reads
