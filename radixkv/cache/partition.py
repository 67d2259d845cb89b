"""One rule of many checks: each number of a range has exactly one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def check_partition(name: str, owned: Iterable[int], whole: range) -> None:
    """Raise AssertionError unless each number of a range has exactly one owner; `owned` has a number for each owner."""
    found = sorted(owned)
    if found != list(whole):
        owners, once = Counter(found), Counter(whole)
        raise AssertionError(f"{name} lost or owned twice: {sorted((owners - once) + (once - owners))}")
