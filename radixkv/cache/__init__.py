"""The prefix cache, usable on its own: token prefixes -> reference-counted KV blocks.

Read in this order:

types, tokens            nodes, results and protocols; token ids as bytes
namespaces               namespaces of callers, by number
block_pool               the owners of each block, and which blocks are evictable
radix_tree               token runs -> blocks: match, hold, split, grow, evict
sequence                 open, extend, commit, close: the plans of one reader and writer
state                    the parts of one cache, and the counters
prefix_cache, readings   the public methods; match and explain
eviction, policies       the order of eviction; the table of policies
ghosts, pins             evicted runs; prefixes that are protected from eviction
announcements            the text of waiting requests, which is evicted last
events                   the events of a cache, and their followers
change_tracker, reuse    two records for a mirror: nodes that changed, and how often they were found
block_events             the full blocks that were stored and removed, for a router of several engines
invariants, partition    all rules in one place, which tests recount

Options are parts in folders of their own, and all of them combine. `host` is a residence: a tier in host memory for
runs that leave the pool. `recurrent` has the rows and snapshots of models with recurrent state; these follow events.
`predictive` is one policy.
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
