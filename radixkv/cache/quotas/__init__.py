"""Quotas: shares of the pool that are guaranteed to namespaces, and the order in which namespaces lose cached blocks.

Two rules hold for every eviction policy. Blocks are evicted from the namespace that exceeds its share most, in the
policy's order within it. And no namespace loses blocks to another one while it has no more than its share; then the
other one evicts its own blocks, or runs out of blocks. A namespace without a share has a share of 0. Host memory has
the same shares. Pins of a namespace hold at most its share. Pins without a share hold at most the blocks that all
shares leave free.

Read `limits`, `shares`, `index` and `quotas` in this order. The rest of the cache passes the group of a namespace to
the pool and to the index; a cache without limits has one group.
"""

from radixkv.cache.quotas.index import QuotaIndex
from radixkv.cache.quotas.limits import NamespaceLimits
from radixkv.cache.quotas.quotas import NamespaceUsage, Quotas
from radixkv.cache.quotas.shares import Shares

__all__ = ["NamespaceLimits", "NamespaceUsage", "QuotaIndex", "Quotas", "Shares"]
