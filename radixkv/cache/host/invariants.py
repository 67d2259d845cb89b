"""check() of the host tier. It reads private attributes on purpose; tests call it after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

from radixkv.cache.host.sequence import HostSequence
from radixkv.cache.host.tier import HostNode, HostTier
from radixkv.cache.invariants import check_partition
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node


def check(state: CacheState, tier: HostTier) -> None:
    """Recount host nodes, host blocks, moves, loads and the order of eviction. O(nodes + host blocks)."""
    nodes = list(tier.nodes())
    _check_shape(state, tier, nodes)
    _check_blocks(tier, nodes)
    _check_moves(state, tier, nodes)
    _check_loads(state, tier)
    tier.index.check([node for node in nodes if tier.is_resident(node) or node.eviction_key is not None])


def _check_shape(state: CacheState, tier: HostTier, nodes: list[HostNode]) -> None:
    device = set(state.tree.walk())
    assert len(nodes) == tier.count, f"{tier.count} host nodes, recounted {len(nodes)}"
    for above, children in tier.below.items():
        assert above in device, f"host nodes hang below node {above.id}, which is not on the device"
        assert children, f"an empty entry of host children is kept for node {above.id}"
        both = children.keys() & above.children.keys()
        assert not both, f"text after node {above.id} is resident in both tiers"
        for child in children.values():
            assert child.parent is above, f"host node {child.id} has another parent"
    families: list[tuple[Node, Mapping[bytes, Node]]] = [
        *tier.below.items(),
        *((each, each.children) for each in nodes),
    ]
    for parent, family in families:
        for first, each in family.items():
            assert each.residence == "host", f"node {each.id} is on the device, below a node on the host"
            assert each.parent is parent, f"host node {each.id} has another parent"
            assert bytes(each.key[:WIDTH]) == first, f"host node {each.id} is filed under another first token"
            assert each.start == parent.end, f"host node {each.id} starts at {each.start}, its parent ends elsewhere"
    for node in nodes:
        size = tier.block_size
        assert node.key and len(node.key) % WIDTH == 0, f"host node {node.id} covers no whole tokens"
        spanned = -(-node.end // size) - node.start // size
        assert len(node.blocks) == spanned, f"host node {node.id}: {len(node.blocks)} blocks for a span of {spanned}"
        assert not node.locks and not node.direct_holders, f"host node {node.id} is locked"


def _check_blocks(tier: HostTier, nodes: list[HostNode]) -> None:
    owned = [*tier.free, *tier.deferred]
    for node in nodes:
        owned += node.blocks
    check_partition("host blocks", owned, range(tier.num_blocks))


def _check_moves(state: CacheState, tier: HostTier, nodes: list[HostNode]) -> None:
    alive = set(nodes)
    for node in [*tier.planned, *tier.drained]:
        assert node in alive, f"moves are pending for host node {node.id}, which left the tree"
    reserved = {block for node in tier.planned for block in node.blocks}
    assert tier.moves.keys() <= reserved, f"moves to {sorted(tier.moves.keys() - reserved)}, which are not reserved"
    assert all(0 <= device < state.pool.num_blocks for device in tier.moves.values()), "a move of no device block"
    for node in nodes:
        assert node.eviction_key is None or tier.is_resident(node), f"host node {node.id} is evictable, but not written"


def _check_loads(state: CacheState, tier: HostTier) -> None:
    reading: Counter[int] = Counter()
    for sequence in cast(list[HostSequence], list(state.open.values())):
        blocks = sequence.host_reads()
        assert not blocks or sequence.has_plan, f"{sequence!r} reads host blocks without a plan"
        reading.update(blocks)
    assert reading == tier.reading, f"host blocks that are read: {tier.reading}, recounted {dict(reading)}"
    assert tier.deferred <= tier.reading.keys(), "a host block is deferred that no load reads"
    assert not tier.moves.keys() & tier.reading.keys(), "a move writes a host block that a load reads"
