"""The facade of a prefix cache for models with recurrent state."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, cast

from radixkv.cache.events import Observer
from radixkv.cache.namespaces import Namespace
from radixkv.cache.pins import Pin
from radixkv.cache.prefix_cache import Limits, PrefixCache, check_limit, check_positive
from radixkv.cache.recurrent import invariants
from radixkv.cache.recurrent.sequence import Spacing, StatefulSequence
from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.recurrent.snapshots import Snapshots
from radixkv.cache.recurrent.tree import StatefulTree
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes
from radixkv.cache.types import Explanation, Match, Purpose


class StatefulCacheState(CacheState):
    """The parts of a cache whose tree has snapshots."""

    __slots__ = ()

    tree_class = StatefulTree
    tree: StatefulTree


class StatefulPrefixCache(PrefixCache):
    """A prefix cache for models with recurrent state, with `rows` running rows and `snapshots` >= 0 snapshot slots.

    A cached prefix can be used up to its last snapshot; the tokens after it are computed again, and `commit` uses the
    cached blocks for them. `copies` is the queue of copies between slots, which the model drains before each forward.
    `spacing` says where snapshots may lie; other arguments are those of PrefixCache. Policies that learn see no reuse
    of KV whose tokens are computed again.

    >>> cache = StatefulPrefixCache(num_blocks=64, block_size=16, rows=2, snapshots=4)
    >>> first = cache.open(range(100))
    >>> first.snapshot_at(80)
    >>> plan = first.extend(range(100))
    >>> plan.state.row.number, plan.state.snapshots
    (0, [StateSnapshot(tokens=80, slot=2)])
    >>> first.commit()  # after KV and state were written
    >>> cache.open([*range(90), 7]).length, cache.copies.drain()
    (80, [(-1, 0), (2, 1)])
    """

    state_class = StatefulCacheState
    sequence_class = StatefulSequence
    state: StatefulCacheState

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        eviction: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        *,
        rows: int,
        snapshots: int,
        spacing: Spacing | None = None,
        pin_budget: float = 0.5,
        namespace_limits: Limits = None,
    ) -> None:
        check_positive("rows", rows)
        check_limit(snapshots)
        options: dict[str, Any] = {"pin_budget": pin_budget, "namespace_limits": namespace_limits}
        super().__init__(num_blocks, block_size, eviction, clock, observer, **options)
        self.copies = StateSlots(int(rows), int(snapshots))
        self.snapshots = Snapshots(self.copies, self.state.pins.nodes)
        self.state.tree.snapshots = self.snapshots
        self._spacing = Spacing() if spacing is None else spacing

    # ---- reading

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """The longest prefix of `tokens` with cached KV and state; `matched` counts the tokens with cached KV."""
        return super().match(tokens, namespace)

    def _match(self, raw: bytes, space: Namespace | None) -> Match:
        node, matched = self._find(raw, space)
        last = self.snapshots.last(node, matched // WIDTH)
        usable = 0 if last is None else last.position
        found = super()._match(raw[: usable * WIDTH], space)
        return found._replace(matched=matched // WIDTH)

    def explain(self, tokens: Tokens, namespace: Hashable = None, limit: int | None = None) -> Explanation:
        """The prefix that `open` would find now, and why the match, or the state, ends there."""
        return super().explain(tokens, namespace, limit)

    def _explain(self, raw: bytes, space: Namespace | None, limit: int | None) -> Explanation:
        explanation = super()._explain(raw, space, limit)
        node, _ = self._find(raw, space)
        last = self.snapshots.last(node, explanation.length)
        usable = 0 if last is None else last.position
        if usable == explanation.length or explanation.reason == "no_state":
            return explanation
        return replace(explanation, length=usable, reason="no_state", kv_reason=explanation.reason)

    def _stats(self) -> dict[str, int]:
        slots = self.copies
        return super()._stats() | {
            "state_rows": slots.num_rows,
            "state_rows_used": slots.rows_in_use,
            "state_slots": slots.num_snapshots,
            "state_slots_used": slots.num_snapshots - len(slots.free),
            "evicted_states": self.snapshots.evicted,
        }

    def check(self) -> None:
        """Recount everything; AssertionError names the broken invariant. O(blocks + tokens): for tests."""
        super().check()
        invariants.check(self.state, self.copies, self.snapshots)

    def pinned_length(self, pin: Pin, length: int) -> int:
        """Return how many of the first `length` tokens of a pinned text stay usable as long as the pin holds.

        A pin protects the last state on its path only, so a shorter part of its text may lose its own.
        """
        last = self.snapshots.last(pin.node, pin.length) if length >= pin.length else None
        return 0 if last is None else last.position

    # ---- holding

    def open(
        self,
        tokens: Tokens,
        namespace: Hashable = None,
        limit: int | None = None,
        priority: int = 0,
        *,
        purpose: Purpose = "request",
    ) -> StatefulSequence:
        """Return a sequence that holds the longest prefix with cached KV and state, at most `limit` tokens of it.

        Its row is restored by the next drain of `copies`. An audit holds all cached KV, and has no row. OutOfStates
        leaves everything as it was.
        """
        if purpose == "audit":
            return cast(StatefulSequence, super().open(tokens, namespace, limit, priority, purpose=purpose))
        raw = as_bytes(tokens)
        check_limit(limit)
        space = self._namespaces.find(namespace)
        node, found = self._find(raw, space, limit)
        self.copies.refuse_full()
        matched, asked = found // WIDTH, len(raw) // WIDTH
        owner = space if node is None else node.ghost_owner
        last = self.snapshots.last(node, matched)
        most = asked if limit is None else min(asked, limit)
        position = 0 if last is None else last.position
        branches = node is not None and (matched < node.end or bool(node.children))
        top = self.state.tree.find_root(space) if last is None else last.node
        opened = self._open(raw, namespace, space, top, position * WIDTH, position, priority, purpose)
        sequence = cast(StatefulSequence, opened)
        sequence.begin(self._spacing, last, matched, diverged=matched < most, branches=branches)
        if purpose == "request" and matched < most and owner is not None:
            self._count_regret(node, owner, matched, raw[found : most * WIDTH])
        return sequence
