"""The tokens that a sequence could load: the host-resident tokens that follow its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.readings import idle_blocks
from radixkv.cache.recurrent.snapshots import Snapshot
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node
from radixkv.errors import OutOfBlocks


class Loadable(NamedTuple):
    """The leading `tokens` of a text that a sequence could load.

    The first `at` bytes of the text are on the device, and end in `node`. The tokens after these are in `runs`: host
    nodes, each with the number of tokens to read. A sequence with recurrent state is set to the snapshot `state`.
    """

    node: Node
    at: int = 0
    runs: tuple[tuple[Node, int], ...] = ()
    tokens: int = 0
    state: Snapshot | None = None

    def sources(self, size: int) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
        """Return the host slots of the tokens of `runs`; and their host blocks, each with the end of these tokens."""
        parts = [np.empty(0, np.int64)]
        reads: dict[int, int] = {}
        for node, count in self.runs:
            first, end = node.start // size, node.start + count
            blocks = node.blocks[: -(-end // size) - first]
            slots = np.add.outer(np.frombuffer(blocks, np.int32).astype(np.int64) * size, np.arange(size)).ravel()
            parts.append(slots[node.start - first * size : end - first * size])
            reads.update((block, min(end, (first + at + 1) * size)) for at, block in enumerate(blocks))
        return np.concatenate(parts), reads


def find(state: CacheState, node: Node, length: int, raw: bytes, *, restores: bool) -> Loadable:
    """Find the tokens of `raw` that a sequence of `length` tokens, which ends with `node`, could load.

    A sequence that `restores` recurrent state passes over KV that is on the device: it would compute the state.
    """
    host, at = state.host, 0
    if host is None:
        return Loadable(node)
    if restores:
        node, at = state.tree.match(node, raw)
        if node.end * WIDTH > length * WIDTH + at:
            return Loadable(node, at)
    runs = host.follow(node, raw, at)
    if not restores or state.snapshots is None:
        return Loadable(node, at, tuple(runs), sum(count for _, count in runs))
    last = state.snapshots.last_of(runs)
    return Loadable(node, at, tuple(runs), 0 if last is None else last.position - length, last)


def refuse_full(state: CacheState, node: Node, count: int) -> None:
    """Raise OutOfBlocks if `count` tokens after `node` would not fit once its path is held. O(blocks)."""
    pool, size = state.pool, state.pool.block_size
    state.pins.expire()
    need, offset = -(-(node.end + count) // size) - -(-node.end // size), node.end % size
    if offset and offset != pool.fill.get(node.blocks[-1], size):
        entry = pool.shared.get(node.blocks[-1])
        above = state.tree.shared.owners_above(node, node.blocks[-1], node.end // size)
        need += entry is not None and entry.owners != len(above)  # others own the block, so it is copied
    idle = idle_blocks(state.tree, state.tree.path(node), node.end)
    if need > len(pool.free) + pool.evictable - idle:
        raise OutOfBlocks(pool.shortage(need))
