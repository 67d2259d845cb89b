"""Recurrent state of models: running rows, and snapshots in the radix tree.

Read `slots`, `snapshots` and `row` in this order; `invariants` states the rules.
"""

from radixkv.cache.recurrent.snapshots import Spacing

__all__ = ["Spacing"]
