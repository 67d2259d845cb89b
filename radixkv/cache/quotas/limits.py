"""The limits of namespaces, checked, and the group that a namespace belongs to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import isfinite

from radixkv.errors import InvalidInput

ROUNDING = 1e-9  # by which shares such as 0.1 + 0.2 + 0.7 may exceed 1


class NamespaceLimits:
    """Shares of the pool by namespace. A share of a tuple counts for all tuples that begin with it, together.

    Group 0 has the namespaces without a share; the group of each share is its place in the mapping, from 1 on. Raises
    InvalidInput for shares that are not numbers from 0 to 1, or that add up to more than 1.

    >>> limits = NamespaceLimits({("ann",): 0.5, "ben": 0.25})
    >>> [limits.group(each) for each in (("ann",), ("ann", "mail"), "ben", "eve", None)]
    [1, 1, 2, 0, 0]
    """

    def __init__(self, shares: Mapping[Hashable, float]) -> None:
        if not isinstance(shares, Mapping):
            raise InvalidInput(
                f"namespace_limits must map namespaces to shares of the pool, got {type(shares).__name__}"
            )
        for namespace, share in shares.items():
            if not _is_share(share):
                raise InvalidInput(
                    f"namespace_limits: the share of {_name(namespace)} must be a number from 0 to 1, got {share!r}"
                )
        if sum(shares.values()) > 1 + ROUNDING:
            raise InvalidInput(
                f"namespace_limits: the shares are {sum(shares.values()):g} together, more than the whole pool (1)"
            )
        self.namespaces = tuple(shares)
        self.shares = (0.0, *map(float, shares.values()))
        """The share of each group."""
        self._groups = {namespace: number for number, namespace in enumerate(shares, 1)}
        self._longest = max((len(each) for each in shares if isinstance(each, tuple)), default=-1)

    def __len__(self) -> int:
        """The number of groups: one more than the shares."""
        return len(self.shares)

    def group(self, namespace: Hashable) -> int:
        """Return the group of a namespace; of a tuple, that of its longest beginning with a share. O(its length).

        Exceptions of the namespace's hash are passed on.
        """
        found = self._groups.get(namespace)
        if found is None and isinstance(namespace, tuple):
            for length in range(min(len(namespace) - 1, self._longest), -1, -1):
                if namespace[:length] in self._groups:
                    return self._groups[namespace[:length]]
        return found or 0

    def blocks(self, num_blocks: int) -> list[int]:
        """Return the guaranteed blocks of each group in a pool of `num_blocks`: shares, rounded down."""
        return [int(share * num_blocks + ROUNDING) for share in self.shares]


def _is_share(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and isfinite(value) and 0 <= value <= 1  # type: ignore[arg-type, operator]  # it is a number


def _name(namespace: Hashable) -> str:
    """Describe a namespace in a message, without running code of its class."""
    plain = namespace is None or type(namespace) in (str, int, bytes)
    return repr(namespace) if plain else f"a {type(namespace).__name__}"
