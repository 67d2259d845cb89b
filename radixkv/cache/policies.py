"""The eviction policies by name. A new policy is one entry in this table."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.eviction import EvictionIndex, Rank, SegmentedIndex
from radixkv.cache.predictive.index import PredictiveIndex
from radixkv.errors import UnknownPolicy

Policy = Callable[[int, int, Callable[[], float]], EvictionIndex]  # num_blocks, block_size, clock -> a new index


def by_rank(rank: Rank | None = None) -> Policy:
    """A policy that evicts leaves of low rank first, and equal ranks by recency. A leaf is ranked when it is added."""
    return lambda num_blocks, block_size, clock: EvictionIndex(rank)


POLICIES: dict[str, Policy] = {
    "lru": by_rank(),
    "fifo": by_rank(lambda node: node.born),
    "lfu": by_rank(lambda node: node.hits),
    "slru": lambda num_blocks, block_size, clock: SegmentedIndex(),
    "predictive": PredictiveIndex,
}
"""The eviction policies by name. A new entry is a new policy, for settings, commands and the simulator alike."""


def new_index(policy: str, num_blocks: int, block_size: int, clock: Callable[[], float]) -> EvictionIndex:
    """Return the index of a policy by its name, for a pool of that size. Raises UnknownPolicy."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnknownPolicy(f"eviction={policy!r}: allowed are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy](num_blocks, block_size, clock)
