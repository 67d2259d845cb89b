"""The second tier of a prefix cache: blocks in host memory.

Read `blocks`, `tier` and `loading` in this order; `invariants` states the rules.
"""

from radixkv.cache.host.tier import HostRun

__all__ = ["HostRun"]
