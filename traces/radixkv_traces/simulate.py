"""What hit rate would a pool of this size have had? A recorded trace, replayed against the real prefix cache.

Knows block ids, the cache and one model of serving: requests run one at a time in file order, and only prompts enter.
A recorded block is one token in a block of size 1, so that what is measured is the eviction and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache import PrefixCache
from radixkv.errors import InvalidInput
from radixkv_traces.formats import TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found."""

    capacity_blocks: int
    eviction: str
    requests: int
    input_tokens: int
    hit_tokens: int
    hit_blocks: int
    evicted_blocks: int

    @property
    def token_hit_rate(self) -> float:
        """hit_tokens / input_tokens; 0.0 for an empty trace."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def unique_blocks(requests: Iterable[TraceRequest]) -> int:
    """How many different blocks the prompts have: the capacity at which nothing is ever evicted."""
    seen: set[int] = set()
    for request in requests:
        seen.update(request.blocks)
    return len(seen)


def replay(
    requests: Iterable[TraceRequest], capacity_blocks: int, eviction: str = "lru", block_tokens: int = 512
) -> ReplayResult:
    """Serve the requests in order from a pool of `capacity_blocks` blocks of `block_tokens` tokens.

    A request's hit is its longest cached chain of blocks, at most its input length; it holds that while the rest of
    its prompt takes the place of victims. Of a chain longer than the pool the head stays. O(blocks) in all, log
    leaves each.
    """
    if block_tokens < 1:
        raise InvalidInput(f"block_tokens={block_tokens!r}: allowed is an int of at least 1")
    cache = PrefixCache(capacity_blocks, 1, eviction)
    numbers: dict[int, int] = {}  # recorded ids may be 64-bit hashes; tokens are small
    count = input_tokens = hit_tokens = 0
    for request in requests:
        chain = array("i", [numbers.setdefault(block, len(numbers)) for block in request.blocks])
        count += 1
        input_tokens += request.input_length
        hit_tokens += min(_serve(cache, chain) * block_tokens, request.input_length)
    stats = cache.stats()
    return ReplayResult(
        capacity_blocks, eviction, count, input_tokens, hit_tokens, stats.hit_tokens, stats.evicted_blocks
    )


def _serve(cache: PrefixCache, chain: array[int]) -> int:
    """One request from arrival to end; returns its hit in blocks."""
    with cache.open(chain) as sequence:
        sequence.extend(chain[sequence.length : cache.num_blocks])
        sequence.commit()
        return sequence.cached_length
