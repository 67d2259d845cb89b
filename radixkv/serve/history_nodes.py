"""The tree of messages that history.py keeps: nodes, and how their ids build on those of replies before.

Knows: token ids. Knows no namespace, no bound and no message but by its key.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Any

# What a node costs beside its text and its ids: the object, its children's dict, two entries in dicts.
_NODE_BYTES = 700


class Node:
    """One message behind all that stand before it; with `ids`, a reply of the engine's.

    The ids of prompt and reply are the first `kept` of `base`'s, and `ids`; the last `said` of them are the reply's.
    """

    __slots__ = ("base", "children", "date", "ids", "kept", "key", "parent", "said", "session", "thinking")

    def __init__(self, parent: Node | None, key: Any) -> None:
        """A message that says nothing yet."""
        self.parent, self.key = parent, key
        self.children: dict[str, Node] = {}
        self.ids: array[int] | None = None
        self.base: Node | None = None
        self.kept = self.said = 0
        self.thinking: str | None = None
        self.date: str | None = None
        self.session: int | None = None

    @property
    def size(self) -> int:
        """Bytes, near enough."""
        ids = 0 if self.ids is None else self.ids.itemsize * len(self.ids)
        thinking = 0 if self.thinking is None else sys.getsizeof(self.thinking)
        return _NODE_BYTES + _size(self.key) + ids + thinking

    def whole(self) -> array[int]:
        """Ids of prompt and reply. O(tokens)."""
        assert self.ids is not None
        if self.base is None:
            return self.ids[:]
        return _front(self.base, self.kept) + self.ids


def nearest(node: Node | None) -> Node | None:
    """The closest reply before a message."""
    while node is not None and node.ids is None:
        node = node.parent
    return node


def _front(node: Node, length: int) -> array[int]:
    """The first `length` ids of a reply and its prompt. O(length)."""
    pieces: list[array[int]] = []
    at: Node | None = node
    while at is not None:
        assert at.ids is not None
        start = at.kept if at.base is not None else 0
        if length > start:
            pieces.append(at.ids[: length - start])
            length = start
        at = at.base
    return sum(reversed(pieces), array("i"))


def reply_ids(node: Node) -> array[int]:
    """Ids of the reply alone."""
    assert node.ids is not None
    return node.ids[len(node.ids) - node.said :]


def common(first: array[int], second: array[int]) -> int:
    """How many ids two sequences share from the start; one comparison where one begins with the other."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(at for at in range(length) if first[at] != second[at])


def below(node: Node) -> Iterator[Node]:
    """The node, and all that stand behind it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def check_ids(node: Node) -> None:
    """Raise AssertionError if a node's ids are not what its place allows."""
    if node.ids is None:
        assert node.base is None and not node.kept and not node.said, "a message that is no reply has ids"
        return
    assert 0 <= node.said <= len(node.ids), "a reply's ids are not all its own"
    if node.base is not None:
        above = node.parent
        while above is not None and above is not node.base:
            above = above.parent
        assert above is node.base and node.kept <= len(node.base.whole()), "a reply builds on what is not before it"


def _size(key: Any) -> int:
    return sum(map(_size, key)) if isinstance(key, tuple) else sys.getsizeof(key)
