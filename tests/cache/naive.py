"""A naive model of the cache: a trie of texts, and a pool of slots that holds one value per token.

It has no radix tree, no reference counts and no policies, so that it is right at a glance.
"""

import random
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.cache import WritePlan

Values = npt.NDArray[np.uint64]
_WEIGHTS = np.random.default_rng(20).integers(1, 2**63, size=1 << 17, dtype=np.uint64) | np.uint64(1)


def kv(namespace: Hashable, tokens: Sequence[int] | npt.NDArray[np.int32]) -> Values:
    """Return one value per token, derived from the namespace and the whole history up to and including that token."""
    salt = np.uint64(zlib.crc32(repr(namespace).encode())) << np.uint64(20)
    return np.cumsum((np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * _WEIGHTS[: len(tokens)]) + salt


@dataclass
class Texts:
    """A set of texts that is closed under taking prefixes, kept as nested dictionaries."""

    root: dict[int, dict] = field(default_factory=dict)  # type: ignore[type-arg]  # recursive

    def add(self, text: Iterable[int]) -> None:
        node = self.root
        for token in text:
            node = node.setdefault(token, {})

    def longest_prefix(self, text: Iterable[int]) -> int:
        """Count the leading tokens of `text` that are in the set."""
        node, length = self.root, 0
        for token in text:
            if token not in node:
                break
            node, length = node[token], length + 1
        return length

    def blocks(self, block_size: int) -> int:
        """Count the blocks that hold every text once: one per full block, one per text that ends inside a block."""
        count, level, depth = 0, [self.root], 0
        while level:
            if depth and depth % block_size == 0:
                count += len(level)
            elif depth:
                count += sum(1 for node in level if not node)
            level, depth = [child for node in level for child in node.values()], depth + 1
        return count

    def __bool__(self) -> bool:
        return bool(self.root)


@dataclass
class Work:
    """A plan and the values to write for it."""

    plan: WritePlan
    values: Values


class Pool:
    """The slots of all blocks. Copies come first, in any order; then the writes, in any order."""

    def __init__(self, num_blocks: int, block_size: int, rng: random.Random) -> None:
        self.block_size = block_size
        self.slots: Values = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self.rng = rng

    def execute(self, batch: Sequence[Work]) -> None:
        for source, target in self._shuffled(copy for work in batch for copy in work.plan.copies):
            self.slots[target] = self.slots[source]
        self._assert_independent(batch)
        for work in self.rng.sample(batch, len(batch)):
            self.slots.reshape(-1)[work.plan.slots] = work.values

    def _shuffled(self, copies: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        order = list(copies)
        self.rng.shuffle(order)
        return iter(order)

    def _assert_independent(self, batch: Sequence[Work]) -> None:
        sources = {source for work in batch for source, _ in work.plan.copies}
        targets = [target for work in batch for _, target in work.plan.copies]
        assert len(set(targets)) == len(targets), "two copies of one launch write the same block"
        assert not sources & set(targets), "a copy reads a block that another copy of the same launch writes"
        slots = [int(slot) for work in batch for slot in work.plan.slots]
        assert len(set(slots)) == len(slots), "two plans write the same slot"

    def read(self, table: npt.NDArray[np.int32], length: int) -> Values:
        """Return the values of the first `length` tokens of a block table."""
        return self.slots[np.asarray(table, dtype=np.int64)].reshape(-1)[:length]
