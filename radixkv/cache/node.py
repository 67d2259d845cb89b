"""A node of the radix tree: a run of tokens, its blocks, who holds it. Knows no rule: the tree keeps those."""

from __future__ import annotations

from array import array

from radixkv.cache.eviction import Entry
from radixkv.cache.ghosts import Owner
from radixkv.cache.tokens import WIDTH
from radixkv.cache.use import Use

NO_CHILDREN: dict[bytes, Node] = {}


class Node:
    """A run of tokens and its blocks."""

    __slots__ = (
        "blocks",
        "born",
        "born_at",
        "children",
        "demoted",
        "hits",
        "holders",
        "id",
        "key",
        "locks",
        "mark",
        "mixed",
        "parent",
        "place",
        "priority",
        "seat",
        "shown",
        "start",
        "tick",
        "use",
        "used_at",
    )

    def __init__(self, id: int, parent: Node | None, start: int, key: bytearray, blocks: array[int]) -> None:
        self.id = id
        self.mark: Owner = id  # the owner of the ghosts that hang here; between two changes of it the node only grows
        self.parent = parent
        self.start = start
        self.key = key
        self.blocks = blocks
        self.children = NO_CHILDREN  # first token -> child; made on demand
        self.locks = 0
        self.holders = 0
        self.tick = 0
        self.born = 0
        self.used_at = self.born_at = 0.0  # as tick and born, on a clock: kept only while somebody watches
        self.hits = 0
        self.priority = 0
        self.demoted = False
        self.mixed = False  # a fork may share any of its blocks, not only the first and the last
        self.shown = False  # to whoever watches: see `changes`
        self.place: tuple[int, bool, int, int, Entry] | None = None
        self.seat: tuple[int, bool, float, int, Entry] | None = None
        self.use: Use | None = None  # kept only by a policy that learns, as its seat

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.key) // WIDTH

    def boundary(self) -> array[int]:
        """The blocks that it may share with others."""
        blocks = self.blocks
        return blocks if self.mixed or len(blocks) < 3 else blocks[:: len(blocks) - 1]
