"""Counters that only grow, and the frozen picture of them that callers get. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


class Counters:
    """What the cache counts as it goes; see CacheStats for the meanings."""

    __slots__ = (
        "closed_sequences",
        "committed_tokens",
        "copied_blocks",
        "evicted_blocks",
        "evicted_tokens",
        "hit_tokens",
        "opened_sequences",
        "query_tokens",
        "regret_tokens",
    )

    def __init__(self) -> None:
        self.query_tokens = self.hit_tokens = self.committed_tokens = self.regret_tokens = 0
        self.evicted_blocks = self.evicted_tokens = self.copied_blocks = 0
        self.opened_sequences = self.closed_sequences = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache at one moment: counters, which only grow, and gauges: free + cached + held = num_blocks."""

    query_tokens: int  # asked for in `open`, once each
    hit_tokens: int  # of these, found in the cache
    committed_tokens: int  # computed by users and committed
    evicted_blocks: int  # freed to make room
    evicted_tokens: int
    copied_blocks: int  # copy-on-write instructions handed out
    regret_tokens: int  # asked for again after they were evicted
    opened_sequences: int
    closed_sequences: int
    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int  # in the tree, held by nobody: evictable
    held_blocks: int  # of open sequences, plans and pins
    pinned_blocks: int  # part of held_blocks
    nodes: int  # of the tree, roots not counted
    leaves: int  # evictable ones
    namespaces: int
    ghosts: int  # evicted runs that are remembered

    @property
    def sequences(self) -> int:
        """Sequences that are open now."""
        return self.opened_sequences - self.closed_sequences

    @property
    def hit_rate(self) -> float:
        """hit_tokens / query_tokens; 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
