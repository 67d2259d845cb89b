"""check() of the host tier. It reads private attributes on purpose; tests call it after every step."""

from __future__ import annotations

from collections import Counter

from radixkv.cache.host.tier import HostTier
from radixkv.cache.partition import check_partition
from radixkv.cache.sequence import Sequence
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node


def check(state: CacheState, tier: HostTier, sequences: list[Sequence]) -> None:
    """Recount host nodes, host blocks, moves, loads and the order of eviction. O(nodes + host blocks)."""
    nodes = list(tier.nodes())
    _check_shape(state, tier, nodes)
    _check_blocks(tier, nodes)
    _check_moves(state, tier, nodes)
    _check_loads(tier, sequences)
    tier.index.check([node for node in nodes if tier.is_resident(node) or node.eviction_key is not None])


def _check_shape(state: CacheState, tier: HostTier, nodes: list[Node]) -> None:
    size = state.pool.block_size
    assert len(nodes) == tier.count, f"{tier.count} host nodes, recounted {len(nodes)}"
    for above in state.tree.walk():
        both = above.below.keys() & above.children.keys()
        assert not both, f"text after node {above.id} is resident in both tiers"
        for first, child in above.below.items():
            _check_child(above, first, child)
    for node in nodes:
        assert not node.below, f"host node {node.id} has children of another tier"
        for first, child in node.children.items():
            _check_child(node, first, child)
        assert node.key and len(node.key) % WIDTH == 0, f"host node {node.id} covers no whole tokens"
        assert node.end == node.start + len(node.key) // WIDTH, f"host node {node.id} ends at {node.end}"
        spanned = -(-node.end // size) - node.start // size
        assert len(node.blocks) == spanned, f"host node {node.id}: {len(node.blocks)} blocks for a span of {spanned}"
        assert not node.locks and not node.direct_holders, f"host node {node.id} is locked"


def _check_child(parent: Node, first: bytes, each: Node) -> None:
    assert each.residence == "host", f"node {each.id} is on the device, below a node on the host"
    assert each.parent is parent, f"host node {each.id} has another parent"
    assert bytes(each.key[:WIDTH]) == first, f"host node {each.id} is filed under another first token"
    assert each.start == parent.end, f"host node {each.id} starts at {each.start}, its parent ends elsewhere"


def _check_blocks(tier: HostTier, nodes: list[Node]) -> None:
    owned = [*tier.blocks.free, *tier.blocks.deferred, *tier.blocks.lent]
    for node in nodes:
        owned += node.blocks
    check_partition("host blocks", owned, range(tier.blocks.num_blocks))


def _check_moves(state: CacheState, tier: HostTier, nodes: list[Node]) -> None:
    alive, moves = set(nodes), tier.blocks.moves
    for node in [*tier.planned, *tier.drained]:
        assert node in alive, f"moves are pending for host node {node.id}, which left the tree"
    reserved = {block for node in tier.planned for block in node.blocks}
    assert moves.keys() <= reserved, f"moves to {sorted(moves.keys() - reserved)}, which are not reserved"
    assert all(0 <= device < state.pool.num_blocks for device in moves.values()), "a move of no device block"
    for node in nodes:
        assert node.eviction_key is None or tier.is_resident(node), f"host node {node.id} is evictable, but not written"


def _check_loads(tier: HostTier, sequences: list[Sequence]) -> None:
    reading: Counter[int] = Counter()
    for sequence in sequences:
        reads = {} if sequence.loading is None else sequence.loading.reads
        assert not reads or sequence.has_plan, f"{sequence!r} reads host blocks without a plan"
        reading.update(reads.keys())
    blocks = tier.blocks
    assert reading == blocks.reading, f"host blocks that are read: {blocks.reading}, recounted {dict(reading)}"
    assert blocks.deferred <= blocks.reading.keys(), "a host block is deferred that no load reads"
    assert not blocks.moves.keys() & blocks.reading.keys(), "a move writes a host block that a load reads"
