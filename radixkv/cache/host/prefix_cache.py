"""The facade of a prefix cache with a second tier in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from random import Random
from typing import cast

import numpy as np

from radixkv.cache.events import Observer
from radixkv.cache.host import invariants
from radixkv.cache.host.sequence import HostSequence
from radixkv.cache.host.tier import HostNode, HostTier
from radixkv.cache.host.tree import HostRun, HostTree
from radixkv.cache.namespaces import Namespace
from radixkv.cache.prefix_cache import Limits, PrefixCache, check_positive
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes
from radixkv.cache.types import Explanation, GhostOwner, Match, Node, Purpose
from radixkv.errors import PrefixHeld


class HostCacheState(CacheState):
    """The parts of a cache whose tree has two tiers."""

    __slots__ = ()

    tree_class = HostTree
    tree: HostTree


class HostPrefixCache(PrefixCache):
    """A prefix cache over `num_blocks` blocks of a device and `host_blocks` blocks of the same size on the host.

    When the pool is full, `extend` offloads cached blocks to the host instead of evicting them. Only tokens that leave
    the host, too, are evicted. Your program stores the KV of both tiers. In each step it runs the copies of `moves`,
    calls `moves_done`, and runs the copies of the plans, the loads and the writes. Other arguments are those of
    PrefixCache. Each cached token is resident in one tier: the first part of a text on the device, the next part on the
    host.

    >>> cache = HostPrefixCache(num_blocks=2, block_size=4, host_blocks=8)
    >>> with cache.open([]) as first:
    ...     plan = first.extend(range(8))
    ...     first.commit()
    >>> with cache.open([9]) as other:
    ...     plan = other.extend([9])
    >>> cache.moves()  # block 1 of the pool to block 0 of the host, before anything else is written
    [(1, 0)]
    >>> cache.moves_done()
    >>> with cache.open(range(8)) as again:
    ...     print(again.length, again.loadable(range(4, 8)), again.load(range(4, 8)).sources.tolist())
    4 4 [0, 1, 2, 3]
    """

    state_class = HostCacheState
    sequence_class = HostSequence
    state: HostCacheState

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
        namespace_limits: Limits = None,
    ) -> None:
        check_positive("host_blocks", host_blocks)
        super().__init__(
            num_blocks,
            block_size,
            eviction,
            clock,
            observer,
            pin_budget=pin_budget,
            namespace_limits=namespace_limits,
        )
        self.tier = HostTier(int(host_blocks), self.block_size)  # for the cache's own modules, and for checks
        self.state.tree.tier = self.tier

    @property
    def host_blocks(self) -> int:
        """The number of host blocks."""
        return self.tier.num_blocks

    # ---- reading

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """The longest prefix that is resident on the device; `host` counts the tokens after it that can be loaded."""
        return super().match(tokens, namespace)

    def _match(self, raw: bytes, space: Namespace | None) -> Match:
        found = super()._match(raw, space)
        if not self.tier.below:
            return found
        return found._replace(host=sum(count for _, count in self._host_path(raw, space)))

    def explain(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Explanation:
        """The prefix that `open` would find now, the tokens after it on the host, and why the match ends there.

        Tokens that the next step copies to the host count too.
        """
        return super().explain(tokens, namespace, limit)

    def _explain(self, raw: bytes, space: Namespace | None, limit: int | None) -> Explanation:
        found = super()._explain(raw, space, limit)
        if found.reason in ("full", "limit") or not self.tier.below:
            return found
        path = self._host_path(raw, space, pending=True)
        if not path:
            node, _ = self._find(raw, space)
            diverged = found.reason == "never_seen" and found.matched and node in self.tier.below
            return replace(found, reason="diverged", diverged_at=found.matched) if diverged else found
        host = sum(count for _, count in path)
        explained = Explanation(found.tokens, found.matched, found.length, "never_seen", host=host)
        if limit is not None and found.matched + host > limit:
            return replace(explained, reason="limit", host=int(limit) - found.matched)
        if found.matched + host == found.tokens:
            return replace(explained, reason="full")
        last = path[-1][0]
        return self._with_reason(explained, last, last.ghost_owner, raw)

    def random_host_run(self, rng: Random) -> HostRun | None:
        """A random text that ends on the host and can be loaded, for an audit; None if there is none.

        O(log leaves + depth + tokens of the text), more only while moves are not confirmed.
        """
        return self.state.tree.random_host_run(rng)

    def _stats(self) -> dict[str, int]:
        tier, stats = self.tier, super()._stats()
        return stats | {
            "evicted_blocks": stats["evicted_blocks"] - self.state.tree.freed_by_offload + tier.evicted_blocks,
            "host_blocks": tier.num_blocks,
            "host_free_blocks": len(tier.free),
            "host_nodes": tier.count,
            "offloaded_blocks": tier.offloaded_blocks,
            "loaded_tokens": tier.loaded_tokens,
            "host_evicted_blocks": tier.evicted_blocks,
        }

    def check(self) -> None:
        """Recount everything; AssertionError names the broken invariant. O(blocks + tokens): for tests."""
        super().check()
        invariants.check(self.state, self.tier)

    # ---- blocks that leave the pool

    def moves(self) -> list[tuple[int, int]]:
        """Take the pending copies (device block, host block); run them before any copy, load or write of a step.

        Each host block occurs once. Then confirm them by `moves_done`. A batch that was not confirmed before the next
        call has failed: its tokens, and all tokens after them on the host, are evicted. O(moves).
        """
        if self.tier.drained:
            tokens, _ = self.state.tree.drop_failed(self.clock())
            self.state.counters.evicted_tokens += tokens
        return self.tier.drain()

    def moves_done(self) -> None:
        """Confirm that the copies that `moves` returned last were run: their tokens can be loaded. O(nodes)."""
        self.tier.confirm()

    # ---- holding

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

    def demote(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> None:
        """Put the cached tokens of this text from `start` on at the cold end, in both tiers; see PrefixCache.demote.

        On the host, a run that begins before `start` stays where it is.
        """
        raw = as_bytes(tokens)
        super().demote(np.frombuffer(raw, np.int32), namespace, start)
        path = self._host_path(raw, self._namespaces.find(namespace), pending=True)
        if path and path[-1][0].end == path[-1][0].start + path[-1][1] and not path[-1][0].children:
            self.state.tree.demote_host([node for node, _ in path], start)

    def discard(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> int:
        """Forget the cached tokens of this text from `start` on, and everything below them, in both tiers.

        Returns the blocks that this freed on the device. Raises PrefixHeld as PrefixCache.discard does, and for tokens
        that a pending load reads.
        """
        raw = as_bytes(tokens)
        freed = super().discard(np.frombuffer(raw, np.int32), namespace, start)
        for node, count in self._host_path(raw, self._namespaces.find(namespace), pending=True):
            if node.start + count > start:
                self._refuse_loads([node, *self.state.tree.descendants(node)], start)
                self.state.tree.discard_host(node, int(start))
                break
        return freed

    def clear(self, *, pins: bool = False) -> None:
        """Forget the whole host, the ghosts, and everything that no sequence or pin holds. Counts as no eviction."""
        self.state.tree.forget_host()
        super().clear(pins=pins)

    # ---- helpers

    def _host_path(self, raw: bytes, space: Namespace | None, *, pending: bool = False) -> list[tuple[HostNode, int]]:
        """The host nodes along a text, after the part that is resident on the device; see HostTier.follow."""
        node, matched = self._find(raw, space)
        if node is None or matched < node.end * WIDTH:
            return []
        return self.tier.follow(node, raw, matched, pending=pending)

    def _count_regret(self, node: Node | None, ghost_owner: GhostOwner, length: int, rest: bytes) -> None:
        """Count requested tokens that left the last tier."""
        path = self.tier.follow(node, rest, pending=True) if node is not None and length == node.end else []
        if path:
            last, count = path[-1]
            if last.start + count < last.end:
                return
            node, ghost_owner, rest = last, last.ghost_owner, rest[(last.end - length) * WIDTH :]
            length = last.end
        super()._count_regret(node, ghost_owner, length, rest)

    def _refuse_held(self, node: Node, start: int) -> None:
        super()._refuse_held(node, start)
        tree = self.state.tree
        self._refuse_loads([host for each in tree.walk(node) for host in self.tier.nodes(each)], start)

    def _refuse_loads(self, nodes: list[HostNode], start: int) -> None:
        """Raise PrefixHeld if a pending load reads tokens of these host nodes from `start` on."""
        if self.tier.reading:
            blocks = {block for each in nodes for block in each.blocks}
            sequences = cast("list[HostSequence]", list(self.state.open.values()))
            if any(sequence.reads_host(blocks, start) for sequence in sequences):
                raise PrefixHeld(f"tokens from {start} on are being loaded: commit or close these sequences first")
