"""The prefix cache, usable on its own: token prefixes -> reference-counted KV blocks.

Read in this order: `types`, `tokens`, `namespaces`, `block_pool`, `radix_tree`, `sequence`, `state` and `prefix_cache`
are the core. Then `eviction` and `policies`, `ghosts`, `pins`, `events`, `change_tracker` with `reuse`, and
`invariants` for all rules in one place. `predictive` is one policy, and nothing else depends on it. `recurrent` is the
cache of models with recurrent state; the other modules do not depend on it. `quotas` keeps the shares of namespaces.
`host` is the cache with a second tier in host memory.
"""

from radixkv.cache.events import Observer
from radixkv.cache.pins import Pin
from radixkv.cache.policies import POLICIES
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.sequence import Sequence
from radixkv.cache.types import CachedRun, CacheStats, Explanation, Hint, Match, WritePlan

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
