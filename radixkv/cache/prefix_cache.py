"""The facade: one pool, one radix tree for each namespace, sequences, pins, reasons.

Knows how the parts fit together. Knows no tensor, no model and no thread: one caller at a time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable
from random import Random
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.change_tracker import Watch
from radixkv.cache.events import Observer, guarded
from radixkv.cache.ghosts import Ghost, Ghosts, Pressure
from radixkv.cache.invariants import audit
from radixkv.cache.pins import Pin, Pins
from radixkv.cache.predictive.access_records import AccessRecord
from radixkv.cache.predictive.index import PredictiveIndex, new_index
from radixkv.cache.radix_tree import CachedRun, RadixTree, idle_blocks, random_run, root_mark
from radixkv.cache.sequence import Hint, Sequence
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, check_int, refuse_negative
from radixkv.cache.types import PURPOSES, CacheStats, Counters, Explanation, Node, Purpose
from radixkv.errors import InvalidInput, OutOfBlocks, PrefixHeld


class Match(NamedTuple):
    """The longest cached prefix."""

    length: int  # tokens
    blocks: npt.NDArray[np.int32]  # [ceil(length / block_size)]; they are safe to read only while somebody holds them
    idle_blocks: int  # of its path, those that nobody holds: by at most so many free + evictable fall when it is opened


class PrefixCache:
    """A prefix cache over `num_blocks` blocks of `block_size` tokens.

    `eviction` is one of lru, fifo, lfu, slru, predictive; `clock` (seconds) dates evictions and pins, and is what
    predictive learns by; `observer` is told of every change; pins may hold at most `pin_budget` of the pool. A
    namespace is None or anything hashable, and two are the same if they are equal. Idea: RadixAttention (Zheng et al.
    2024) over the block tables and copy-on-write of PagedAttention (Kwon et al. 2023).

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

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        eviction: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        *,
        pin_budget: float = 0.5,
    ) -> None:
        _check_positive("num_blocks", num_blocks)
        _check_positive("block_size", block_size)
        if not _is_number(pin_budget) or not 0 <= pin_budget <= 1:
            raise InvalidInput(f"pin_budget={pin_budget!r}: allowed is a part of the pool, 0.0 to 1.0")
        num_blocks, block_size = int(num_blocks), int(block_size)
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, block_size)
        self._index = new_index(eviction, num_blocks, block_size)
        self._learner = self._index if isinstance(self._index, PredictiveIndex) else None
        forgotten = None if self._learner is None else self._learner.forgotten
        self._ghosts = Ghosts(num_blocks * block_size, num_blocks, forgotten)
        self._tree = RadixTree(self._pool, self._index, self._ghosts)
        self._tree.observer = None if observer is None else guarded(observer, self._drop_observer)
        self._pins = Pins(self._tree, clock, int(pin_budget * num_blocks))
        self._counters = Counters()
        self.clock = clock
        self._open: dict[int, Sequence] = {}

    # ---- reading: changes nothing, not even recency

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def eviction(self) -> str:
        """The name of the policy."""
        return self._index.policy

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns. O(1)."""
        return len(self._pool.free)

    @property
    def evictable_blocks(self) -> int:
        """Blocks that eviction could free now, exactly. O(1)."""
        return self._pool.evictable

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """The longest cached prefix of `tokens` in the namespace. O(tokens compared) by memcmp + O(depth)."""
        raw = as_bytes(tokens)
        node, matched = self._find(raw, namespace)
        if node is None:
            return Match(0, np.empty(0, np.int32), 0)
        length = matched // WIDTH
        path = self._tree.path(node)
        blocks = self._tree.joined(path)
        del blocks[-(-length // self.block_size) :]
        return Match(length, np.frombuffer(blocks, np.int32), idle_blocks(self._pool, path, length))

    def explain(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Explanation:
        """What `open` would find now, and why it stops there. Costs a match and a walk along the ghosts."""
        raw = as_bytes(tokens)
        _check_limit(limit)
        node, matched = self._find(raw, namespace)
        asked, found = len(raw) // WIDTH, matched // WIDTH
        length = found if limit is None else min(found, limit)
        if length < found or found >= asked:
            return Explanation(asked, found, length, "limit" if length < found else "full")
        ghosts = self._ghosts.follow(root_mark(namespace) if node is None else node.ghost_owner, found, raw[matched:])
        if ghosts:
            first = ghosts[0][0]
            gone = sum(tokens for _, tokens in ghosts)
            ago = max(0.0, self.clock() - first.time)
            return Explanation(asked, found, length, "evicted", None, gone, ago, str(first.pressure))
        if found and node is not None and (found < node.end or node.children):
            return Explanation(asked, found, length, "diverged", found)
        return Explanation(asked, found, length, "never_seen")

    def random_run(self, rng: Random) -> CachedRun | None:
        """A random run of cached tokens, for an audit: each one's turn comes. None if nothing is cached.

        O(log leaves + open sequences + pins + depth + tokens of the text).
        """
        held = [sequence._node for sequence in self._open.values()] + self._pins.nodes()
        return random_run(self._tree, held, rng)

    def next_victims(self, count: int = 32) -> list[int]:
        """Return the node ids of the leaves that would be evicted next, in this order; fewer if there are fewer.

        It changes nothing. The policy may choose otherwise once text is used in the meantime. O(count).
        """
        return [cast(Node, node).id for node in self._index.next_victims(count)]

    def stats(self) -> CacheStats:
        """Counters and gauges now (pins whose ttl is over are released first).

        O(1), but O(pinned blocks) the first time after pins, or the blocks that they hold, have changed.
        """
        self._pins.expire()
        counters = {name: getattr(self._counters, name) for name in Counters.__slots__}
        free, cached = len(self._pool.free), self._pool.evictable
        return CacheStats(
            **counters,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=free,
            cached_blocks=cached,
            held_blocks=self.num_blocks - free - cached,
            pinned_blocks=self._pins.count(),
            nodes=self._tree.nodes,
            leaves=len(self._index),
            namespaces=len(self._tree.roots),
            ghosts=len(self._ghosts),
        )

    def watch(self, observer: Observer | None = None) -> Watch:
        """Have all that changes marked from now on, for a mirror; `observer`, if any, is told in the place of another.

        There is one watch at a time: the last. O(nodes).
        """
        if observer is not None:
            self._tree.observer = guarded(observer, self._drop_observer)
        return Watch(self)

    def check(self) -> None:
        """Recount everything; AssertionError names the broken invariant. O(blocks + tokens): for tests."""
        audit(self)

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
        """A sequence that holds the longest cached prefix of `tokens`, at most `limit` of them; extend it by the rest.

        A "request" counts as a query, and what it finds as hits. A "resume" is a request that comes back after it was
        preempted: it was counted before. An "audit" looks at what is cached: it does not count, it publishes nothing,
        and recency, priorities and hints stay as they are, when it is closed, too.
        Costs a match, a table of the path's blocks and, where the prefix ends inside a node, a split.
        """
        raw = as_bytes(tokens)
        key = raw
        if limit is not None:
            _check_limit(limit)
            key = raw[: limit * WIDTH]
        if type(priority) is not int:
            check_int("priority", priority)
        if purpose not in PURPOSES:
            raise InvalidInput(f"purpose={purpose!r}: allowed are {', '.join(PURPOSES)}")
        tree = self._tree
        root = self._root(namespace)
        node, matched = (root, 0) if root is None else tree.match(root, key)
        refuse_negative(raw, matched)
        if node is None:
            node = tree.root(namespace)
        length, asked = matched // WIDTH, len(raw) // WIDTH
        ghosts = self._used_ghosts(node, length, key[matched:])
        if purpose == "request":
            counters = self._counters
            counters.query_tokens += asked
            counters.hit_tokens += length
            if matched < len(key):
                self._regret(self._ghosts.regret(node.ghost_owner, length, key[matched:]))
        if length < node.end:
            node = tree.split(node, length - node.start)
        sequence = self._sequence(node, length, tree.table(node))
        sequence.namespace, sequence.priority, sequence.purpose, sequence.asked = namespace, priority, purpose, asked
        self._use(node, priority, purpose)
        if self._learner is not None and purpose != "audit":
            reach, path = len(key) // WIDTH, tree.path(node)
            learn = purpose == "request"
            sequence.use = self._learner.opened(path, ghosts, reach, length, self.clock(), learn=learn)
        self._share_last(node, length)
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
        node, matched = self._find(raw, namespace)
        length = matched // WIDTH
        if node is None or not length:
            return Pin(None, None, 0, not raw, 0, None)
        self._pins.expire()
        blocks = self._tree.table(node)[: -(-length // self.block_size)]
        self._pins.refuse_over_budget(blocks)
        if length < node.end:
            node = self._tree.split(node, length - node.start)
        return self._pins.add(node, length, matched == len(raw), len(blocks), ttl)

    def demote(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> None:
        """Put what is cached of these tokens from `start` on at the cold end: first to go, not gone.

        For a branch that turned out dead after its sequence was closed. It reaches up from the end of `tokens` while
        nobody holds, hits or branches off there; a later open undoes it.
        """
        raw = as_bytes(tokens)
        check_int("start", start)
        node, matched = self._find(raw, namespace)
        if node is None or node.locks or node.children:
            return
        if matched == node.end * WIDTH and start < node.end:
            if start > node.start:
                self._tree.split(node, start - node.start)
            self._demote(node, start)

    def discard(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> int:
        """Forget what is cached of these tokens from `start` on, and everything below it; returns the blocks freed.

        For KV that turned out wrong: it counts as no eviction, and leaves no ghosts. PrefixHeld, if a sequence or a pin
        holds any of it, leaves everything as it was. O(nodes and blocks below), and a look at each open sequence.
        """
        raw = as_bytes(tokens)
        check_int("start", start)
        if start < 0:
            raise InvalidInput(f"start={start}: allowed is an int of at least 0")
        self._pins.expire()
        node, matched = self._find(raw, namespace)
        if node is None or matched <= start * WIDTH:
            return 0
        while node.start > start:
            node = cast(Node, node.parent)
        self._refuse_held(node, start)
        if node.start < start:
            self._tree.split(node, int(start) - node.start)
        free = len(self._pool.free)
        for each in reversed(list(self._tree.walk(node))):
            if self._learner is not None:
                self._learner.forgotten(each.use, each.start)
            self._tree.remove(each)
        return len(self._pool.free) - free

    def clear(self) -> None:
        """Forget everything that nobody holds, ghosts included. Counts as no eviction."""
        self._ghosts.clear()
        if self._learner is not None:
            self._learner.forget()
        while len(self._index):
            self._tree.remove(self._victim())

    # ---- what sequences ask of the cache

    def _use(self, node: Node, priority: int, purpose: Purpose) -> None:
        """A sequence was opened at the end of `node`: hold it; recency and hits follow, but for an audit."""
        self._tree.hold(node)
        if node.parent is not None and purpose != "audit":
            if node.demoted:
                self._tree.want(node)
            self._index.touched(node)
            node.hits += purpose == "request"
            if priority > node.priority:
                node.priority = priority

    def _regret(self, wanted: list[tuple[Ghost, int]]) -> None:
        """A request asked for what was evicted."""
        for ghost, tokens in wanted:
            self._counters.regret_tokens += tokens
            if self._tree.observer is not None:
                self._tree.observer.regretted(ghost.eviction, tokens, max(0.0, self.clock() - ghost.time))

    def _share_last(self, node: Node, length: int) -> None:
        """A sequence that ends where `node` ends references the last block, if that is part-filled."""
        if length % self.block_size:
            block = node.blocks[-1]
            self._pool.share(
                block, idle=False, sole_idle=False, deepest_owner=None if block in self._pool.shared else node
            )

    def _sequence(self, node: Node, length: int, table: array[int]) -> Sequence:
        counters = self._counters
        counters.opened_sequences += 1
        sequence = Sequence(self, counters.opened_sequences, node, length, table)
        self._open[sequence.id] = sequence
        return sequence

    def _forked(self, sequence: int, parent: int) -> None:
        if self._tree.observer is not None:
            self._tree.observer.forked(sequence, parent)

    def _closed(self, sequence: Sequence, node: Node, hint: Hint | None) -> None:
        """The last step of Sequence.close: recency, hints, and the lock."""
        del self._open[sequence.id]
        self._counters.closed_sequences += 1
        if sequence.purpose == "audit":
            hint = None
        elif node.parent is not None:
            self._index.touched(node)
            if hint is not None and hint.priority > node.priority:
                node.priority = hint.priority
            if sequence.use is not None:
                self._settle(sequence, node, hint)
        self._tree.unhold(node)
        if hint is not None and hint.done and (sequence.cached_length < node.end or node.hits <= 1):
            self._demote(node)  # not what others published or hit
        if self._tree.observer is not None:
            self._tree.observer.closed(sequence.id, sequence.length)

    def _settle(self, sequence: Sequence, node: Node, hint: Hint | None) -> None:
        """Tell who learns how a sequence ended."""
        assert self._learner is not None and sequence.use is not None
        output, kind, returns_in = max(0, sequence.length - sequence.asked), None, None
        if hint is not None:
            kind, returns_in = hint.kind, hint.returns_in
            output = output if hint.output_length is None else hint.output_length
        self._learner.closed(sequence.use, self._tree.path(node), output, kind, returns_in, self.clock())

    def _used_ghosts(self, node: Node, length: int, raw: bytes) -> list[tuple[int, int, AccessRecord]]:
        """For who learns, the evicted parts (start, end, last use) of what an open asks for behind its hit."""
        parts: list[tuple[int, int, AccessRecord]] = []
        if self._learner is not None and raw:
            for ghost, tokens in self._ghosts.follow(node.ghost_owner, length, raw, faded=True):
                if ghost.use is not None:
                    parts.append((length, length + tokens, ghost.use))
                length += tokens
        return parts

    def _take(self, count: int) -> array[int]:
        """Take blocks, evicting if need be; OutOfBlocks changes nothing; it means free + evictable are too few."""
        pool = self._pool
        if count > len(pool.free):
            self._make_room(count)
        return pool.take(count)

    def _make_room(self, count: int) -> None:
        pool, counters = self._pool, self._counters
        self._pins.expire()
        free = len(pool.free)
        if count > free + pool.evictable:
            raise OutOfBlocks(
                f"{count} blocks wanted, {free} are free and {pool.evictable} evictable of {pool.num_blocks}: "
                "close or shorten sequences, release pins, or make the pool larger"
            )
        now, pressure = self.clock(), Pressure(count, free)
        while (missing := count - len(pool.free)) > 0:
            victim = self._victim()
            room = missing if self._learner is None else min(missing, self._learner.room(victim))
            counters.evicted_tokens += self._tree.trim(victim, room, now, pressure)
            if self._learner is not None:
                self._learner.trimmed(victim)
        counters.evicted_blocks += len(pool.free) - free

    def _victim(self) -> Node:
        node = self._index.victim()
        assert isinstance(node, Node)
        return node

    def _copied(self, sequence: int, source: int, target: int) -> None:
        self._counters.copied_blocks += 1
        if self._tree.observer is not None:
            self._tree.observer.copied(sequence, source, target)

    def _refuse_held(self, node: Node, start: int) -> None:
        """PrefixHeld if anybody holds KV of `node` at or behind `start`, or below: by a lock, or as a fork's own."""
        held = node.locks > 0
        if not held and self._open:
            blocks = {block for each in self._tree.walk(node) for block in each.blocks}
            held = any(sequence._reads(blocks, start) for sequence in self._open.values())
        if held:
            raise PrefixHeld(
                f"tokens from {start} on are held: close the sequences and release the pins that have them first"
            )

    def _demote(self, node: Node, start: int = 0) -> None:
        """Put a finished tail at the cold end, upward to `start` while nothing else holds, hits or branches there."""
        up = node
        while up.parent is not None and not up.locks and len(up.children) == (up is not node):
            if up.start < start or (up is not node and up.hits):
                return
            up.demoted = True
            if self._tree.changed is not None:
                self._tree.changed.mark(up)
            if up.eviction_key is not None:
                self._index.removed(up)
                self._index.inserted(up)
            up = up.parent

    def _drop_observer(self) -> None:
        self._tree.observer = None

    def _find(self, raw: bytes, namespace: Hashable) -> tuple[Node | None, int]:
        """The deepest node that `raw` reaches, if its namespace has any, and the bytes that match."""
        root = self._root(namespace)
        node, matched = (root, 0) if root is None else self._tree.match(root, raw)
        refuse_negative(raw, matched)
        return node, matched

    def _root(self, namespace: Hashable) -> Node | None:
        try:
            return self._tree.roots.get(namespace)
        except TypeError as error:
            raise InvalidInput(
                f"namespace of type {type(namespace).__name__}: allowed is None or anything hashable"
            ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _check_positive(name: str, value: int) -> None:
    check_int(name, value)
    if value < 1:
        raise InvalidInput(f"{name}={value}: allowed is an int of at least 1")


def _check_limit(limit: int | None) -> None:
    if limit is not None:
        check_int("limit", limit)
        if limit < 0:
            raise InvalidInput(f"limit={limit}: allowed is an int of at least 0, or None for no limit")
