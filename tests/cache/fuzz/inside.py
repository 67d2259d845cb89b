"""Everything that the fuzz reads of the parts inside a cache. Its other modules use the public names only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
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


def first_victims(cache: PrefixCache, groups: list[Hashable]) -> dict[Hashable, int]:
    """The first victim of each group of namespaces, in the order of the policy alone."""
    index: Any = cache.state.index
    found = {name: index.of(number).next_victims(1) for number, name in enumerate(groups)}
    return {name: leaves[0].id for name, leaves in found.items() if leaves}


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


def host_leaves(cache: PrefixCache) -> list[int]:
    """Count the leaves on the host that can be evicted, by the number of their group."""
    tier, found = _tier(cache), [0] * len(cache.quotas.limits)  # type: ignore[union-attr]  # it has limits
    for number in range(len(tier.index)):
        leaf = tier.index.at(number)
        found[tier.index.group_of(leaf)] += not tier.blocks.are_read(leaf.blocks)
    return found


def watch_host_room(cache: PrefixCache, check: Callable[[int, bool, list[int], list[int]], None]) -> None:
    """Check all room that is made for a device node: its group, whether room is missing, blocks before and after."""
    tier, used, make_room = _tier(cache), cache.quotas.host.used, _tier(cache).make_room  # type: ignore[union-attr]

    def making(node: Node, blocks: int, *facts: Any) -> tuple[int, int]:
        group, before = cache.state.tree.namespace_of(node).group, [*used]
        room, lost = make_room(node, blocks, *facts)
        check(group, room < blocks and not node.done, before, [*used])
        return room, lost

    tier.make_room = making


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


def blocks_by_group(cache: PrefixCache, group: Any) -> tuple[Counter[Hashable], Counter[Hashable], dict[int, Hashable]]:
    """Count the blocks, and the evictable blocks, of each group, and name the group of each device node."""
    owner: dict[int, Hashable] = {}
    held: set[int] = set()
    groups: dict[int, Hashable] = {}
    tree = cache.state.tree
    for namespace, root in tree.roots.items():
        for node in tree.walk(root):
            groups[node.id] = group(namespace.value)
            owner.update(dict.fromkeys(node.blocks, groups[node.id]))
            held.update(node.blocks if node.locks else ())
    for sequence in sequences(cache):
        owner.update(dict.fromkeys(sequence.own_blocks(), group(sequence.namespace)))
        held.update(sequence.own_blocks())
    evictable = Counter(group for block, group in owner.items() if block not in held)
    return Counter(owner.values()), evictable, groups
