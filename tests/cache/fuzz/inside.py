"""Everything that the fuzz reads of the parts inside a cache. Its other modules use the public names only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from radixkv.cache import Match, PrefixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.readings import idle_blocks
from radixkv.cache.tokens import WIDTH, as_bytes
from radixkv.cache.types import Node
from radixkv.sizing.recurrent_state import EMPTY
from tests.cache.verbs import Ids


class Run(NamedTuple):
    """A node of any tier, as plain data."""

    id: int
    parent: int | None
    namespace: Hashable
    start: int
    text: list[int]  # from the beginning to the end of the node
    blocks: list[int]
    residence: str
    locks: int
    reuse: dict[int, int]


class StoredState(NamedTuple):
    """A snapshot of recurrent state, and the text after which it was taken."""

    namespace: Hashable
    text: tuple[int, ...]
    slot: int


def nodes(cache: PrefixCache) -> Iterator[Run]:
    """Yield all nodes, roots too."""
    tree = cache.state.tree
    for node in tree.residents():
        parent = None if node.parent is None else node.parent.id
        facts = (tree.namespace(node), node.start, text_of(cache, node), list(node.blocks))
        yield Run(node.id, parent, *facts, node.residence, node.locks, dict(node.reuse or {}))


def text_of(cache: PrefixCache, node: Node) -> list[int]:
    """The tokens from the beginning to the end of a node."""
    raw = b"".join(bytes(each.key) for each in cache.state.tree.path(node))
    tokens: list[int] = np.frombuffer(raw, np.int32).tolist()
    return tokens


def cached_kv(cache: PrefixCache, tokens: Ids, namespace: Hashable) -> Match:
    """The match of KV on the device alone, without regard to recurrent state."""
    found, tree = cache.match(tokens, namespace), cache.state.tree
    if found.length == found.matched:
        return found
    root = tree.find_root(tree.namespaces.find(namespace))
    assert root is not None
    node, matched = tree.match(root, as_bytes(tokens))
    path, length = tree.path(node), matched // WIDTH
    assert length == found.matched
    blocks = tree.joined(path)[: -(-length // cache.block_size)]
    return found._replace(length=length, blocks=np.array(blocks, np.int32), idle_blocks=idle_blocks(tree, path, length))


def free_blocks(cache: PrefixCache) -> list[int]:
    """The free blocks of the device."""
    return list(cache.state.pool.free)


def sequences(cache: PrefixCache) -> list[CacheSequence]:
    """The open sequences."""
    return list(cache.state.open.values())


# The host tier


def _tier(cache: PrefixCache) -> Any:
    return cache.state.host


def pending_moves(cache: PrefixCache) -> dict[int, int]:
    """The moves that no step has taken yet: host block -> device block."""
    return dict(_tier(cache).blocks.moves)


def free_host_blocks(cache: PrefixCache) -> list[int]:
    """The free blocks of the host."""
    return list(_tier(cache).blocks.free)


def unwritten_nodes(cache: PrefixCache) -> set[int]:
    """The ids of host nodes whose moves are not confirmed."""
    return {node.id for node in (*_tier(cache).planned, *_tier(cache).drained)}


# Recurrent state


def drained_copies(cache: PrefixCache) -> list[tuple[int, int]]:
    """Take the queued copies of states (source, target)."""
    copies: list[tuple[int, int]] = cache.copies.drain()
    return copies


def queued_copies(cache: PrefixCache) -> list[tuple[int, int]]:
    """The queued copies of states (source, target), which stay queued."""
    copies: list[tuple[int, int]] = cache.copies.queued()
    return copies


def stored_states(cache: PrefixCache) -> list[StoredState]:
    """All snapshots that a sequence can be opened with."""
    found, tree = cache.state.snapshots, cache.state.tree
    assert found is not None
    return [
        StoredState(tree.namespace(each.node), tuple(text_of(cache, each.node)[: each.position]), each.slot)
        for each in found
    ]


def copied(slots: Any, copies: list[tuple[int, int]], empty: int) -> None:
    """Run copies of states in their order."""
    for source, target in copies:
        slots[target] = empty if source == EMPTY else slots[source]
