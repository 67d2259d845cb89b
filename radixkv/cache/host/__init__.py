"""The prefix cache with a second tier of blocks in host memory.

Read `tier`, `tree`, `sequence` and `prefix_cache` in this order; `invariants` states the rules.
"""

from radixkv.cache.host.prefix_cache import HostPrefixCache
from radixkv.cache.host.sequence import HostSequence
from radixkv.cache.host.tree import HostRun

__all__ = ["HostPrefixCache", "HostRun", "HostSequence"]
