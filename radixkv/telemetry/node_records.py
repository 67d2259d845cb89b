"""From what a cache shows of itself to records: nodes, runs of blocks, names of namespaces.

Knows the cache's nodes, and reads them only. Knows no engine and nobody who looks. Times become seconds since 1970 by
the `offset` of the clock that dated them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable

import numpy as np

from radixkv.cache.ghosts import Owner
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node
from radixkv.telemetry.records import NodeRecord
from radixkv.telemetry.texts import drawable

HEAD = 8  # token ids of a node that are told
TEXT_TOKENS, TEXT_CHARACTERS = 40, 80
"""How many tokens of a node are decoded where text is told, and how much of it."""
_LONGEST_NAME = 64
_FEW = 48  # blocks; so many are gone through faster without numpy

Decode = Callable[[list[int]], str]


def node_record(node: Node, pins: int, offset: float, text: str | None = None) -> NodeRecord:
    """A node as it is now. O(its blocks)."""
    parent = node.parent
    return NodeRecord(
        node.id,
        0 if parent is None else parent.id,
        node.start,
        len(node.key) // WIDTH,
        runs(node.blocks),
        node.holders,
        node.locks,
        pins,
        node.hits,
        node.priority,
        node.demoted,
        node.born_at + offset,
        node.used_at + offset,
        _namespace(node.mark) if parent is None else None,
        tuple(tokens(node, HEAD)),
        text,
    )


def tokens(node: Node, most: int) -> list[int]:
    """The first token ids of a node."""
    return array("i", bytes(node.key[: most * WIDTH])).tolist()


def said(ids: list[int], decode: Decode) -> str:
    """The beginning of what these tokens say; on one line, and never an error."""
    try:
        text = decode(ids)
    except Exception as error:
        return f"<{type(error).__name__}>"
    return drawable(text[:TEXT_CHARACTERS])


def runs(blocks: array[int]) -> tuple[int, ...]:
    """Block ids in order as runs: first, count, first, count, ...

    >>> runs(array("i", [4, 5, 6, 9, 2, 3]))
    (4, 3, 9, 1, 2, 2)
    """
    if len(blocks) > _FEW:
        ids = np.array(blocks, np.int32)
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        counts = np.diff(starts, append=len(ids))
        return tuple(np.stack((ids[starts], counts), axis=1).ravel().tolist())
    found: list[int] = []
    last = -2
    for block in blocks:
        if block == last + 1:
            found[-1] += 1
        else:
            found += (block, 1)
        last = block
    return tuple(found)


def label(namespace: Hashable) -> str | None:
    """A namespace's name for people, None for the one without: a text or a number as it is, of others the type.

    Namespaces may be of a caller's class, and what its `str` does or tells is not for telemetry to find out.
    """
    if namespace is None:
        return None
    if isinstance(namespace, tuple):
        return f"({', '.join(label(each) or 'None' for each in namespace)})"[:_LONGEST_NAME]
    if type(namespace) not in (str, int, float, bool):
        return type(namespace).__name__
    return drawable(str(namespace)[:_LONGEST_NAME])


def _namespace(mark: Owner) -> str | None:
    """The name of the namespace whose root has this mark."""
    assert isinstance(mark, tuple)
    return label(mark[1])
