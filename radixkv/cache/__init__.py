"""The prefix cache, usable on its own: token prefixes -> reference-counted KV blocks.

Knows no tensor, no model and no thread.
"""

from radixkv.cache.cached_run import CachedRun
from radixkv.cache.eviction import POLICIES
from radixkv.cache.explain import Explanation
from radixkv.cache.observer import Observer
from radixkv.cache.pins import Pin
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.cache.sequence import Hint, Sequence, WritePlan
from radixkv.cache.stats import CacheStats

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
