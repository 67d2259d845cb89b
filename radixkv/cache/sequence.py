"""One sequence's block table: extend, commit, fork, truncate, close.

Knows its tokens, its blocks and the node that it holds. Knows no tensor: a WritePlan says what somebody else must do.

`_node` is the deepest node that it holds; the tokens up to that node's end are published, those behind are in `_tail`.
Of the block table, the entries from `_own` on are referenced by the sequence itself: what is not published, and the
part-filled last block; the entries before are protected by the lock on the node alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.predictive.access_records import AccessRecord
from radixkv.cache.radix_tree import held_by_others
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, check_int, refuse_negative
from radixkv.cache.types import Node, Purpose
from radixkv.errors import InvalidInput, PlanPending, SequenceClosed

if TYPE_CHECKING:
    from types import TracebackType

    from radixkv.cache.prefix_cache import PrefixCache


class WritePlan(NamedTuple):
    """What to do before `commit`: copy whole blocks (source, target), then write the new tokens' KV to `slots`."""

    slots: npt.NDArray[np.int64]  # [new tokens], block * block_size + offset
    copies: list[tuple[int, int]]  # at most one; a step's copies may run together, in any order, before its writes


@dataclass(frozen=True, slots=True)
class Hint:
    """What its user knows about a sequence's future when closing it."""

    done: bool = False  # the tail that nobody shares is first to go
    kind: str | None = None  # why the turn ended ("tool_call", "end_turn", ...): for policies that learn
    output_length: int | None = None  # generated tokens: for policies that learn
    returns_in: float | None = None  # seconds until it is expected back: for policies that learn
    priority: int = 0  # higher stays longer

    def __post_init__(self) -> None:
        check_int("priority", self.priority)


class Sequence:
    """Holds a cached prefix and grows it. Made by PrefixCache.open and by fork; release it with close (or `with`)."""

    __slots__ = (
        "_cache",
        "_forked",
        "_node",
        "_own",
        "_planned",
        "_source",
        "_table",
        "_tail",
        "asked",
        "cached_length",
        "closed",
        "id",
        "length",
        "namespace",
        "priority",
        "purpose",
        "use",
    )

    def __init__(self, cache: PrefixCache, id: int, node: Node, length: int, table: array[int]) -> None:
        self._cache = cache
        self._node = node
        self._table = table
        self._own = length // cache.block_size
        self._tail = bytearray()
        self._planned: bytes | None = None  # the tokens of the pending plan
        self._source = -1  # the block that it copies from, held until it ends; -1 for none
        self._forked = False
        self.id = id
        self.length = length  # tokens committed
        self.cached_length = length  # tokens found in the cache when it was opened
        self.asked = length  # tokens that it was opened for: its prompt
        self.namespace: Hashable = None
        self.priority = 0
        self.purpose: Purpose = "request"
        self.use: AccessRecord | None = None  # what a policy that learns calls it
        self.closed = False

    # ---- reading

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """What is committed: the caller's own int32 array [length]. O(length)."""
        self._refuse_closed()
        raw = bytearray().join([node.key for node in self._cache._tree.path(self._node)])
        return np.frombuffer(raw + self._tail, np.int32)

    @property
    def unshared_length(self) -> int:
        """Committed tokens that no other open sequence and no pin holds, so that they may be lost when it is closed.

        What a fork holds, too, but nobody published counts: whoever comes back cannot find it. O(depth), and a match of
        what is not published.
        """
        self._refuse_closed()
        return self.length - held_by_others(self._cache._tree, self._node, self._tail)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block of each logical block, planned ones included: the caller's own int32 array. O(blocks)."""
        self._refuse_closed()
        return np.array(self._table, np.int32)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "planned" if self._planned is not None else "open"
        return f"<Sequence {self.id}: {self.length} tokens, {self.cached_length} cached, {state}>"

    # ---- verbs

    def extend(self, tokens: Tokens) -> WritePlan:
        """Plan the KV of the next `tokens`. O(new tokens).

        The plan names the slots to write and, where the last block must not be written in place, the block to copy
        first. OutOfBlocks, InvalidTokens, PlanPending and SequenceClosed leave everything as it was.
        """
        if self.closed or self._planned is not None:
            self._refuse_pending()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        pool, table = self._cache._pool, self._table
        start = self.length
        end = start + len(raw) // WIDTH
        source = self._reserve(start, end) if raw else -1
        self._planned, self._source = raw, source
        copies = [(source, table[start // pool.block_size])] if source >= 0 else []
        return WritePlan(_slots(table, start, end, pool), copies)

    def commit(self, publish: bool = True) -> None:
        """The plan was executed: its tokens count, and with `publish` others can match them. O(new tokens).

        Without a plan it publishes what was not yet published. What an audit commits is never published.
        """
        raw = self._planned
        if raw:
            count = len(raw) // WIDTH
            self._tail += raw
            self.length += count
            self._cache._counters.committed_tokens += count
            if self._source >= 0:
                self._cache._tree.shared.release(self._source)
        elif raw is None:
            self._refuse_closed()
        self._planned = None
        if publish and self._tail and self.purpose != "audit":
            self._publish()

    def fork(self) -> Sequence:
        """Another sequence with the same tokens, sharing every block; `cached_length` is this one's. O(blocks)."""
        self._refuse_pending()
        cache = self._cache
        twin = cache._sequence(self._node, self.length, self._table[:])
        cache._tree.hold(self._node)
        twin._own, twin._tail = self._own, self._tail[:]
        twin.cached_length, twin.namespace = self.cached_length, self.namespace
        twin.priority, twin.purpose, twin.asked = self.priority, self.purpose, self.asked
        if self.use is not None:
            twin.use = self.use.forked()
        for block in self._table[self._own :]:
            cache._pool.share(block, idle=False, sole_idle=False, deepest_owner=None)
        if self._tail:
            self._forked = twin._forked = True
        cache._forked(twin.id, self.id)
        return twin

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; what was published stays in the tree. O(blocks dropped + depth).

        Behind a cut inside a block that published tokens share, the next `extend` takes a copy, so one more block.
        """
        self._refuse_pending()
        check_int("length", length)
        if not 0 <= length <= self.length:
            raise InvalidInput(f"truncate({length!r}): allowed are 0..{self.length}, the tokens committed")
        if length == self.length:
            return
        tree, size = self._cache._tree, self._cache.block_size
        published = self.length - len(self._tail) // WIDTH
        if length >= published:
            del self._tail[(length - published) * WIDTH :]
            self._release_own(-(-int(length) // size))
        else:
            self._tail.clear()
            self._release_own(self._own)
            held = self._node
            self._node = node = _ancestor_ending_at(self._cache, held, int(length))
            self._own = int(length) // size
            del self._table[self._own :]
            if length % size:
                self._table.append(node.blocks[-1])
                self._cache._share_last(node, int(length))
            tree.hold(node)
            tree.unhold(held)
        self.length = int(length)
        self.cached_length = min(self.cached_length, self.length)

    def close(self, hint: Hint | None = None) -> None:
        """Let go of everything; a pending plan is void and must not be executed. What is published stays until evicted.

        May be called twice.
        """
        if self.closed:
            return
        if hint is not None and not isinstance(hint, Hint):
            raise InvalidInput(f"close({hint!r}): allowed is a Hint, or None")
        self.closed = True
        cache, node = self._cache, self._node
        if self._planned is not None:
            self._planned = None
            if self._source >= 0:
                cache._tree.shared.release(self._source)
        self._release_own(self._own)
        cache._closed(self, node, hint)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- publishing

    def _publish(self) -> None:
        """Hand the tail to the tree: follow what others published, then grow the held leaf or append a new one."""
        cache = self._cache
        tree, size = cache._tree, cache.block_size
        if self._node.children:
            self._follow()
        if self._tail:
            node, table = self._node, self._table
            first, part = divmod(node.end, size)
            sole = node.locks == 1 and node.direct_holders == 1 and not node.children and node.parent is not None
            owned = sole and part > 0 and node.blocks[-1] == table[first]
            if owned and first == self.length // size:  # all within the part-filled block that both own
                tree.lengthen(node, self._tail)
            else:
                if sole:
                    tree.grow(node, self._tail, table[first:])
                else:
                    self._node = node = tree.append(node, self._tail, table[first:])
                    node.priority = self.priority
                self._hand_over(node, first, owned)
                node.may_share_any_block |= self._forked
                if not sole:
                    self._settle_above(node)
            self._tail = bytearray()
        if self.priority > self._node.priority:
            self._node.priority = self.priority
        self._forked = False

    def _hand_over(self, node: Node, first: int, owned: bool) -> None:
        """The node owns table[first:] from now on (`owned`: the first it did before).

        The sequence keeps a reference to its part-filled last block only.
        """
        pool, table = self._cache._pool, self._table
        self._own, partial = divmod(self.length, pool.block_size)
        if owned:  # it lies before the part-filled block now: the node's reference is enough
            pool.release(table[first], idle=False)
        if partial:
            pool.share(table[-1], idle=False, sole_idle=False, deepest_owner=node)
        entry = pool.shared.get(table[first])
        if entry is not None:
            entry.deepest_owner = node

    def _settle_above(self, node: Node) -> None:
        """A new child stands below a node that may now be redundant, in its last block or altogether."""
        tree = self._cache._tree
        parent = node.parent
        assert parent is not None
        if node.start % self._cache.block_size and parent.blocks[-1] != node.blocks[0]:
            tree.shared.dedupe_tail_block(parent)
        tree.merge(parent)

    def _follow(self) -> None:
        """Walk down what others published of the tail meanwhile, and take their full blocks in exchange for our own."""
        tree, size = self._cache._tree, self._cache.block_size
        raw = bytes(self._tail)
        held = self._node
        node, matched = tree.match(held, raw)
        if not matched:
            return
        at = held.end + matched // WIDTH
        if at < node.end:
            node = tree.split(node, at - node.start)
        tree.hold(node)
        tree.want(node)
        self._node = node
        del self._tail[:matched]
        theirs = tree.table(node, held)
        full = at // size
        mine = self._table[self._own : full]
        self._table[self._own : full] = theirs[: full - self._own]
        tree.shared.release_run(mine)
        self._own = full
        tree.unhold(held)
        tree.merge(held)

    # ---- blocks

    def _reserve(self, start: int, end: int) -> int:
        """Make the table reach to `end`. Returns the block to copy its part-filled last block from, or -1."""
        cache, table = self._cache, self._table
        fill, size = cache._pool.fill, cache.block_size
        offset, rest = start % size, end % size
        need = -(-end // size) - len(table)
        source = -1
        if offset:
            last = table[-1]
            if offset == fill.get(last, size) or self._alone(last):
                new = cache._take(need) if need else None
                cache._pool.reserve(last, size if need or not rest else rest)
            else:
                need += 1
                new = cache._take(need)
                source, table[-1] = last, new.pop(0)
                cache._copied(self.id, source, table[-1])
        else:
            new = cache._take(need)
        if new:
            table += new
        if need and rest:
            fill[table[-1]] = rest
        return source

    def _reads(self, blocks: Set[int], start: int) -> bool:
        """Whether one of these blocks, which no lock of ours protects, has a committed token at or behind `start`."""
        if self.length <= start:
            return False
        own = self._table[max(self._own, start // self._cache.block_size) :]
        copying = self._planned is not None and self._source in blocks
        return copying or not blocks.isdisjoint(own)

    def _alone(self, block: int) -> bool:
        """Whether the only owners of our last block are this sequence and nodes of its own path."""
        cache = self._cache
        entry = cache._pool.shared.get(block)
        if entry is None:
            return True
        above = cache._tree.shared.owners_above(self._node, block, self.length // cache.block_size)
        return entry.owners == 1 + len(above)

    def _release_own(self, start: int) -> None:
        """Give up our references to table[start:], last block first."""
        own = self._table[start:]
        del self._table[start:]
        if own:
            self._cache._tree.shared.release_run(own)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise SequenceClosed("this sequence was closed")

    def _refuse_pending(self) -> None:
        self._refuse_closed()
        if self._planned is not None:
            raise PlanPending("the last plan of this sequence is pending: commit() it once it was executed, or close()")


def _slots(table: array[int], start: int, end: int, pool: BlockPool) -> npt.NDArray[np.int64]:
    """Flat slots of the tokens [start, end)."""
    size = pool.block_size
    if end - start == 1:
        return np.array((table[-1] * size + start % size,), np.int64)
    first, offset = divmod(start, size)
    blocks = table[first:]
    if pool.is_run(blocks):
        base = blocks[0] * size + offset if blocks else 0
        return np.arange(base, base + end - start)
    bases = pool.bases.take(np.frombuffer(blocks, np.int32))
    slots: npt.NDArray[np.int64] = np.add.outer(bases, pool.offsets).ravel()
    return slots[offset : offset + end - start]


def _ancestor_ending_at(cache: PrefixCache, node: Node, length: int) -> Node:
    """The node of this path (or its root) whose end is `length`, split off if need be."""
    while node.start >= length and node.parent is not None:
        node = node.parent
    return node if node.end == length else cache._tree.split(node, length - node.start)
