"""A run of cached tokens picked at random, for whoever computes it again and compares.

Knows the tree, the leaves that may go and who holds the others. Changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from random import Random
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree


class CachedRun(NamedTuple):
    """Tokens [start, end) of a cached text."""

    tokens: npt.NDArray[np.int32]  # [end]: the text from its beginning to the end of the run
    start: int
    namespace: Hashable
    blocks: npt.NDArray[np.int32]  # [ceil(end / block_size)] of the text; safe to read only while it is held


def random_run(tree: RadixTree, held: list[Node], rng: Random) -> CachedRun | None:
    """The run at a random token of a text that ends at a random leaf or held node; None if nothing is cached.

    O(log leaves + held + depth + tokens of the text).
    """
    ends = list(dict.fromkeys(node for node in held if node.parent is not None))
    choice = rng.randrange(len(tree.index) + len(ends)) if tree.index or ends else -1
    if choice < 0:
        return None
    end = ends[choice] if choice < len(ends) else cast(Node, tree.index.at(choice - len(ends)))
    path = tree.path(end)
    run = bisect_right(path, rng.randrange(end.end), key=_end)
    path = path[: run + 1]
    tokens = np.frombuffer(bytearray().join([node.key for node in path]), np.int32)
    blocks = np.frombuffer(tree.joined(path), np.int32)
    return CachedRun(tokens, path[-1].start, tree.namespace(path[0]), blocks)


def _end(node: Node) -> int:
    return node.end
