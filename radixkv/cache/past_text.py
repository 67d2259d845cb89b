"""The text of closed sequences, from which drafts are made: it outlives the KV, within a bound, in its namespace.

Each closed sequence adds the text that it did not find in the cache, as a piece of its own with its namespace. No
match and no continuation crosses the border of a piece. The oldest text is overwritten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from radixkv.cache.events import Events, Follower
from radixkv.cache.namespaces import Namespace
from radixkv.cache.ngrams import LONGEST, NgramIndex
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import FIRST_PSEUDO, WIDTH, Tokens, as_bytes
from radixkv.cache.types import Node, OpenSequence

GRAM = 4
"""The shortest match, in tokens."""

BYTES_PER_TOKEN = 9  # of ring and links 8, of the heads of chains 1 or 2


class Repeated(NamedTuple):
    """Tokens that followed a text before, and how many of its last tokens matched there."""

    tokens: array[int]
    matched: int


NOTHING = Repeated(array("i"), 0)


class PastText(Follower):
    """The newest `capacity` tokens of closed sequences; a capacity of 0 keeps none."""

    order = 3

    def __init__(self, tree: RadixTree, capacity: int, events: Events) -> None:
        """Keep the text of sequences of `tree` from now on."""
        self._tree = tree
        self._index = NgramIndex(GRAM, max(capacity, 1), heads=capacity // 4)
        self._starts = array("q")  # of the pieces, ascending
        self._owners: list[Namespace | None] = []  # None for a piece that was wiped
        if capacity:
            events.connect(self)
            tree.text_owners.append(lambda: {each.number for each in self.namespaces()})

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return self._index.nbytes

    def namespaces(self) -> set[Namespace]:
        """Return the namespaces that have text. Any thread may call this."""
        return {each for each in self._owners[:] if each is not None}

    def closed(self, sequence: OpenSequence) -> None:
        """Keep the published text of a closed sequence from a few tokens before the end of its hit on."""
        if sequence.purpose == "audit" or sequence.node.end <= sequence.cached_length:
            return
        node, start, keys = sequence.node, max(sequence.cached_length - LONGEST, 0), list[bytes]()
        while node.parent is not None and node.end > start:
            keys.append(bytes(node.key))
            node = node.parent
        tokens = np.frombuffer(b"".join(reversed(keys))[max(start - node.end, 0) * WIDTH :], np.int32)
        tokens = tokens[tokens < FIRST_PSEUDO]  # the ids of a compressed prefix are no text
        if len(tokens) > GRAM:
            self._add(tokens[-self._index.capacity :], self._tree.namespace_of(sequence.node))

    def _add(self, tokens: np.ndarray, owner: Namespace) -> None:
        index = self._index
        self._starts.append(index.length)
        self._owners.append(owner)
        index.part()
        index.append(tokens)
        gone = bisect_right(self._starts, index.length - index.capacity) - 1
        if gone > len(self._starts) // 2:  # so that each costs O(1)
            del self._starts[:gone], self._owners[:gone]

    def repeated(self, tokens: Sequence[int], namespace: Hashable, most: int, more_than: int = 0) -> Repeated:
        """Return what followed the longest match of the end of `tokens` in a namespace, the latest of equal ones.

        At most `most` tokens; none unless the match has `GRAM` tokens and more than `more_than`. Tries 8 places, in
        about 10 us.
        """
        suffix, space = tokens[-LONGEST:], self._tree.namespaces.find(namespace)
        index, starts, best = self._index, self._starts, max(more_than, GRAM - 1)
        first = last = 0
        for place in index.places(suffix) if space is not None else ():
            piece = bisect_right(starts, place) - 1
            if piece < 0 or self._owners[piece] is not space:
                continue
            end = starts[piece + 1] if piece + 1 < len(starts) else index.length
            if place + 1 < end and (found := index.matched(place, suffix, starts[piece], best)) > best:
                best, first, last = found, place + 1, min(place + 1 + most, end)
        return Repeated(array("i", index.read(first, last).tobytes()), best) if first < last else NOTHING

    def clear(self) -> None:
        """Forget all text, and leave no token of it in memory."""
        self._index.clear()
        del self._starts[:]
        self._owners.clear()

    def clear_namespace(self, space: Namespace) -> None:
        """Forget the text of a namespace, and leave no token of it in memory. O(pieces)."""
        index = self._index
        for piece, (start, end) in enumerate(pairwise([*self._starts, index.length])):
            if self._owners[piece] is space:
                self._owners[piece] = None
                kept = max(start, index.length - index.capacity)
                index.tokens[np.arange(kept, end) % index.capacity] = -1

    def check(self) -> None:
        """Check the order of the pieces, and that no text is left of those that were wiped."""
        index = self._index
        assert len(self._starts) == len(self._owners) and [*self._starts] == sorted(set(self._starts))
        assert not self._starts or self._starts[-1] < index.length, "a piece is empty"
        for (start, end), owner in zip(pairwise([*self._starts, index.length]), self._owners, strict=True):
            kept = index.read(max(start, index.length - index.capacity), end)
            assert owner is not None or (kept == -1).all(), "text of a namespace that was cleared"


def continuation(node: Node, tokens: Tokens, most: int) -> array[int]:
    """Return up to `most` tokens that follow a text in the tree, in any tier: at branches the latest use.

    Its first tokens end with `node`. Changes nothing. Empty if the rest is no cached text. O(depth + tokens).
    """
    if not node.children and not node.below:
        return array("i")
    rest, at, following = as_bytes(tokens[node.end :]), 0, bytearray()
    while len(following) < most * WIDTH:
        if at < len(rest):
            first = rest[at : at + WIDTH]
            child = node.children.get(first) or node.below.get(first)
            if child is None:
                break
            common = min(len(child.key), len(rest) - at)
            if child.key[:common] != rest[at : at + common]:
                break
            at += common
            following += child.key[common : common + most * WIDTH]
        else:
            children = [*node.children.values(), *node.below.values()]
            if not children:
                break
            child = max(children, key=lambda each: each.tick)
            following += child.key[: most * WIDTH]
        node = child
    return array("i", bytes(following[: most * WIDTH]))
