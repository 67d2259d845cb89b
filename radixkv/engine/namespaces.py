"""Number the namespaces of callers, so that the engine's thread runs no code of a caller's class.

A namespace may be any hashable value. Its `__hash__` and `__eq__` run once for each call of the engine, on the caller's
thread. From there on it is an int: a key whose hash changes later, or that compares slowly, affects no other namespace.

Equal values have one number, as equal keys of a dict have one entry. A number is never used again. Memory is bounded: a
namespace that was unused for long and has no cached prefix may be dropped, and gets a new number at its next use.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.telemetry.records import NamespaceId
from radixkv.turns import group_key

MOST = 65_536
"""Namespaces that are kept, if they are more than twice the namespaces with cached prefixes."""


class NamespaceTable:
    """Maps the namespaces of one engine to their numbers. Any thread may call it.

    >>> table = NamespaceTable(lambda: ())
    >>> table.number(("ann", 1)) == table.number(("ann", 1)) != table.number("ben")
    True
    >>> table.number(None) is None
    True
    """

    def __init__(self, cached: Callable[[], Collection[Any]], most: int = MOST) -> None:
        """`cached` returns the numbers that have cached prefixes, on the caller's thread."""
        self._cached, self._most, self._limit = cached, most, most
        self._ids: dict[_Key, NamespaceId] = {}
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        self._dropping = threading.Lock()

    def __len__(self) -> int:
        """The number of namespaces that are kept."""
        return len(self._ids)

    def number(self, namespace: Hashable) -> NamespaceId | None:
        """Return the number of a namespace, None for the default one.

        O(1), and once in `most` / 2 new namespaces O(namespaces). Raises InvalidInput for a value that is not hashable,
        or whose comparison raises.
        """
        if namespace is None:
            return None
        try:
            # One call, which is atomic: two threads with equal values get one number.
            found = self._ids.setdefault(_Key(namespace), NamespaceId(next(self._numbers), namespace))
        except Exception as error:  # also for an item of a tuple; a class of the caller's may raise anything
            raise InvalidInput(
                f"a namespace must be hashable (a string, say), and {type(namespace).__name__} is not: {error}"
            ) from error
        if not found.used:
            key = group_key(namespace)
            found.turn = None if key is namespace else self.number(key)
        found.used = next(self._uses)
        if found.turn is not None:
            found.turn.used = found.used  # kept as long as its members
        if len(self._ids) > self._limit:
            self._drop()
        return found

    def _drop(self) -> None:
        """Drop the namespaces that were unused for longest and have no cached prefix, down to half of the most."""
        if not self._dropping.acquire(blocking=False):
            return  # another thread does it
        try:
            cached = set(self._cached())
            cached |= {each.turn for each in list(self._ids.values()) if each in cached and each.turn}
            oldest_first = sorted(self._ids.items(), key=lambda item: item[1].used)
            for key, number in oldest_first[: -(self._most // 2)]:
                if number not in cached:
                    self._ids.pop(key)
            self._limit = max(self._most, 2 * len(self._ids))
        except Exception:  # another thread added a namespace meanwhile, or a value with an equal hash raised
            return  # the next new namespace tries again
        finally:
            self._dropping.release()


class _Key:
    """A namespace as a key, with the hash that it had at first."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.value is other.value or bool(self.value == other.value))
