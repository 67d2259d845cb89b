"""A router's index of full blocks, as strict as possible, and what it must be: the blocks of a cache, counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from radixkv.cache import PrefixCache
from radixkv.cache.block_events import BlockChanges, BlockEvents
from radixkv.cache.tokens import as_bytes, is_compressed
from tests.cache.fuzz import inside

Prefix = tuple[str | None, tuple[int, ...]]
"""A salt, and all tokens up to the end of a block."""


def salt_of(namespace: Hashable) -> str | None:
    return None if namespace is None else f"salt of {namespace}"


class BlockIndex:
    """The blocks of one cache by its events. A block that comes twice, leaves twice or lacks its parent is an error."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.events = cache, BlockEvents(cache, salt_of)
        self.size = cache.block_size
        self.blocks: dict[int, Prefix] = {}  # by id

    def read(self) -> BlockChanges:
        """Take the changes, and compare the index with the tree."""
        changes = self.events.take()
        self.events.check()
        assert len(self.events) == 0
        self.apply(changes)
        assert Counter(self.blocks.values()) == Counter(blocks_of(self.cache))
        return changes

    def apply(self, changes: BlockChanges) -> None:
        for number in changes.removed:
            del self.blocks[number]
        for run in changes.stored:
            assert len(run.tokens) == self.size * len(run.ids)
            before = (run.salt, ()) if run.parent is None else self.blocks[run.parent]
            for at, number in enumerate(run.ids):
                tokens = tuple(run.tokens[at * self.size : (at + 1) * self.size])
                assert number not in self.blocks
                before = self.blocks[number] = (run.salt, before[1] + tokens)

    def overlap(self, tokens: Sequence[int], namespace: Hashable) -> int:
        """The number of leading blocks of a text that are in the index."""
        known, ends = set(self.blocks.values()), range(self.size, len(tokens) + 1, self.size)
        found = [(salt_of(namespace), tuple(tokens[:end])) in known for end in ends]
        return [*found, False].index(False)


def announced(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable) -> int:
    """The number of leading blocks of a text that a router finds: none of a compressed prefix."""
    return 0 if is_compressed(as_bytes(tokens)) else cache.explain(tokens, namespace).reached // cache.block_size


def blocks_of(cache: PrefixCache) -> list[Prefix]:
    """The full blocks that a router finds in memory; each node has the blocks whose last tokens it holds."""
    size = cache.block_size
    return [
        (salt_of(node.namespace), tuple(node.text[: (at + 1) * size]))
        for node in inside.nodes(cache)
        if not is_compressed(as_bytes(node.text))
        for at in range(node.start // size, len(node.text) // size)
    ]
