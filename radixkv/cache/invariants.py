"""Recount everything that the cache keeps books on. Knows all of its insides; called after every step of a test.

Each function raises AssertionError with the invariant's name and the numbers that break it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from radixkv.cache.predictive.index import PredictiveIndex
from radixkv.cache.predictive.lru_baseline import LruBaseline
from radixkv.cache.sequence import Sequence
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache


def audit(cache: PrefixCache) -> None:
    """All invariants of DESIGN §3. O(blocks + tokens)."""
    nodes = list(cache._tree.walk())
    _check_shape(cache, nodes)
    _check_locks(cache, nodes)
    _check_index(cache, nodes)
    _check_owners(cache, nodes)
    _check_redundancy(cache, nodes)
    _check_fill(cache, nodes)
    if cache._learner is not None:
        _check_leaves_worth(cache._learner)
        _check_uses(cache._learner, nodes)
        _check_lru_shadow(cache._learner.baseline)
    for sequence in cache._open.values():
        _check_sequence(cache, sequence)


def _check_shape(cache: PrefixCache, nodes: list[Node]) -> None:
    size = cache.block_size
    roots = cache._tree.roots
    assert len(nodes) - len(roots) == cache._tree.nodes, (
        f"node count: {len(nodes)} - {len(roots)} != {cache._tree.nodes}"
    )
    for root in roots.values():
        assert root.locks or root.children, f"an empty namespace is kept: {root.id}"
        assert not root.key and not root.blocks and root.start == 0, f"a root covers tokens: {root.id}"
    for node in nodes:
        if node.parent is not None:
            assert node.key and len(node.key) % WIDTH == 0, f"node {node.id} covers no whole tokens"
            spanned = -(-node.end // size) - node.start // size
            assert len(node.blocks) == spanned, f"node {node.id}: {len(node.blocks)} blocks for a span of {spanned}"
        for first, child in node.children.items():
            assert bytes(child.key[:WIDTH]) == first, f"node {child.id} is filed under another first token"
            assert child.parent is node, f"node {child.id} has another parent"
            assert child.start == node.end, f"node {child.id} starts at {child.start}, its parent ends at {node.end}"


def _check_locks(cache: PrefixCache, nodes: list[Node]) -> None:
    direct_holders = Counter(id(sequence._node) for sequence in cache._open.values())
    direct_holders.update(id(node) for node in cache._pins.nodes())
    wanted = [sequence._node for sequence in cache._open.values() if sequence.purpose != "audit"]
    for node in wanted + cache._pins.nodes():
        assert not node.demoted, f"node {node.id}: somebody wants it, but it is first to go"
    for node in nodes:
        assert node.direct_holders == direct_holders[id(node)], (
            f"node {node.id}: {node.direct_holders} holders, recounted {direct_holders[id(node)]}"
        )
        locks = node.direct_holders + sum(1 for child in node.children.values() if child.locks)
        assert node.locks == locks, f"node {node.id}: {node.locks} locks, recounted {locks}"
    assert sum(direct_holders.values()) == sum(node.direct_holders for node in nodes), (
        "somebody holds a node that is not in the tree"
    )


def _check_index(cache: PrefixCache, nodes: list[Node]) -> None:
    listed = {id(node) for node in cache._index}
    assert len(listed) == len(cache._index), "the eviction index lists a node twice"
    for node in nodes:
        leaf = node.parent is not None and not node.children and not node.locks
        assert (id(node) in listed) == leaf == (node.eviction_key is not None), (
            f"node {node.id}: in the index iff an unlocked leaf"
        )
        if leaf:
            assert node.eviction_key is not None
            assert node.eviction_key[:2] == (node.priority, not node.demoted), (
                f"node {node.id}: its key in the index is stale"
            )
            assert node.eviction_key[3] == node.tick, f"node {node.id}: its recency in the index is stale"
    assert len(listed) == sum(node.eviction_key is not None for node in nodes), (
        "the eviction index lists a node that is gone"
    )


def _check_owners(cache: PrefixCache, nodes: list[Node]) -> None:
    pool = cache._pool
    owners: Counter[int] = Counter()
    idle: Counter[int] = Counter()
    tips: dict[int, Node] = {}
    for node in nodes:
        owners.update(node.blocks)
        if not node.locks:
            idle.update(node.blocks)
        for block in node.blocks:
            if block not in tips or node.end > tips[block].end:
                tips[block] = node
        for block in node.blocks[1:-1]:
            assert node.may_share_any_block or block not in pool.shared, (
                f"block {block} inside node {node.id} is shared"
            )
    for sequence in cache._open.values():
        _check_forks(nodes, set(sequence._table[sequence._own :]), pool.block_size)
        owners.update(sequence._table[sequence._own :])
        if sequence._planned is not None and sequence._source >= 0:
            owners[sequence._source] += 1
    free = set(pool.free)
    assert len(free) == len(pool.free), "a block is free twice"
    assert not free & owners.keys(), f"blocks both free and referenced: {sorted(free & owners.keys())}"
    assert free | owners.keys() == set(range(pool.num_blocks)), (
        f"blocks lost: {sorted(set(range(pool.num_blocks)) - free - owners.keys())}"
    )
    shared = {block for block, count in owners.items() if count > 1}
    assert shared == pool.shared.keys(), f"shared blocks {sorted(pool.shared)}, recounted {sorted(shared)}"
    for node in nodes:
        for block in node.boundary():
            assert _is_above(node, tips[block]), (
                f"block {block}: nodes {node.id} and {tips[block].id} are not on one path"
            )
    for block, entry in pool.shared.items():
        counted = (owners[block], idle[block])
        assert (entry.owners, entry.idle) == counted, (
            f"block {block}: {entry.owners, entry.idle} owners, idle; recounted {counted}"
        )
        deepest_owner = tips.get(block)
        if deepest_owner is not None and deepest_owner.end % cache.block_size and deepest_owner.blocks[-1] == block:
            known = None if entry.deepest_owner is None else entry.deepest_owner.id
            assert entry.deepest_owner is deepest_owner, (
                f"block {block}: its deepest owner is {deepest_owner.id}, on record is {known}"
            )
    evictable = sum(1 for block, count in owners.items() if count == idle[block])
    assert pool.evictable == evictable, f"evictable_blocks {pool.evictable}, recounted {evictable}"


def _check_forks(nodes: list[Node], owned: set[int], size: int) -> None:
    """Of a node that nobody holds, a sequence may own the block in which it starts, and more only if it is mixed."""
    for node in nodes:
        if not node.locks and not node.may_share_any_block:
            rest = node.blocks[1:] if node.start % size else node.blocks
            assert owned.isdisjoint(rest), f"node {node.id} may share its ends only, a fork owns {rest.tolist()}"


def _is_above(node: Node, below: Node | None) -> bool:
    while below is not None and below is not node:
        below = below.parent
    return below is node


def _check_redundancy(cache: PrefixCache, nodes: list[Node]) -> None:
    """No block is kept that only copies below need (branching strands at most one block per open sequence)."""
    size = cache.block_size
    owning: dict[int, list[Node]] = {}
    for node in nodes:
        for block in set(node.boundary()):
            owning.setdefault(block, []).append(node)
    for block, owners in owning.items():
        entry = cache._pool.shared.get(block)
        deepest_owner, top = max(owners, key=_start), min(owners, key=_start)
        if (
            (1 if entry is None else entry.owners) == len(owners)
            and deepest_owner.end % size
            and deepest_owner.blocks[-1] == block
        ):
            for child in deepest_owner.children.values():
                assert top.locks and not child.locks, (
                    f"node {deepest_owner.id} keeps a block that node {child.id} has a copy of"
                )


def _start(node: Node) -> int:
    return node.start


def _check_fill(cache: PrefixCache, nodes: list[Node]) -> None:
    pool, size = cache._pool, cache.block_size
    assert not set(pool.free) & pool.fill.keys(), "a free block has a fill mark"
    for block, mark in pool.fill.items():
        assert 0 < mark < size, f"block {block}: fill mark {mark}"
    for node in nodes:
        if node.end % size:
            assert node.end % size <= pool.fill.get(node.blocks[-1], size), f"node {node.id} reads past a fill mark"
    for sequence in cache._open.values():
        end = sequence.length + len(sequence._planned or b"") // WIDTH
        if end % size:
            assert end % size <= pool.fill.get(sequence._table[-1], size), f"{sequence!r} reads past a fill mark"


def _check_leaves_worth(index: PredictiveIndex) -> None:
    leaves = {id(eviction_key[4]) for eviction_key in index._order}
    seats = list(index._by_worth)
    assert {id(worth_key[4]) for worth_key in seats} == leaves and len(seats) == len(leaves), (
        f"{len(leaves)} leaves, {len(seats)} are listed by worth"
    )
    assert all(one < two for one, two in pairwise(seats)), "leaves are not listed in order of worth"
    for worth_key in seats:
        node = worth_key[4]
        assert node.worth_key is worth_key and node.eviction_key is not None, "a leaf's key by worth is stale"
        assert (worth_key[0], worth_key[1], worth_key[3]) == (node.priority, not node.demoted, node.tick), (
            "a leaf's priority or recency by worth is stale"
        )
        assert node.use is not None and node.use.runs, "nobody is known to have used a leaf"


def _check_uses(index: PredictiveIndex, nodes: list[Node]) -> None:
    for node in nodes:
        assert node.eviction_key is not None or node.worth_key is None, (
            f"node {node.id} is listed by worth, and no unlocked leaf"
        )
    for bucket, ages in enumerate(index._ages):
        times = [use.time for use in ages]
        assert times == sorted(times), f"age bucket {bucket} is not in the order of age"
        for use in ages:
            assert use.bucket == bucket and use.runs, f"a use of bucket {use.bucket} is in bucket {bucket}"
            assert use.start <= use.end, f"a use claims {use.start} to {use.end}"
    assert index.uses <= 2 * index._capacity, f"{index.uses} uses for {index._capacity} blocks"


def _check_lru_shadow(baseline: LruBaseline) -> None:
    held = sum(use.kept_to - use.start for use in baseline._uses)
    assert baseline._held == held, f"LRU's shadow holds {baseline._held} tokens, recounted {held}"
    gone = sum(use.gone_within(use.start, use.kept_to) for use in baseline._uses)
    assert baseline._gone == gone, f"{baseline._gone} tokens of LRU's shadow are evicted, recounted {gone}"
    assert 0 <= held <= baseline._capacity, f"LRU's shadow holds {held} tokens of {baseline._capacity}"
    assert all(use.kept_to > use.start for use in baseline._uses), "LRU's shadow keeps a use of which it holds nothing"


def _check_sequence(cache: PrefixCache, sequence: Sequence) -> None:
    size, node = cache.block_size, sequence._node
    planned = len(sequence._planned or b"") // WIDTH
    assert sequence.length == node.end + len(sequence._tail) // WIDTH, f"{sequence!r}: its node ends at {node.end}"
    blocks = -(-(sequence.length + planned) // size)
    assert len(sequence._table) == blocks, f"{sequence!r}: {len(sequence._table)} blocks in its table"
    assert sequence._own == node.end // size, (
        f"{sequence!r}: its own blocks start at {sequence._own}, its node ends at {node.end}"
    )
    locked = cache._tree.table(node)[: sequence._own]
    assert sequence._table[: sequence._own] == locked, f"{sequence!r}: its table is not its path's"
    assert len(set(sequence._table)) == len(sequence._table), f"{sequence!r}: a block twice in its table"
