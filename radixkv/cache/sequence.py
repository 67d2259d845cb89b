"""One sequence's block table: extend, load, commit, fork, truncate, close.

`node` is the deepest node that the sequence holds. The tokens up to that node's end are published; later ones are in
`_tail`. The sequence itself references the entries of its block table from `_own` on: unpublished tokens and the
part-filled last block. Earlier entries are protected by the lock on the node alone.

`row_state` is its recurrent state, for models that have one, and `loading` a pending load from host memory. Both are
None for most sequences; the guards that ask for them cost less than null objects (13 ns each, a call 41).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Set
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.block_pool import BlockTable
from radixkv.cache.host.loading import Loadable, find, refuse_full
from radixkv.cache.readings import held_length
from radixkv.cache.recurrent.row import RowState
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import UNKNOWN, WIDTH, Tokens, as_bytes, check_int, refuse_negative
from radixkv.cache.types import Hint, Load, Loading, Node, Purpose, WritePlan
from radixkv.errors import InvalidInput, PlanPending, SequenceClosed, UnknownToken
from radixkv.sizing.recurrent_state import StateRow


class Sequence:
    """Holds a cached prefix and grows it. Made by PrefixCache.open and by fork; release it with close (or `with`)."""

    __slots__ = (
        "_forked", "_planned", "_source", "_state", "_table", "_tail", "_unknown", "asked", "cached_length", "closed",
        "id", "length", "loading", "namespace", "node", "policy_data", "priority", "purpose", "row_state",
    )  # fmt: skip

    def __init__(
        self, state: CacheState, node: Node, length: int, table: BlockTable, row_state: RowState | None = None
    ) -> None:
        self._state = state
        self.node = node  # for the cache's own modules
        self._table = table
        self._tail = bytearray()
        self._planned: bytes | None = None  # the tokens of the pending plan
        self._source = -1  # the block that the plan copies from, held until the plan ends; -1 for none
        self._forked = False
        self._unknown = -1  # the position of the token that is not known yet; -1 for none
        self.row_state = row_state  # for the cache's own modules
        self.loading: Loading | None = None  # the pending load
        self.length = length  # tokens committed
        self.cached_length = length  # tokens found in the cache when it was opened
        self.asked = length  # tokens that it was opened for: its prompt
        self.namespace: Hashable = None
        self.priority = 0
        self.purpose: Purpose = "request"
        self.policy_data: Any = None  # the eviction policy's own
        self.closed = False
        state.counters.opened_sequences += 1
        self.id = state.counters.opened_sequences
        state.open[self.id] = self

    # ---- reading

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The committed tokens: the caller's own int32 array [length], -1 for an unknown one. O(length)."""
        self._refuse_closed()
        raw = bytearray().join([node.key for node in self._state.tree.path(self.node)])
        return np.frombuffer(raw + self._tail, np.int32)

    @property
    def follows(self) -> bool:
        """Whether others have published text after its own: it takes their full blocks where it publishes the same."""
        return bool(self.node.children)

    @property
    def unshared_length(self) -> int:
        """Committed tokens that no other open sequence and no pin holds, so that closing may lose them.

        Unpublished tokens that only a fork holds count too, as no later `open` can find them. O(depth), and a match of
        the unpublished tokens.
        """
        self._refuse_closed()
        return self.length - held_length(self._state.tree, self.node, self._tail)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block of each logical block, planned ones included: the caller's own int32 array. O(blocks)."""
        if self.closed:
            self._refuse_closed()
        return np.array(self._table.blocks, np.int32)

    @property
    def has_plan(self) -> bool:
        """Whether a plan is pending."""
        return self._planned is not None

    @property
    def has_unknown(self) -> bool:
        """Whether a token is not known yet: see `extend_unknown`."""
        return self._unknown >= 0

    def own_blocks(self) -> array[int]:
        """The blocks that the sequence references itself, including the source of a pending copy. O(blocks)."""
        blocks = self._table.blocks[self._table.own :]
        if self._planned is not None and self._source >= 0:
            blocks.append(self._source)
        return blocks

    def reads(self, blocks: Set[int], start: int) -> bool:
        """Whether one of these blocks, not locked by this sequence, has a committed token at or after `start`."""
        if self.length <= start:
            return False
        own = self._table.blocks[max(self._table.own, start // self._state.pool.block_size) :]
        copying = self._planned is not None and self._source in blocks
        return copying or not blocks.isdisjoint(own)

    @property
    def row(self) -> StateRow | None:
        """The row of recurrent state; None for other models, for an audit, and after close."""
        return None if self.row_state is None else self.row_state.row

    def __repr__(self) -> str:
        state = "closed" if self.closed else "planned" if self._planned is not None else "open"
        return f"<Sequence {self.id}: {self.length} tokens, {self.cached_length} cached, {state}>"

    # ---- verbs

    def extend(self, tokens: Tokens) -> WritePlan:
        """Plan the KV of the next `tokens`. O(new tokens).

        The plan names the slots to write and, where the last block must not be written in place, the block to copy
        first; of models with recurrent state, also the chunk's row and snapshots. OutOfBlocks, InvalidTokens,
        PlanPending and SequenceClosed leave everything as it was.
        """
        if self.closed or self._planned is not None:
            self._refuse_pending()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        table, start = self._table, self.length
        end, source = start + len(raw) // WIDTH, -1
        if raw:
            need, source = table.reserve(self.node, start, end)
            if need:
                if need > len(self._state.pool.free):
                    self._state.make_room(need)
                table.grow(start, end, need, source)
        copies: list[tuple[int, int]] = []
        if source >= 0:
            copies.append((source, table.blocks[start // self._state.pool.block_size]))
            self._state.counters.copied_blocks += 1
            for call in self._state.events.copied:
                call(self, *copies[0])
        self._planned, self._source = raw, source
        state = None if self.row_state is None or self.loading is not None else self.row_state.plan(start, end)
        return _plan((table.slots(start, end), copies, state))

    def extend_unknown(self) -> WritePlan:
        """Plan the KV of one token that is still being sampled; `resolve` sets it later. O(1).

        A sequence has at most one such token, which no match finds and no verb publishes. A fork has it too, and
        resolves it to the same value. `truncate` and `close` may drop it. Raises UnknownToken, and as `extend`.
        """
        if self._unknown >= 0:
            self._refuse_unknown()
        plan = self.extend(_ANY_TOKEN)
        self._planned, self._unknown = UNKNOWN, self.length
        return plan

    def lengthen(self, plan: WritePlan, tokens: Tokens, spare: int = 0) -> WritePlan:
        """Add `tokens`, such as a draft, to the end of the pending `plan`; return the plan that replaces it.

        Takes fewer tokens if more would evict or copy a block, or leave fewer than `spare` blocks free. O(new tokens).
        Raises InvalidTokens, and SequenceClosed, with nothing changed.
        """
        self._refuse_closed()
        raw, planned, pool, table = as_bytes(tokens), self._planned, self._state.pool, self._table
        refuse_negative(raw)
        assert planned, "tokens are added to a plan that writes some"
        start = self.length + len(planned) // WIDTH
        room = len(table.blocks) * pool.block_size - start + max(len(pool.free) - spare, 0) * pool.block_size
        raw = raw[: room * WIDTH]
        end = start + len(raw) // WIDTH
        if self._forked or not raw:
            return plan
        need, source = table.reserve(self.node, start, end)
        if source >= 0:
            return plan
        if need:
            table.grow(start, end, need, source)
        self._planned = planned + raw
        return plan._replace(slots=table.slots(self.length, end))

    def resolve(self, token: int) -> None:
        """Set the unknown token, planned or committed. O(1). Raises InvalidTokens; UnknownToken if there is none."""
        raw = as_bytes([token])
        refuse_negative(raw)
        if self.closed or self._unknown < 0:
            self._refuse_closed()
            raise UnknownToken("this sequence has no unknown token")
        if self._unknown >= self.length:
            self._planned = raw
        else:
            at = (self._unknown - self.length) * WIDTH + len(self._tail)
            self._tail[at : at + WIDTH] = raw
        self._unknown = -1

    def snapshot_at(self, position: int, *, shared: bool = False) -> None:
        """Take a snapshot of recurrent state when the sequence computes this position; others without state do nothing.

        `shared` says that other texts branch there; else it is the end of the last message before the reply. It may
        come after `extend`, if the plan was not executed yet. A position that was computed before, or that finds no
        slot, is left out.
        """
        if self.row_state is not None:
            check_int("position", position)
            end = None if self._planned is None else self.length + len(self._planned) // WIDTH
            self.row_state.snapshot_at(int(position), self.length, end, shared=shared)

    def loadable(self, tokens: Tokens) -> int:
        """Count the leading `tokens`, which would follow the committed ones, whose KV could be loaded from the host.

        With recurrent state, the count ends at a snapshot, and includes tokens before it whose KV is on the device.
        0 while a plan is pending or tokens are unpublished, and without a host tier. O(tokens compared) by memcmp +
        O(nodes).
        """
        self._refuse_closed()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        return self._loadable(raw).tokens

    def _loadable(self, raw: bytes) -> Loadable:
        if self._planned is not None or self._tail:
            return Loadable(self.node)
        return find(self._state, self.node, self.length, raw, restores=self.row_state is not None)

    def load(self, tokens: Tokens) -> Load:
        """Plan to copy the KV of these tokens from the host; run it after the step's copies, then `commit`.

        With recurrent state, `tokens` end at a snapshot, which the row is set to. Their KV on the device is held, not
        copied: the plan starts after it, and so does `length` until `commit`. The host keeps the KV unchanged until
        `commit` or `close`. Raises InvalidInput if not all of the tokens are loadable, and OutOfBlocks, PlanPending and
        SequenceClosed as `extend` does. All leave everything as it was. O(tokens).
        """
        self._refuse_pending()
        raw = as_bytes(tokens)
        refuse_negative(raw)
        found, asked = self._loadable(raw), len(raw) // WIDTH
        if found.tokens < asked:
            raise InvalidInput(
                f"load of {asked} tokens: {found.tokens} of them are resident on the host, see loadable()"
            )
        slots, reads = found.sources(self._state.pool.block_size)
        plan = self._extend_by_load(found.node, raw[found.at :], reads)
        if found.runs and self._state.host is not None and self.purpose != "audit":
            self._state.host.touch([node for node, _ in found.runs])
        if self.row_state is not None and found.state is not None:
            self.row_state.load(found.state, found.state.position, counts=self.purpose == "request")
        return Load(plan, slots)

    def _extend_by_load(self, node: Node, raw: bytes, reads: dict[int, int]) -> WritePlan:
        """Move the hold to `node`, below the present one or the same, and plan `raw` after it, which a load writes."""
        state, tree = self._state, self._state.tree
        before, length, table = self.node, self.length, self._table
        moves = node is not before
        if moves:
            refuse_full(state, node, len(raw) // WIDTH)
        self.loading = Loading(length, reads)
        if state.host is not None:
            state.host.blocks.hold(reads)  # before extend, whose evictions must not free these blocks
        if moves:
            tree.hold(node)
            tree.undo_demote(node)
            self.node, self.length, self._table = node, node.end, BlockTable(tree.shared, tree.table(node), node)
        try:
            plan = self.extend(np.frombuffer(raw, np.int32))
        except BaseException:
            if moves:
                self._table.release(self._table.own)
                self.node, self.length, self._table = before, length, table
                tree.unhold(node)
            self.loading = None
            if state.host is not None:
                state.host.blocks.release(reads)
            raise
        if moves:
            table.release(table.own)
            tree.unhold(before)
        return plan

    def commit(self, publish: bool = True) -> None:
        """Count the tokens of the executed plan and, with `publish`, let others match them. O(new tokens).

        Without a plan it publishes the tokens that are not published yet. An audit never publishes. A plan counts as
        executed when the device will run it before all that is launched later. Publishing also frees the host blocks of
        loaded tokens. Raises UnknownToken, with nothing changed, if it would publish an unknown token.
        """
        if self.loading is not None:
            self._commit_load(self.loading, publish)
            return
        if self._unknown >= 0 and publish and self.purpose != "audit":
            self._refuse_unknown()
        raw = self._planned
        if raw:
            count = len(raw) // WIDTH
            self._tail += raw
            self.length += count
            self._state.counters.committed_tokens += count
            if self._source >= 0:
                self._state.tree.shared.release(self._source)
        elif raw is None and self.closed:
            self._refuse_closed()
        self._planned = None
        if publish and self._tail and self.purpose != "audit":
            self._publish(self.length)
        if self.row_state is not None:
            self.row_state.attach(self.node)

    def _commit_load(self, loading: Loading, publish: bool) -> None:
        """Commit the tokens of a load: they were computed and committed before, and are hits of a request now."""
        state, host, start, copied_from = self._state, self._state.host, loading.start, self.length
        assert host is not None
        self.loading = None
        host.blocks.release(loading.reads)
        self.commit(publish=False)
        gained, copied = self.length - start, self.length - copied_from
        requested = self.purpose == "request"
        state.counters.committed_tokens -= copied
        state.counters.hit_tokens += gained * requested
        host.loaded_tokens += copied
        if self.cached_length == start:
            self.cached_length += gained
        if publish and self._tail and self.purpose != "audit":
            self._publish(self.length, hit=requested)
        path = state.tree.path(self.node) if publish and state.events.loaded else []
        for call in state.events.loaded:
            call(self, start, copied, path)

    def publish(self, length: int) -> None:
        """Let others match the committed tokens up to `length`, and keep later ones unpublished. O(unpublished tokens).

        A plan may be pending. An audit never publishes. Raises InvalidInput, and UnknownToken if one is among them.
        """
        self._refuse_closed()
        self._refuse_beyond("publish", length)
        if 0 <= self._unknown < length:
            self._refuse_unknown()
        if length > self.node.end and self.purpose != "audit":
            blocks, last = self._table.blocks, self.length // self._state.pool.block_size
            planned = blocks[last:]
            if self._planned is not None and self._source >= 0:  # it may be voided: the tree gets the source
                blocks[last] = self._source
            self._publish(int(length))
            blocks[last:] = planned
        if self.row_state is not None:
            self.row_state.attach(self.node)

    def fork(self) -> Sequence:
        """Return another sequence with the same tokens and `cached_length`, sharing every block. O(blocks).

        Of a model with recurrent state it has a copy of the row; raises OutOfStates if there is none, and nothing
        changes.
        """
        self._refuse_pending()
        state = self._state
        row = self.row_state and self.row_state.fork()
        twin = Sequence(state, self.node, self.length, self._table.fork(), row)
        state.tree.hold(self.node)
        twin._tail, twin._unknown = self._tail[:], self._unknown
        twin.cached_length, twin.namespace = self.cached_length, self.namespace
        twin.priority, twin.purpose, twin.asked = self.priority, self.purpose, self.asked
        twin.policy_data = state.index.fork(self.policy_data)
        if self._tail:
            self._forked = twin._forked = True
        for call in state.events.forked:
            call(twin, self)
        return twin

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on; published tokens stay in the tree. O(blocks dropped + depth).

        With recurrent state, also the tokens after the last snapshot at or before `length` are dropped. After a cut
        inside a block that published tokens share, the next `extend` takes one more block for a copy, but not after a
        cut of tokens that were neither published nor forked.
        """
        self._refuse_pending()
        self._refuse_beyond("truncate", length)
        if length == self.length:
            return
        if self.row_state is not None:
            length = self.row_state.restore(self.node, int(length))
        tree = self._state.tree
        published = self.length - len(self._tail) // WIDTH
        if length >= published:
            del self._tail[(int(length) - published) * WIDTH :]
            self._table.cut(int(length), self.length, reserved=self._forked)  # what a fork reads is not written next
        else:
            self._tail.clear()
            self._table.release(self._table.own)
            held, self.node = self.node, tree.ending_at(self.node, int(length))
            self._table.return_to(self.node, int(length))
            tree.hold(self.node)
            tree.unhold(held)
        if self._unknown >= length:
            self._unknown = -1
        self.length = int(length)
        self.cached_length = min(self.cached_length, self.length)

    def close(self, hint: Hint | None = None) -> None:
        """Release all blocks and locks. Published tokens stay until evicted; a pending plan must not be executed.

        Later calls do nothing.
        """
        if self.closed:
            return
        if hint is not None and not isinstance(hint, Hint):
            raise InvalidInput(f"close({hint!r}): allowed is a Hint, or None")
        if hint is not None and type(hint.priority) is not int:
            check_int("priority", hint.priority)
        self.closed = True
        state, node = self._state, self.node
        tree = state.tree
        planned = self._planned is not None
        if planned:
            self._planned = None
            if self._source >= 0:
                tree.shared.release(self._source)
        self._table.release(self._table.own)
        del state.open[self.id]
        state.counters.closed_sequences += 1
        if self.purpose == "audit":
            hint = None
        elif node.parent is not None:
            state.index.touch(node)
            if hint is not None and hint.priority > node.priority:
                node.priority = hint.priority
            state.index.close(tree, node, self.policy_data, self.length - self.asked, hint)
        tree.unhold(node)
        if hint is not None and hint.done and (self.cached_length < node.end or node.hits <= 1):
            tree.demote(node, done=True)  # unless other requests published or hit it
        for call in state.events.closed:
            call(self)
        if self.loading is not None and state.host is not None:
            state.host.blocks.release(self.loading.reads)
            self.loading = None
        if self.row_state is not None:
            self.row_state.close(node, self.length, planned=planned, done=hint is not None and hint.done)
            self.row_state = None

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- publishing

    def _publish(self, end: int, *, hit: bool = False) -> None:
        """Hand the tail up to `end`, loaded by a request if `hit`, to the tree: follow, then grow or append a leaf."""
        state, node, table = self._state, self.node, self._table
        tree, size, host = state.tree, state.pool.block_size, state.host
        start = node.end
        if node.children:
            self._follow(end)
            node = self.node
        begin = node.end
        if begin < end:
            first = begin // size
            raw, self._tail = self._tail, bytearray()
            if end < self.length:
                cut = (end - begin) * WIDTH
                raw, self._tail = raw[:cut], raw[cut:]
            sole = node.locks == 1 and node.direct_holders == 1 and not node.children and node.parent is not None
            owned = sole and begin % size > 0 and node.blocks[-1] == table.blocks[first]
            if owned and first == end // size:  # all within the part-filled block that both own
                tree.lengthen(node, raw)
            else:
                blocks = table.blocks[first : -(-end // size)]
                if sole:
                    node.may_share_any_block |= self._forked  # first: the node above may take the new first block
                    tree.grow(node, raw, blocks)
                else:
                    self.node = node = tree.append(node, raw, blocks)
                    node.may_share_any_block = self._forked
                    node.priority = self.priority
                table.hand_over(node, blocks, end, owned=owned)
                if not sole:
                    tree.settle_above(node)
        if self.priority > node.priority:
            node.priority = self.priority
        self._forked = self._forked and bool(self._tail)
        if host is not None and host.count:
            host.settle(node, start, hit=hit)

    def _follow(self, end: int) -> None:
        """If others published part of the tail up to token `end`, move to their nodes and use their full blocks."""
        tree, held = self._state.tree, self.node
        node, matched = tree.match(held, bytes(self._tail[: (end - held.end) * WIDTH]))
        if not matched:
            return
        at = held.end + matched // WIDTH
        node = tree.ending_at(node, at)
        tree.hold(node)
        if node.demoted:
            tree.undo_demote(node)
        self.node = node
        del self._tail[:matched]
        self._table.follow(tree.joined(tree.path(node, held)), at)
        tree.unhold(held)
        tree.merge(held)

    # ---- helpers

    def _refuse_closed(self) -> None:
        if self.closed:
            raise SequenceClosed("this sequence was closed")

    def _refuse_beyond(self, verb: str, length: int) -> None:
        check_int("length", length)
        if not 0 <= length <= self.length:
            raise InvalidInput(f"{verb}({length!r}): allowed are 0..{self.length}, the tokens committed")

    def _refuse_unknown(self) -> None:
        self._refuse_closed()
        raise UnknownToken(f"token {self._unknown} of this sequence is unknown: resolve(token) it first, or truncate()")

    def _refuse_pending(self) -> None:
        self._refuse_closed()
        if self._planned is not None:
            raise PlanPending("the last plan of this sequence is pending: commit() it once it was executed, or close()")


_ANY_TOKEN = array("i", [0])
# WritePlan from its fields. A call of the class takes 0.15 us more, of 2.8 for a decoded token.
_plan: Callable[[tuple[object, ...]], WritePlan] = partial(tuple.__new__, WritePlan)
