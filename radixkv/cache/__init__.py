"""The prefix cache, usable on its own: token prefixes -> reference-counted KV blocks.

Knows no tensor, no model and no thread.
"""

from radixkv.cache.events import Observer
from radixkv.cache.eviction import POLICIES
from radixkv.cache.pins import Pin
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.cache.radix_tree import CachedRun
from radixkv.cache.sequence import Hint, Sequence, WritePlan
from radixkv.cache.types import CacheStats, Explanation

__all__ = [
    "POLICIES",
    "CacheStats",
    "CachedRun",
    "Explanation",
    "Hint",
    "Match",
    "Observer",
    "Pin",
    "PrefixCache",
    "Sequence",
    "WritePlan",
]
