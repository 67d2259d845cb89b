"""What opening a prefix takes of the room, and what closing a sequence may lose. Reads, and changes nothing.

Knows which nodes are locked and which blocks are shared. Knows no sequence.
"""

from __future__ import annotations

from bisect import bisect_left

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import WIDTH


def idle_blocks(pool: BlockPool, path: list[Node], end: int) -> int:
    """Blocks that nobody holds of a path up to token `end` of its last node.

    O(depth) + O(blocks that forks may share).
    """
    if not path or path[-1].locks:
        return 0
    size = pool.block_size
    idle = path[bisect_left(path, True, key=_nobody_holds) :] if path[0].locks else path
    last = -(-end // size)
    blocks = last - idle[0].start // size
    seams = [node for node in idle if node.start % size or node.mixed]
    return blocks + _more_at(seams, idle[0], last, pool) if seams else blocks


def held_by_others(tree: RadixTree, node: Node, raw: bytes | bytearray) -> int:
    """Up to where somebody besides one holder of `node` holds its path, and the unpublished `raw` behind it.

    O(depth) + O(bytes of `raw`).
    """
    if raw and node.children:
        below, matched = tree.match(node, bytes(raw))
        while below is not node and below.parent is not None:
            if below.locks:
                return min(below.end, node.end + matched // WIDTH)
            below = below.parent
    up = node
    while up.locks == 1 and up.parent is not None:
        up = up.parent
    return up.end


def _more_at(seams: list[Node], top: Node, last: int, pool: BlockPool) -> int:
    """By how much one block for each logical block is wrong where nodes meet inside blocks, or forks share them.

    There the path may own more than one block, all of which are held with it, and any of them may be held already.
    """
    size = pool.block_size
    logical: set[int] = set()
    blocks: set[int] = set()
    for node in seams:
        first = node.start // size
        touched = node.blocks[: last - first if node.mixed else 1]
        logical.update(range(first, first + len(touched)))
        blocks.update(touched)
        if node is not top and node.start % size and node.parent is not None:
            blocks.add(node.parent.blocks[-1])
    return sum(_is_idle(pool, block) for block in blocks) - len(logical)


def _nobody_holds(node: Node) -> bool:
    return not node.locks


def _is_idle(pool: BlockPool, block: int) -> bool:
    entry = pool.shared.get(block)  # of a block that is not shared the only owner is an unlocked node
    return entry is None or entry.idle == entry.owners
