"""Recurrent state of models: running rows, and snapshots in the radix tree.

Read `slots`, `snapshots` and `row` in this order; `invariants` states the rules.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from radixkv.cache.recurrent.snapshots import Spacing

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

__all__ = ["Spacing", "StatefulPrefixCache"]


def StatefulPrefixCache(  # noqa: N802  # a class until options were arguments
    *args: Any, rows: int, snapshots: int, spacing: Spacing | None = None, **options: Any
) -> PrefixCache:
    """Return a PrefixCache with these arguments, and warn: `state_rows` is an argument of PrefixCache now."""
    from radixkv.cache import PrefixCache  # it imports this package
    from radixkv.cache.tokens import check_int

    check_int("rows", rows, 1)
    warnings.warn("StatefulPrefixCache is PrefixCache(state_rows=...) now", DeprecationWarning, stacklevel=2)
    return PrefixCache(*args, state_rows=rows, state_snapshots=snapshots, state_spacing=spacing, **options)
