"""A sequence whose next tokens may be resident on the host: it can load them in place of a forward."""

from __future__ import annotations

from collections.abc import Set
from typing import cast

import numpy as np
import numpy.typing as npt

from radixkv.cache.events import TierObserver
from radixkv.cache.host.tier import HostNode
from radixkv.cache.host.tree import HostTree
from radixkv.cache.sequence import Sequence
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, refuse_negative
from radixkv.cache.types import Hint, Load
from radixkv.errors import InvalidInput


class HostSequence(Sequence):
    """A sequence that can load KV from the host. Made by HostPrefixCache.open and by fork.

    While a load is pending it is a LoadingSequence: a request that loads nothing has the cost of a plain sequence.
    """

    __slots__ = ("_reads",)

    _reads: dict[int, int]  # of a pending load: host block -> the end of the tokens that it reads there
    _hits = False  # whether the tokens that are published now were loaded by a request

    @property
    def _tree(self) -> HostTree:
        return cast(HostTree, self._state.tree)

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
        tier = self._tree.tier
        tier.hold(reads)  # before extend, whose evictions must not free these blocks
        try:
            plan = self.extend(tokens)
        except BaseException:
            tier.release(reads)
            raise
        self._reads = reads
        self.__class__ = LoadingSequence
        if path and self.purpose != "audit":
            self._tree.touch_host([node for node, _ in path])
        return Load(plan, sources)

    def reads_host(self, blocks: Set[int], start: int) -> bool:
        """Whether a pending load reads tokens from `start` on in one of these host blocks."""
        return False

    def host_reads(self) -> Set[int]:
        """The host blocks that a pending load reads."""
        return frozenset()

    def _path(self, raw: bytes) -> list[tuple[HostNode, int]]:
        """The host nodes that a load of `raw` would read, each with the number of tokens."""
        if self._planned is not None or self._tail:
            return []
        return self._tree.tier.follow(self.node, raw)

    def _publish(self) -> None:
        # Decodes publish each token: neither a cast nor super() is cheap here.
        if not self._state.tree.tier.below:  # type: ignore[attr-defined]
            Sequence._publish(self)
            return
        start = self.length - len(self._tail) // WIDTH
        Sequence._publish(self)
        self._tree.settle(self.node, start, hit=self._hits)


class LoadingSequence(HostSequence):
    """A sequence whose load is pending: its host blocks are released by `commit` or `close`."""

    __slots__ = ()

    @property
    def _hits(self) -> bool:  # type: ignore[override]
        return self.purpose == "request"

    def commit(self, publish: bool = True) -> None:
        """Commit as a plain Sequence does; `publish` also frees the host blocks of loaded tokens. O(new tokens)."""
        state, tree, count = self._state, self._tree, len(self._planned or b"") // WIDTH
        state.counters.committed_tokens -= count  # they were computed and committed before
        state.counters.hit_tokens += count * (self.purpose == "request")
        tree.tier.loaded_tokens += count
        if self.cached_length == self.length:
            self.cached_length += count
        tree.tier.release(self._reads)
        start = self.length
        super().commit(publish)
        self.__class__ = HostSequence  # type: ignore[assignment]  # both have the same slots
        if tree.changed is not None and publish and self.purpose == "request":
            tree.changed.reused(tree.path(self.node), start)
        if tree.observer is not None:
            cast(TierObserver, tree.observer).loaded(self.id, count)

    def close(self, hint: Hint | None = None) -> None:
        """Release all blocks and locks, and the host blocks of the pending load."""
        super().close(hint)
        self._tree.tier.release(self._reads)
        self.__class__ = HostSequence  # type: ignore[assignment]  # both have the same slots

    def reads_host(self, blocks: Set[int], start: int) -> bool:
        """Whether the load reads tokens from `start` on in one of these host blocks."""
        return any(end > start and block in blocks for block, end in self._reads.items())

    def host_reads(self) -> Set[int]:
        """The host blocks that the load reads."""
        return self._reads.keys()


def _sources(path: list[tuple[HostNode, int]], size: int) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
    """The host slots of the leading tokens of nodes; and their host blocks, each with the end of these tokens."""
    parts = [np.empty(0, np.int64)]
    reads: dict[int, int] = {}
    for node, count in path:
        first, end = node.start // size, node.start + count
        blocks = node.blocks[: -(-end // size) - first]
        slots = np.add.outer(np.frombuffer(blocks, np.int32).astype(np.int64) * size, np.arange(size)).ravel()
        parts.append(slots[node.start - first * size : end - first * size])
        reads.update((block, min(end, (first + at + 1) * size)) for at, block in enumerate(blocks))
    return np.concatenate(parts), reads
