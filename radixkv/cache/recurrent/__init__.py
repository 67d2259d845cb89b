"""The prefix cache of models with recurrent state: running rows, and snapshots in the radix tree.

Read `slots`, `snapshots`, `tree`, `sequence` and `prefix_cache` in this order; `invariants` states the rules.
"""

from radixkv.cache.recurrent.prefix_cache import StatefulPrefixCache
from radixkv.cache.recurrent.sequence import StatefulSequence

__all__ = ["StatefulPrefixCache", "StatefulSequence"]
