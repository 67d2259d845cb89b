"""The facade: one pool, one radix tree for each namespace, sequences, pins, explanations. One caller at a time.

Each reading is one chain in a fixed order: the KV that is resident on the device, then the host tier adds to it, then
recurrent state shortens it to the last snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from random import Random

import numpy as np

from radixkv.cache import forgetting, invariants, readings
from radixkv.cache.announcements import Announcement
from radixkv.cache.block_pool import BlockPool, BlockTable
from radixkv.cache.change_tracker import ChangeTracker
from radixkv.cache.events import Observer
from radixkv.cache.eviction import EvictionIndex
from radixkv.cache.host.arrivals import Arrivals
from radixkv.cache.namespaces import Namespace, Namespaces, refusal
from radixkv.cache.past_text import PastText
from radixkv.cache.pins import Pin
from radixkv.cache.policies import new_index
from radixkv.cache.recurrent.row import RowState
from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.recurrent.snapshots import Spacing
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, check_int, refuse_negative
from radixkv.cache.types import PURPOSES, CachedRun, CacheStats, Explanation, Match, Node, Purpose
from radixkv.errors import InvalidInput


class PrefixCache:
    """A prefix cache over `num_blocks` blocks of `block_size` tokens.

    `eviction` is the name of a policy in `POLICIES`. `clock` (seconds) dates evictions and pins, and `predictive`
    learns by it. `observer` receives every event. Pins may hold at most `pin_budget` of the pool. A namespace is None
    or any hashable value; equal values are one namespace. All options combine. Idea: RadixAttention (Zheng et al. 2024)
    over the block tables and copy-on-write of PagedAttention (Kwon et al. 2023).

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

    With `host_blocks`, blocks of the same size in host memory are a second tier. When the pool is full, `extend`
    offloads cached blocks to the host instead of evicting them. Only tokens that leave the host, too, are evicted. Your
    program stores the KV of both tiers. In each step it runs the copies of `moves`, calls `moves_done`, and runs the
    copies of the plans, the loads and the writes. Each cached token is resident in one tier: the first part of a text
    on the device, the next part on the host.

    >>> cache = PrefixCache(num_blocks=2, block_size=4, host_blocks=8)
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

    With `state_rows`, the cache serves models with recurrent state. Each open sequence has one of these rows;
    `state_snapshots` slots, and `host_snapshots` more in host memory, hold snapshots. A cached prefix can be used up to
    its last snapshot. The tokens after it are computed again, and `commit` uses the cached blocks for them. `copies` is
    the queue of copies between slots, which the model drains before each forward. `state_spacing` says where snapshots
    may lie. Policies that learn see no reuse of KV whose tokens are computed again.

    With `draft_tokens`, the text of so many tokens of closed sequences is kept, whether its KV is evicted or not:
    `repeated` finds what followed a text in the same namespace. It takes up to 10 bytes a token.

    >>> cache = PrefixCache(num_blocks=64, block_size=16, state_rows=2, state_snapshots=4)
    >>> first = cache.open(range(100))
    >>> first.snapshot_at(80)
    >>> plan = first.extend(range(100))
    >>> plan.state.row.number, plan.state.snapshots
    (0, [StateSnapshot(tokens=80, slot=2)])
    >>> first.commit()  # after KV and state were written
    >>> cache.open([*range(90), 7]).length, cache.copies.drain()
    (80, [(-1, 0), (2, 1)])
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
        host_blocks: int = 0,
        state_rows: int = 0,
        state_snapshots: int = 0,
        host_snapshots: int = 0,
        state_spacing: Spacing | None = None,
        draft_tokens: int = 0,
    ) -> None:
        check_int("num_blocks", num_blocks, 1)
        check_int("block_size", block_size, 1)
        if not _is_number(pin_budget) or not 0 <= pin_budget <= 1:
            raise InvalidInput(f"pin_budget={pin_budget!r}: allowed is a part of the pool, 0.0 to 1.0")
        for name, size in {
            "draft_tokens": draft_tokens,
            "host_blocks": host_blocks,
            "state_rows": state_rows,
            "state_snapshots": state_snapshots,
            "host_snapshots": host_snapshots,
        }.items():
            check_int(name, size, 0)
        if (state_snapshots or host_snapshots) and not state_rows:
            raise InvalidInput("snapshots of recurrent state need state_rows: a row for each open sequence")
        if host_snapshots and not host_blocks:
            raise InvalidInput("host_snapshots need host_blocks: states on the host are those of KV that may be there")
        self.num_blocks, self.block_size, self.host_blocks = int(num_blocks), int(block_size), int(host_blocks)
        self.eviction, self.clock = eviction, clock  # the name of the policy
        pool = BlockPool(self.num_blocks, self.block_size)
        index, namespaces = new_index(eviction, self.num_blocks, self.block_size, clock), Namespaces()
        self.copies = StateSlots(int(state_rows), int(state_snapshots), int(host_snapshots))
        budget, host = int(pin_budget * num_blocks), (self.host_blocks, EvictionIndex())
        # For the cache's own modules, and for checks.
        self.state = CacheState(pool, index, namespaces, clock, budget, *host, self.copies, state_spacing or Spacing())
        self._namespaces = namespaces
        arrivals = Arrivals(self.state)
        self.take_host_blocks, self.arrive = arrivals.take_blocks, arrivals.arrive
        self.past_text = PastText(self.state.tree, draft_tokens, self.state.events)
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

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or evictable. O(1)."""
        return len(self.state.pool.free) + self.state.pool.evictable

    @property
    def state_rows(self) -> int:
        """Rows of recurrent state; 0 for models without."""
        return self.copies.num_rows

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """The longest cached prefix of `tokens` in the namespace. O(tokens compared) by memcmp + O(depth).

        `length` and `blocks` are resident on the device, `host` counts the tokens after the match whose KV is on the
        host. With recurrent state, `length` ends at a snapshot, and `matched` counts the tokens with KV on the device.
        """
        raw = as_bytes(tokens)
        _, node, at = self._find(raw, namespace)
        if node is None:
            return Match(0, np.empty(0, np.int32), 0)
        tree, length = self.state.tree, at // WIDTH
        path = tree.path(node)
        if self.state.host is None and self.state.snapshots is None:
            blocks = tree.joined(path)
            del blocks[-(-length // self.block_size) :]
            idle = readings.idle_blocks(tree, path, length)
            return _match((length, np.frombuffer(blocks, np.int32), idle, length, 0, 0))
        return readings.match_in_parts(self.state, node, path, raw, at)

    def explain(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Explanation:
        """The prefix that `open` would find now, and why the match, or the recurrent state, ends there.

        Tokens on the host count too, and those that the next step copies there. Costs a match and a look at ghosts.
        """
        raw = as_bytes(tokens)
        if limit is not None:
            check_int("limit", limit, 0)
        space, node, at = self._find(raw, namespace)
        return readings.explain(self.state, node, None if space is None else space.number, raw, at, limit)

    def cached_after(self, tokens: Tokens, namespace: Hashable = None, most: int = 32) -> list[int]:
        """The cached tokens that follow the match of `tokens` in the pool, at most `most`. Costs a match.

        Of several prompts that go on there, it is the one that was used last while a change tracker is attached.
        """
        _, node, at = self._find(as_bytes(tokens), namespace)
        return [] if node is None else readings.after(node, at, most)

    def random_run(self, rng: Random) -> CachedRun | None:
        """A random run of cached tokens to compute again and compare; None if nothing is cached. Reaches every run.

        O(log leaves + open sequences + pins + depth + tokens of the text).
        """
        return readings.random_run(self.state, rng)

    def next_victims(self, count: int = 32) -> list[int]:
        """Return the node ids of the leaves that would be evicted next, in this order; fewer if there are fewer.

        It changes nothing. Each use of the cache may change the order. O(count).
        """
        return [node.id for node in self.state.index.next_victims(count)]

    def stats(self) -> CacheStats:
        """Counters and gauges now (pins whose ttl is over are released first).

        O(1), but O(pinned blocks) the first time after pins, or the blocks that they hold, have changed.
        """
        state, host = self.state, self.state.host
        state.pins.expire()
        free, cached = len(state.pool.free), state.pool.evictable
        counted = dict(vars(state.counters))
        if host is not None:  # blocks that were offloaded were not evicted
            counted["evicted_blocks"] += host.evicted_blocks - host.freed_on_device
            counted |= host.stats()
        if state.snapshots is not None:
            counted |= state.snapshots.stats()
        return CacheStats(
            **counted,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=free,
            cached_blocks=cached,
            held_blocks=self.num_blocks - free - cached,
            pinned_blocks=state.pins.count(),
            nodes=state.tree.nodes,
            leaves=len(state.index),
            namespaces=len(state.tree.roots),
            ghosts=len(state.ghosts),
        )

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
        self.past_text.check()

    # ---- blocks that leave the pool

    def moves(self) -> list[tuple[int, int]]:
        """Take the pending copies (device block, host block); run them before any copy, load or write of a step.

        Each host block occurs once. Then confirm them by `moves_done`. A batch that was not confirmed before the next
        call has failed: its tokens, and all tokens after them on the host, are evicted. Without a host tier there are
        none. O(moves).
        """
        if self.state.host is None:
            return []
        moves, lost = self.state.host.drain(self.clock())
        self.state.counters.evicted_tokens += lost
        return moves

    def moves_done(self) -> None:
        """Confirm that the copies that `moves` returned last were run: their tokens can be loaded. O(nodes)."""
        if self.state.host is not None:
            self.state.host.confirm()

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

        With recurrent state, the sequence has a row, which the next drain of `copies` restores, and holds the prefix up
        to its last snapshot. Raises OutOfStates, with nothing changed, if all rows are in use. An audit has no row, and
        holds all cached KV.
        Costs a match, a table of the path's blocks and, where the prefix ends inside a node, a split.
        """
        raw = as_bytes(tokens)
        if limit is not None and (type(limit) is not int or limit < 0):
            check_int("limit", limit, 0)
        if type(priority) is not int:
            check_int("priority", priority)
        if purpose not in PURPOSES:
            raise InvalidInput(f"purpose={purpose!r}: allowed are {', '.join(PURPOSES)}")
        space, node, matched = self._find(raw, namespace, limit)
        most = len(raw) // WIDTH if limit is None else min(len(raw) // WIDTH, limit)
        if self.state.snapshots is not None and purpose != "audit":
            return self._open_with_state(raw, namespace, most, priority, purpose, space, node, matched)
        return self._open(raw, namespace, most, priority, purpose, space, node, matched)

    def _open(
        self,
        raw: bytes,
        namespace: Hashable,
        limit: int,
        priority: int,
        purpose: Purpose,
        space: Namespace | None,
        node: Node | None,
        matched: int,
        row: RowState | None = None,
    ) -> Sequence:
        """Open a sequence on the first `matched` bytes of a text, which end in `node`, with the `row` of its state.

        Without `node` make the root, and without `space` the namespace.
        """
        state, requested = self.state, purpose == "request"
        tree = state.tree
        space = tree.add_namespace(namespace) if space is None else space
        node = tree.add_root(space) if node is None else node
        length, rest, ghost_owner = matched // WIDTH, raw[matched : limit * WIDTH], node.ghost_owner
        if requested:
            state.counters.query_tokens += len(raw) // WIDTH
            state.counters.hit_tokens += length
            if rest:
                state.count_regret(node, ghost_owner, length, rest)
        if length < node.end:
            node = tree.ending_at(node, length)
        path = tree.path(node)
        tree.hold(node)
        sequence = Sequence(state, node, length, BlockTable(tree.shared, tree.joined(path), node), row)
        sequence.namespace, sequence.priority = namespace, priority
        sequence.purpose, sequence.asked = purpose, len(raw) // WIDTH
        if purpose != "audit":
            if node.parent is not None:
                if node.demoted:
                    tree.undo_demote(node)
                state.index.touch(node)
                node.hits += requested
                if priority > node.priority:
                    node.priority = priority
            sequence.policy_data = state.index.open(tree, node, ghost_owner, rest, requested)
        for call in state.events.opened:
            call(sequence, path)
        return sequence

    def _open_with_state(
        self,
        raw: bytes,
        namespace: Hashable,
        limit: int,
        priority: int,
        purpose: Purpose,
        space: Namespace | None,
        node: Node | None,
        found: int,
    ) -> Sequence:
        """Open a sequence at the last snapshot before the end of the cached KV: `found` bytes, which end in `node`."""
        snapshots = self.state.snapshots
        assert snapshots is not None
        row = RowState(snapshots, len(raw) // WIDTH)
        matched, requested = found // WIDTH, purpose == "request"
        last = snapshots.last(node, matched)
        branches = node is not None and (matched < node.end or bool(node.children))
        owner = node.ghost_owner if node is not None else None if space is None else space.number
        top, position = (self.state.tree.find_root(space), 0) if last is None else (last.node, last.position)
        sequence = self._open(raw, namespace, limit, priority, purpose, space, top, position * WIDTH, row)
        row.begin(last, matched, counts=requested, diverged=matched < limit, branches=branches)
        if requested and matched < limit and owner is not None:
            self.state.count_regret(node, owner, matched, raw[found : limit * WIDTH])
        return sequence

    def pin(self, tokens: Tokens, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Keep the cached prefix of `tokens` until release() or for `ttl` seconds.

        The Pin says how much was cached. PinBudgetExceeded leaves everything as it was.
        """
        raw = as_bytes(tokens)
        if ttl is not None and not (_is_number(ttl) and ttl > 0):
            raise InvalidInput(f"ttl={ttl!r}: allowed are seconds > 0, or None for no limit")
        _, node, matched = self._find(raw, namespace)
        length = matched // WIDTH
        if node is None or not length:
            return Pin(None, None, 0, not raw, 0, None)
        tree, pins = self.state.tree, self.state.pins
        pins.expire()
        blocks = tree.table(node)[: -(-length // self.block_size)]
        pins.refuse_over_budget(blocks)
        node = tree.ending_at(node, length)
        return pins.add(node, length, matched == len(raw), len(blocks), ttl)

    def unpin(self, tokens: Tokens, namespace: Hashable = None) -> int:
        """Release the pins that end exactly at the end of `tokens`; returns their number. Costs a match + O(pins)."""
        raw = as_bytes(tokens)
        self.state.pins.expire()
        _, node, matched = self._find(raw, namespace)
        if node is None or not matched or not matched == len(raw) == node.end * WIDTH:
            return 0
        return self.state.pins.release_at(node)

    def pinned_length(self, pin: Pin, length: int) -> int:
        """Return how many of the first `length` tokens of a pinned text stay usable as long as the pin holds.

        A pin protects the last recurrent state on its path only, so a shorter part of its text may lose its own.
        """
        if self.state.snapshots is None:
            return min(length, pin.length)
        last = self.state.snapshots.last(pin.node, pin.length) if length >= pin.length else None
        return 0 if last is None else last.position

    def announce(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Announcement:
        """Evict the cached prefix of `tokens[:limit]` after all other blocks of its priority, until `close`.

        For a request that waits. All policies keep this order. Costs a match + O(depth + open announcements).
        """
        raw = as_bytes(tokens)
        refuse_negative(raw)
        if limit is not None:
            check_int("limit", limit, 0)
        space = self._namespaces.find(namespace) or self.state.tree.add_namespace(namespace)
        return self.state.announcements.add(raw if limit is None else raw[: limit * WIDTH], space)

    def demote(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> None:
        """Put the cached tokens of this text from `start` on at the cold end: they leave first, but not yet.

        They leave the device first, and then the host; only a `Hint` of `done` evicts from both at once. For a branch
        that is no longer needed, after its sequence was closed. It reaches up from the end of `tokens` as
        long as no sequence holds, no request hits and no other text branches off there. A later open undoes it. On the
        host, a run that begins before `start` stays where it is.
        """
        raw = as_bytes(tokens)
        check_int("start", start)
        _, node, matched = self._find(raw, namespace)
        if node is None or matched != node.end * WIDTH:
            return
        if node.below and self.state.host is not None:
            path = self.state.host.follow(node, raw, matched, pending=True)
            if path and path[-1][0].end == path[-1][0].start + path[-1][1] and not path[-1][0].children:
                self.state.host.demote([each for each, _ in path], start)
        elif not node.locks and not node.children and start < node.end:
            if start > node.start:
                self.state.tree.split(node, start - node.start)
            self.state.tree.demote(node, start)

    def evict(self, count: int) -> bool:
        """Evict cached prefixes until `count` blocks are free; returns False if there are fewer.

        It may free more than `evictable_blocks` promises: see there. Costs O(log leaves) for each evicted block.
        """
        check_int("count", count)
        self.state.pins.expire()
        return self.state.evict(count)

    def discard(self, tokens: Tokens, namespace: Hashable = None, start: int = 0) -> int:
        """Forget the cached tokens of this text from `start` on, and everything after them, in all tiers.

        Returns the blocks that this freed on the device. For KV that is wrong: it counts as no eviction, and leaves no
        ghosts. PrefixHeld is raised if a sequence or a pin holds any of it, or if a pending load reads it, and leaves
        everything as it was. O(nodes and blocks below), and a look at each open sequence.
        """
        raw = as_bytes(tokens)
        check_int("start", start, 0)
        self.state.pins.expire()
        _, node, matched = self._find(raw, namespace)
        return 0 if node is None else forgetting.discard(self.state, node, raw, matched, int(start))

    def clear(self, *, pins: bool = False) -> None:
        """Forget everything that no sequence or pin holds, host, ghosts and past text included. Counts as no eviction.

        With `pins`, release all pins first.
        """
        forgetting.clear(self.state, pins=pins)
        self.past_text.clear()
        waiting = (owners() for owners in self.state.tree.text_owners)
        self._namespaces.keep({space.number for space in self.state.tree.roots}.union(*waiting))

    def clear_namespace(self, namespace: Hashable = None) -> int:
        """Forget all of one namespace that no sequence or pin holds, its ghosts, past text and all tiers included.

        Returns the blocks that this freed on the device. Counts as no eviction, and changes no other namespace. Ghosts
        that follow a forgotten ghost cannot be found any more: they stay until they are the oldest. O(ghosts), and
        O(log leaves + its blocks) for each node of the namespace.
        """
        space = self._namespaces.find(namespace)
        self.state.pins.expire()
        if space is None:
            return 0
        self.past_text.clear_namespace(space)
        return forgetting.clear_namespace(self.state, space)

    # ---- helpers

    def _find(self, raw: bytes, value: Hashable, limit: int | None = None) -> tuple[Namespace | None, Node | None, int]:
        """The namespace of a caller's value, the deepest node that `raw` reaches there, and the bytes that match."""
        try:  # as in `Namespaces.find`, without a call
            space = self._namespaces.known.get(value)
        except Exception as error:
            raise refusal(value, error) from error
        tree = self.state.tree
        root = None if space is None else tree.roots.get(space)
        if root is None:
            refuse_negative(raw)
            return space, None, 0
        node, matched = tree.match(root, raw if limit is None else raw[: limit * WIDTH])
        refuse_negative(raw, matched)
        return space, node, matched


# Match from its fields. A call of the class takes 0.15 us more, of 5 for a match of 512 tokens.
_match: Callable[[tuple[object, ...]], Match] = partial(tuple.__new__, Match)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
