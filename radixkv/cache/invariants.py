"""check(): recount all state of a cache. It reads private attributes on purpose; tests call it after every step.

Each function raises AssertionError with the invariant's name and the numbers that break it.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from radixkv.cache.block_pool import BlockPool, boundary
from radixkv.cache.host import invariants as host_tier
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.recurrent import invariants as recurrent
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import UNKNOWN, WIDTH
from radixkv.cache.types import Node


def check(state: CacheState) -> None:
    """Recount locks, owners, blocks and the index, and compare. O(blocks + tokens)."""
    tree, pool = state.tree, state.pool
    sequences = [each for each in state.open.values() if isinstance(each, Sequence)]
    assert len(sequences) == len(state.open), "something else than a sequence is open"
    nodes = list(tree.walk())
    _check_shape(tree, nodes)
    _check_locks(nodes, sequences, state.pins)
    state.index.check(nodes)
    _check_owners(pool, nodes, sequences)
    _check_redundancy(pool, nodes)
    _check_fill(pool, nodes, sequences)
    for sequence in sequences:
        _check_sequence(tree, sequence)
    if state.host is not None:
        host_tier.check(state, state.host, sequences)
    state.announcements.check()
    if state.snapshots is not None:
        recurrent.check(state, state.snapshots, sequences)


def _check_shape(tree: RadixTree, nodes: list[Node]) -> None:
    size, roots = tree.pool.block_size, tree.roots
    assert len(nodes) - len(roots) == tree.nodes, f"node count: {len(nodes)} - {len(roots)} != {tree.nodes}"
    known = set(tree.namespaces)
    for namespace, root in roots.items():
        assert root.namespace is namespace, f"root {root.id} is filed under another namespace"
        assert root.ghost_owner == namespace.number, f"root {root.id} owns other ghosts than its namespace"
        assert namespace in known, f"the namespace of root {root.id} cannot be found"
        assert root.locks or root.children or root.below, f"an empty namespace is kept: {root.id}"
        assert not root.key and not root.blocks and root.start == 0, f"a root covers tokens: {root.id}"
    for node in nodes:
        assert node.residence == "device", f"node {node.id} is on the host, above or beside device nodes"
        assert (node.namespace is None) == (node.parent is not None), f"node {node.id}: is it a root?"
        if node.parent is not None:
            assert node.key and len(node.key) % WIDTH == 0, f"node {node.id} covers no whole tokens"
            assert node.end == node.start + len(node.key) // WIDTH, f"node {node.id} ends at {node.end}"
            spanned = -(-node.end // size) - node.start // size
            assert len(node.blocks) == spanned, f"node {node.id}: {len(node.blocks)} blocks for a span of {spanned}"
            assert UNKNOWN not in node.key, f"node {node.id} covers an unknown token"
        for first, child in node.children.items():
            assert bytes(child.key[:WIDTH]) == first, f"node {child.id} is filed under another first token"
            assert child.parent is node, f"node {child.id} has another parent"
            assert child.start == node.end, f"node {child.id} starts at {child.start}, its parent ends at {node.end}"


def _check_locks(nodes: list[Node], sequences: list[Sequence], pins: Pins) -> None:
    direct_holders = Counter(id(sequence.node) for sequence in sequences)
    direct_holders.update(id(node) for node in pins.nodes())
    requested = [sequence.node for sequence in sequences if sequence.purpose != "audit"]
    for node in requested + pins.nodes():
        assert not node.demoted, f"node {node.id} is held, but it is demoted"
    for node in nodes:
        assert node.direct_holders == direct_holders[id(node)], (
            f"node {node.id}: {node.direct_holders} holders, recounted {direct_holders[id(node)]}"
        )
        locks = node.direct_holders + sum(1 for child in node.children.values() if child.locks)
        assert node.locks == locks, f"node {node.id}: {node.locks} locks, recounted {locks}"
    assert sum(direct_holders.values()) == sum(node.direct_holders for node in nodes), (
        "a node that is not in the tree is held"
    )


def _check_owners(pool: BlockPool, nodes: list[Node], sequences: list[Sequence]) -> None:
    owners: Counter[int] = Counter()
    idle: Counter[int] = Counter()
    deepest: dict[int, Node] = {}
    for node in nodes:
        owners.update(node.blocks)
        if not node.locks:
            idle.update(node.blocks)
        for block in node.blocks:
            if block not in deepest or node.end > deepest[block].end:
                deepest[block] = node
        for block in node.blocks[1:-1]:
            assert node.may_share_any_block or block not in pool.shared, (
                f"block {block} inside node {node.id} is shared"
            )
    for sequence in sequences:
        _check_forks(nodes, set(sequence._table.blocks[sequence._table.own :]), pool.block_size)
        owners.update(sequence._table.blocks[sequence._table.own :])
        if sequence._planned is not None and sequence._source >= 0:
            owners[sequence._source] += 1
    free = set(pool.free)
    assert len(free) == len(pool.free), "a block is free twice"
    assert free.isdisjoint(owners), f"blocks both free and referenced: {sorted(free & owners.keys())}"
    lost = set(range(pool.num_blocks)).difference(free, owners)
    assert not lost, f"blocks lost: {sorted(lost)}"
    assert len(free) + len(owners) == pool.num_blocks, "a block that the pool does not have is free or referenced"
    shared = {block for block, count in owners.items() if count > 1}
    assert shared == pool.shared.keys(), f"shared blocks {sorted(pool.shared)}, recounted {sorted(shared)}"
    for node in nodes:
        for block in boundary(node):
            assert _is_above(node, deepest[block]), (
                f"block {block}: nodes {node.id} and {deepest[block].id} are not on one path"
            )
    for block, entry in pool.shared.items():
        counted = (owners[block], idle[block])
        assert (entry.owners, entry.idle) == counted, (
            f"block {block}: {entry.owners, entry.idle} owners, idle; recounted {counted}"
        )
        low = deepest.get(block)
        if low is not None and low.end % pool.block_size and low.blocks[-1] == block:
            known = None if entry.deepest_owner is None else entry.deepest_owner.id
            assert entry.deepest_owner is low, f"block {block}: its deepest owner is {low.id}, on record is {known}"
    evictable = sum(1 for block, count in owners.items() if count == idle[block])
    assert pool.evictable == evictable, f"evictable_blocks {pool.evictable}, recounted {evictable}"


def _check_forks(nodes: list[Node], owned: set[int], size: int) -> None:
    """A fork may own an unlocked node's first block, if the node starts inside it; others need the node's flag."""
    for node in nodes:
        if not node.locks and not node.may_share_any_block:
            rest = node.blocks[1:] if node.start % size else node.blocks
            assert owned.isdisjoint(rest), f"node {node.id} may share its ends only, a fork owns {rest.tolist()}"


def _is_above(node: Node, below: Node | None) -> bool:
    while below is not None and below is not node:
        below = below.parent
    return below is node


def _check_redundancy(pool: BlockPool, nodes: list[Node]) -> None:
    """No block is kept that only copies below need (branching strands at most one block per open sequence)."""
    size = pool.block_size
    owning: dict[int, list[Node]] = {}
    for node in nodes:
        for block in set(boundary(node)):
            owning.setdefault(block, []).append(node)
    for block, owners in owning.items():
        entry = pool.shared.get(block)
        low, top = max(owners, key=attrgetter("start")), min(owners, key=attrgetter("start"))
        if (1 if entry is None else entry.owners) == len(owners) and low.end % size and low.blocks[-1] == block:
            for child in low.children.values():
                assert top.locks and not child.locks, f"node {low.id} keeps a block that node {child.id} has a copy of"


def _check_fill(pool: BlockPool, nodes: list[Node], sequences: list[Sequence]) -> None:
    size = pool.block_size
    assert pool.fill.keys().isdisjoint(pool.free), "a free block has a fill mark"
    for block, mark in pool.fill.items():
        assert 0 < mark < size, f"block {block}: fill mark {mark}"
    for node in nodes:
        if node.end % size:
            assert node.end % size <= pool.fill.get(node.blocks[-1], size), f"node {node.id} reads past a fill mark"
    for sequence in sequences:
        end = sequence.length + len(sequence._planned or b"") // WIDTH
        if end % size:
            assert end % size <= pool.fill.get(sequence._table.blocks[-1], size), f"{sequence!r} reads past a fill mark"


def _check_sequence(tree: RadixTree, sequence: Sequence) -> None:
    size, node = tree.pool.block_size, sequence.node
    planned = len(sequence._planned or b"") // WIDTH
    assert sequence.length == node.end + len(sequence._tail) // WIDTH, f"{sequence!r}: its node ends at {node.end}"
    unpublished = bytes(sequence._tail) + (sequence._planned or b"")
    unknown = -1 if UNKNOWN not in unpublished else node.end + unpublished.find(UNKNOWN) // WIDTH
    assert unpublished.count(UNKNOWN) == (sequence._unknown >= 0), f"{sequence!r} has several unknown tokens"
    assert unknown == sequence._unknown, f"{sequence!r}: token {unknown} is unknown, not {sequence._unknown}"
    blocks = -(-(sequence.length + planned) // size)
    assert len(sequence._table.blocks) == blocks, f"{sequence!r}: {len(sequence._table.blocks)} blocks in its table"
    assert sequence._table.own == node.end // size, (
        f"{sequence!r}: its own blocks start at {sequence._table.own}, its node ends at {node.end}"
    )
    locked = tree.table(node)[: sequence._table.own]
    assert sequence._table.blocks[: sequence._table.own] == locked, f"{sequence!r}: its table is not its path's"
    assert len(set(sequence._table.blocks)) == len(sequence._table.blocks), f"{sequence!r}: a block twice in its table"
