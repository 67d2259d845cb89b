"""The facade: one pool, one radix tree for each namespace, sequences, pins, explanations. One caller at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import ClassVar, cast

import numpy as np

from radixkv.cache import invariants
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.change_tracker import ChangeTracker
from radixkv.cache.events import Observer
from radixkv.cache.namespaces import Namespace
from radixkv.cache.pins import Pin
from radixkv.cache.policies import new_index
from radixkv.cache.quotas import NamespaceLimits, NamespaceUsage, Quotas
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import COUNTERS, CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, check_int, refuse_negative
from radixkv.cache.types import (
    PURPOSES,
    CachedNode,
    CachedRun,
    CacheStats,
    Explanation,
    GhostOwner,
    Match,
    Node,
    Purpose,
)
from radixkv.errors import InvalidInput, PrefixHeld

Limits = NamespaceLimits | Mapping[Hashable, float] | None


class PrefixCache:
    """A prefix cache over `num_blocks` blocks of `block_size` tokens.

    `eviction` is the name of a policy in `POLICIES`. `clock` (seconds) dates evictions and pins, and `predictive`
    learns by it. `observer` receives every event. Pins may hold at most `pin_budget` of the pool. A namespace is None
    or any hashable value; equal values are one namespace. `namespace_limits` guarantees shares of the pool to
    namespaces, such as `{"ann": 0.5}`: see `radixkv.cache.quotas`. Idea: RadixAttention (Zheng et al. 2024) over the
    block tables and copy-on-write of PagedAttention (Kwon et al. 2023).

    >>> cache = PrefixCache(num_blocks=8, block_size=4)
    >>> first = cache.open([1, 2, 3, 4, 5, 6])
    >>> first.extend([1, 2, 3, 4, 5, 6]).slots.tolist()
    [0, 1, 2, 3, 4, 5]
    >>> first.commit()  # after the KV was written to these slots
    >>> second = cache.open([1, 2, 3, 4, 5, 9])
    >>> second.length
    5
    >>> second.extend([9]).copies  # block 1 holds token 6 of the first: copy-on-write
    [(1, 2)]
    """

    state_class: ClassVar[type[CacheState]] = CacheState
    sequence_class: ClassVar[type[Sequence]] = Sequence

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        eviction: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        *,
        pin_budget: float = 0.5,
        namespace_limits: Limits = None,
    ) -> None:
        check_positive("num_blocks", num_blocks)
        check_positive("block_size", block_size)
        if not _is_number(pin_budget) or not 0 <= pin_budget <= 1:
            raise InvalidInput(f"pin_budget={pin_budget!r}: allowed is a part of the pool, 0.0 to 1.0")
        self.num_blocks, self.block_size = int(num_blocks), int(block_size)
        shape = self.num_blocks, self.block_size
        pool, index = BlockPool(*shape), new_index(eviction, *shape, clock)
        self.quotas: Quotas | None = None
        if namespace_limits is not None:
            self.quotas = Quotas(namespace_limits, *shape, lambda: new_index(eviction, *shape, clock))
            pool, index = self.quotas.pool, self.quotas.index
        self.eviction = eviction  # the name of the policy
        self.clock = clock
        # For the cache's own modules, and for checks.
        self.state = self.state_class(pool, index, clock, int(pin_budget * num_blocks))
        self._namespaces = self.state.tree.namespaces
        if self.quotas is not None:
            self._namespaces.group = self.quotas.limits.group
        if observer is not None:
            self.state.observe(observer)

    # ---- reading: changes nothing, not even recency

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner. O(1)."""
        return len(self.state.pool.free)

    @property
    def evictable_blocks(self) -> int:
        """Blocks whose owners are all unlocked nodes: eviction frees at least these. O(1).

        It frees one more if the last leaf that shares a held node's part-filled block leaves, and a copy remains.
        """
        return self.state.pool.evictable

    def evictable_for(self, namespace: Hashable) -> int:
        """Blocks that can be evicted for a sequence of a namespace: with limits fewer than `evictable_blocks`. O(1)."""
        return self.state.pool.evictable_for(self._group(namespace))

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """The longest cached prefix of `tokens` in the namespace. O(tokens compared) by memcmp + O(depth)."""
        return self._match(as_bytes(tokens), self._namespaces.find(namespace))

    def _match(self, raw: bytes, space: Namespace | None) -> Match:
        node, matched = self._find(raw, space)
        if node is None:
            return Match(0, np.empty(0, np.int32), 0)
        tree, length = self.state.tree, matched // WIDTH
        path = tree.path(node)
        blocks = tree.joined(path)
        del blocks[-(-length // self.block_size) :]
        return Match(length, np.frombuffer(blocks, np.int32), tree.idle_blocks(path, length), length)

    def explain(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Explanation:
        """The prefix that `open` would find now, and why the match ends there. Costs a match and a look at ghosts."""
        raw = as_bytes(tokens)
        check_limit(limit)
        return self._explain(raw, self._namespaces.find(namespace), limit)

    def _explain(self, raw: bytes, space: Namespace | None, limit: int | None) -> Explanation:
        node, matched = self._find(raw, space)
        asked, found = len(raw) // WIDTH, matched // WIDTH
        length = found if limit is None else min(found, limit)
        if length < found or found >= asked:
            return Explanation(asked, found, length, "limit" if length < found else "full")
        owner = space if node is None else node.ghost_owner
        return self._with_reason(Explanation(asked, found, length, "never_seen"), node, owner, raw)

    def random_run(self, rng: Random) -> CachedRun | None:
        """A random run of cached tokens to compute again and compare; None if nothing is cached. Reaches every run.

        O(log leaves + open sequences + pins + depth + tokens of the text).
        """
        held = [sequence.node for sequence in self.state.open.values()] + self.state.pins.nodes()
        return self.state.tree.random_run(held, rng)

    def node(self, number: int) -> CachedNode | None:
        """Find a node of any tier by its id; None if it is gone.

        O(tokens of its text), and O(nodes) without a change tracker.
        """
        tree, tracker = self.state.tree, self.state.tree.changed
        node = tree.find(number) if tracker is None else tracker.find(number)
        if node is None:
            return None
        path = tree.path(node)
        tokens = np.frombuffer(bytearray().join([each.key for each in path]), np.int32)
        namespace = tree.namespace(node)
        return CachedNode(tokens, node.start, namespace, node.residence, node.locks, tree.followers(node))

    def next_victims(self, count: int = 32) -> list[int]:
        """Return the node ids of the leaves that would be evicted next, in this order; fewer if there are fewer.

        It changes nothing. Each use of the cache may change the order. O(count).
        """
        return [node.id for node in self.state.index.next_victims(count)]

    def stats(self) -> CacheStats:
        """Counters and gauges now (pins whose ttl is over are released first).

        O(1), but O(pinned blocks) the first time after pins, or the blocks that they hold, have changed.
        """
        return CacheStats(**self._stats())

    def _stats(self) -> dict[str, int]:
        """The fields of `stats`; a cache with more parts overrides this method and adds theirs."""
        state = self.state
        state.pins.expire()
        free, cached = len(state.pool.free), state.pool.evictable
        return {name: getattr(state.counters, name) for name in COUNTERS} | {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "free_blocks": free,
            "cached_blocks": cached,
            "held_blocks": self.num_blocks - free - cached,
            "pinned_blocks": state.pins.count(),
            "nodes": state.tree.nodes,
            "leaves": len(state.index),
            "namespaces": len(state.tree.roots),
            "ghosts": len(state.ghosts),
        }

    def namespace_usage(self) -> tuple[NamespaceUsage, ...]:
        """The blocks of each namespace with a limit now, in the order of the limits."""
        return () if self.quotas is None else self.quotas.usage()

    def watch(self, observer: Observer | None = None) -> ChangeTracker:
        """Track changed nodes from now on, for a mirror; `observer`, if given, replaces the present one.

        There is one tracker at a time: the last. O(nodes).
        """
        if observer is not None:
            self.state.observe(observer)
        return ChangeTracker(self.state)

    def check(self) -> None:
        """Recount everything; AssertionError names the broken invariant. O(blocks + tokens): for tests."""
        invariants.check(self.state)
        if self.quotas is not None:
            self.quotas.check(self.state)

    # ---- blocks that leave the pool

    def moves(self) -> list[tuple[int, int]]:
        """Take the pending copies of blocks to another tier: (device block, host block). There are none here.

        See `host.HostPrefixCache`.
        """
        return []

    def moves_done(self) -> None:
        """Confirm that the copies that `moves` returned last were run."""

    # ---- holding

    def open(
        self,
        tokens: Tokens,
        namespace: Hashable = None,
        limit: int | None = None,
        priority: int = 0,
        *,
        purpose: Purpose = "request",
    ) -> Sequence:
        """Return a sequence that holds the longest cached prefix of `tokens`, at most `limit` tokens of it.

        A "request" counts as a query, and the tokens that it finds as hits. A "resume" is a request that comes back
        after it was preempted: it was counted before. An "audit" reads cached KV: it does not count and publishes
        nothing, and neither opening nor closing it changes recency, priorities and hints.
        Costs a match, a table of the path's blocks and, where the prefix ends inside a node, a split.
        """
        raw = as_bytes(tokens)
        if limit is not None:
            check_limit(limit)
        space = self._namespaces.find(namespace)
        node, matched = self._find(raw, space, limit)
        return self._open(raw, namespace, space, node, matched, limit, priority, purpose)

    def _open(
        self,
        raw: bytes,
        namespace: Hashable,
        space: Namespace | None,
        node: Node | None,
        matched: int,
        limit: int | None,
        priority: int,
        purpose: Purpose,
    ) -> Sequence:
        """Open a sequence on the first `matched` bytes of `raw`, which end in `node`.

        Without `node` make the root, and without `space` the namespace.
        """
        if type(priority) is not int:
            check_int("priority", priority)
        if purpose not in PURPOSES:
            raise InvalidInput(f"purpose={purpose!r}: allowed are {', '.join(PURPOSES)}")
        state = self.state
        tree = state.tree
        space = tree.add_namespace(namespace) if space is None else space
        node = tree.add_root(space) if node is None else node
        length, asked = matched // WIDTH, len(raw) // WIDTH
        rest, ghost_owner = raw[matched:] if limit is None else raw[matched : limit * WIDTH], node.ghost_owner
        if purpose == "request":
            state.counters.query_tokens += asked
            state.counters.hit_tokens += length
            if rest:
                self._count_regret(node, ghost_owner, length, rest)
        if length < node.end:
            node = tree.split(node, length - node.start)
        path = tree.path(node)
        sequence = self.sequence_class(state, node, length, tree.joined(path))
        sequence.namespace, sequence.group, sequence.priority = namespace, space.group, priority
        sequence.purpose, sequence.asked = purpose, asked
        tree.hold(node)
        if purpose != "audit":
            if node.parent is not None:
                if node.demoted:
                    tree.undo_demote(node)
                state.index.touch(node)
                node.hits += purpose == "request"
                if priority > node.priority:
                    node.priority = priority
            sequence.policy_data = state.index.open(tree, node, ghost_owner, rest, purpose == "request")
        if tree.changed is not None and purpose == "request":
            tree.changed.reused(path)
        if length % self.block_size:
            state.pool.share(node.blocks[-1], idle=False, sole_idle=False, sole_node=node)
        if tree.observer is not None:
            tree.observer.opened(sequence.id, namespace, asked, length, purpose)
        return sequence

    def pin(self, tokens: Tokens, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Keep the cached prefix of `tokens` until release() or for `ttl` seconds.

        The Pin says how much was cached. PinBudgetExceeded leaves everything as it was.
        """
        raw = as_bytes(tokens)
        if ttl is not None and not (_is_number(ttl) and ttl > 0):
            raise InvalidInput(f"ttl={ttl!r}: allowed are seconds > 0, or None for no limit")
        node, matched = self._find(raw, self._namespaces.find(namespace))
        length = matched // WIDTH
        if node is None or not length:
            return Pin(None, None, 0, not raw, 0, None)
        tree, pins = self.state.tree, self.state.pins
        pins.expire()
        blocks = tree.table(node)[: -(-length // self.block_size)]
        pins.refuse_over_budget(blocks)
        if length < node.end:
            node = tree.split(node, length - node.start)
        return pins.add(node, length, matched == len(raw), len(blocks), ttl)

    def unpin(self, tokens: Tokens, namespace: Hashable = None) -> int:
        """Release the pins that end exactly at the end of `tokens`; returns their number. Costs a match + O(pins)."""
        raw = as_bytes(tokens)
        self.state.pins.expire()
        node, matched = self._find(raw, self._namespaces.find(namespace))
        if node is None or not matched or not matched == len(raw) == node.end * WIDTH:
            return 0
        return self.state.pins.release_at(node)

    def pinned_length(self, pin: Pin, length: int) -> int:
        """Return how many of the first `length` tokens of a pinned text stay usable as long as the pin holds."""
        return min(length, pin.length)

    def demote(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> None:
        """Put the cached tokens of this text from `start` on at the cold end: evicted first, but not yet.

        For a branch that is no longer needed, after its sequence was closed. It reaches up from the end of `tokens` as
        long as no sequence holds, no request hits and no other text branches off there. A later open undoes it.
        """
        raw = as_bytes(tokens)
        check_int("start", start)
        node, matched = self._find(raw, self._namespaces.find(namespace))
        if node is None or node.locks or node.children:
            return
        if matched == node.end * WIDTH and start < node.end:
            if start > node.start:
                self.state.tree.split(node, start - node.start)
            self.state.tree.demote(node, start)

    def evict(self, count: int, namespace: Hashable = None) -> bool:
        """Evict cached prefixes until `count` blocks are free for a namespace; returns False if there are fewer.

        It may free more than `evictable_blocks` promises: see there. Costs O(log leaves) for each evicted block.
        """
        check_int("count", count)
        self.state.pins.expire()
        return self.state.evict(count, self._group(namespace))

    def discard(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> int:
        """Forget the cached tokens of this text from `start` on, and everything below them; returns the blocks freed.

        For KV that is wrong: it counts as no eviction, and leaves no ghosts. PrefixHeld is raised if a sequence or a
        pin holds any of it, and leaves everything as it was. O(nodes and blocks below), and a look at each open
        sequence.
        """
        raw = as_bytes(tokens)
        check_int("start", start)
        if start < 0:
            raise InvalidInput(f"start={start}: allowed is an int of at least 0")
        state = self.state
        state.pins.expire()
        node, matched = self._find(raw, self._namespaces.find(namespace))
        if node is None or matched <= start * WIDTH:
            return 0
        while node.start > start:
            node = cast(Node, node.parent)
        self._refuse_held(node, start)
        if node.start < start:
            state.tree.split(node, int(start) - node.start)
        return self._forget(state.tree.walk(node))

    def clear(self, *, pins: bool = False) -> None:
        """Forget everything that no sequence or pin holds, ghosts included. Counts as no eviction.

        With `pins`, release all pins first.
        """
        state = self.state
        if pins:
            state.pins.release()
        state.ghosts.clear()
        state.index.clear()
        while len(state.index):
            state.tree.remove(state.index.victim())
        self._namespaces.keep(state.tree.roots)

    def clear_namespace(self, namespace: Hashable = None) -> int:
        """Forget everything of one namespace that no sequence or pin holds, its ghosts and all tiers included.

        Returns the blocks that this freed on the device. Counts as no eviction, and changes no other namespace. Ghosts
        that follow a forgotten ghost cannot be found any more: they stay until they are the oldest. O(ghosts), and
        O(log leaves + its blocks) for each node of the namespace.
        """
        state, space = self.state, self._namespaces.find(namespace)
        state.pins.expire()
        if space is None:
            return 0
        root = state.tree.find_root(space)
        nodes = [] if root is None else list(state.tree.residents(root))
        state.ghosts.drop([space, *(each.ghost_owner for each in nodes)])
        return self._forget(each for each in nodes if each.parent is not None and not each.locks)

    # ---- helpers

    def _forget(self, nodes: Iterable[Node]) -> int:
        """Remove unlocked nodes, each before its children here, with all that follow; returns the blocks freed."""
        state = self.state
        free = len(state.pool.free)
        for each in reversed(list(nodes)):
            state.index.forget(each.policy_data, each.start)
            state.tree.remove(each)
        return len(state.pool.free) - free

    def _group(self, namespace: Hashable) -> int:
        """The group of a namespace, which may be new."""
        space = self._namespaces.find(namespace)
        return self._namespaces.group(namespace) if space is None else space.group

    def _find(self, raw: bytes, namespace: Namespace | None, limit: int | None = None) -> tuple[Node | None, int]:
        """The deepest node that `raw`, up to `limit` tokens, reaches in its namespace, and the bytes that match."""
        tree = self.state.tree
        root = tree.find_root(namespace)
        if root is None:
            refuse_negative(raw)
            return None, 0
        node, matched = tree.match(root, raw if limit is None else raw[: limit * WIDTH])
        refuse_negative(raw, matched)
        return node, matched

    def _with_reason(
        self, explained: Explanation, node: Node | None, owner: GhostOwner | None, raw: bytes
    ) -> Explanation:
        """Replace the reason if one is found. The match of `raw` ends in `node`, and its ghosts hang below `owner`."""
        at = explained.matched + explained.host
        ghosts = [] if owner is None else self.state.ghosts.follow(owner, at, raw[at * WIDTH :])
        if ghosts:
            first = ghosts[0][0]
            gone = sum(tokens for _, tokens in ghosts)
            ago = max(0.0, self.clock() - first.time)
            cause = str(first.pressure)
            return replace(explained, reason="evicted", evicted_tokens=gone, evicted_ago=ago, pressure=cause)
        if at and node is not None and (at < node.end or node.children):
            return replace(explained, reason="diverged", diverged_at=at)
        return explained

    def _count_regret(self, node: Node | None, ghost_owner: GhostOwner, length: int, rest: bytes) -> None:
        """Count requested tokens that were evicted. `rest` follows the first `length` tokens, which end in `node`."""
        state = self.state
        for ghost, tokens in state.ghosts.regret(ghost_owner, length, rest):
            state.counters.regret_tokens += tokens
            if state.tree.observer is not None:
                state.tree.observer.regretted(ghost.eviction, tokens, max(0.0, self.clock() - ghost.time))

    def _refuse_held(self, node: Node, start: int) -> None:
        """Raise PrefixHeld if KV of `node` from `start` on, or below, is held: by a lock, or as a fork's own block."""
        held = node.locks > 0
        if not held and self.state.open:
            blocks = {block for each in self.state.tree.walk(node) for block in each.blocks}
            held = any(sequence.reads(blocks, start) for sequence in self.state.open.values())
        if held:
            raise PrefixHeld(
                f"tokens from {start} on are held: close the sequences and release the pins that have them first"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def check_positive(name: str, value: int) -> None:
    """Raise InvalidInput unless `value` is an int of at least 1."""
    check_int(name, value)
    if value < 1:
        raise InvalidInput(f"{name}={value}: allowed is an int of at least 1")


def check_limit(limit: int | None) -> None:
    """Raise InvalidInput unless `limit` is None or an int of at least 0."""
    if limit is not None:
        check_int("limit", limit)
        if limit < 0:
            raise InvalidInput(f"limit={limit}: allowed is an int of at least 0, or None for no limit")
