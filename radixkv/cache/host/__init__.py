"""The second tier of a prefix cache: blocks in host memory.

Read `blocks`, `tier` and `loading` in this order; `invariants` states the rules.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from radixkv.cache.host.tier import HostRun

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

__all__ = ["HostPrefixCache", "HostRun"]


def HostPrefixCache(*args: Any, **options: Any) -> PrefixCache:  # noqa: N802  # a class until options were arguments
    """Return a PrefixCache with these arguments, and warn: `host_blocks` is an argument of PrefixCache now."""
    from radixkv.cache import PrefixCache  # it imports this package

    warnings.warn("HostPrefixCache is PrefixCache(host_blocks=...) now", DeprecationWarning, stacklevel=2)
    return PrefixCache(*args, **options)
