"""The namespaces of one cache: callers name them by any hashable value, and the cache by a `Namespace`.

The caller's value is hashed and compared in `find`, and at the first use of a namespace in `add`. Trees and ghosts are
filed under the `Namespace`. So closing, evicting, clearing and checking run no code of the value's class, and a value
whose hash changes later affects no other namespace.

A namespace stays known while it has a root or ghosts, and until the next `keep` after that.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from itertools import count

from radixkv.errors import InvalidInput

LEAST = 1024
"""Namespaces that are kept before unused ones are dropped."""

_BUILT_IN = {(each.__hash__, each.__eq__) for each in (object, type(None), str, bytes, int, float)}
"""Hash and comparison of classes whose values can be keys as they are: both are constant and run no caller's code."""


class Namespace:
    """A namespace of one cache, hashed and compared by identity. `value` is the caller's.

    `number` is negative and never used twice: it owns the ghosts at the root, also while there is no root.
    """

    __slots__ = ("number", "value")

    def __init__(self, value: Hashable, number: int) -> None:
        self.value = value
        self.number = number


class Namespaces:
    """Maps the values of callers to the namespaces of one cache. Equal values are one namespace.

    >>> known = Namespaces()
    >>> made = known.add(("ann", 1))
    >>> known.find(("ann", 1)) is made, known.find("ben")
    (True, None)
    >>> known.keep([])
    >>> len(known)
    0
    """

    __slots__ = ("_numbers", "known", "limit")

    def __init__(self) -> None:
        self.known: dict[Hashable, Namespace] = {}
        self._numbers = count(-1, -1)
        self.limit = LEAST
        """With this number of namespaces, `keep` is due before the next `add`."""

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[Namespace]:
        """Yield all namespaces."""
        return iter(self.known.values())

    def find(self, value: Hashable) -> Namespace | None:
        """Return the namespace of a value that is equal to `value`, None if there is none. O(1).

        Raises InvalidInput for a value that is not hashable, or whose hash or comparison raises.
        """
        try:
            return self.known.get(value)
        except Exception as error:  # also for an item of a tuple; a class of the caller's may raise anything
            raise refusal(value, error) from error

    def add(self, value: Hashable) -> Namespace:
        """Make the namespace of a value that `find` did not find. O(1).

        Raises InvalidInput as `find`, and for a value that is found now: its hash or comparison changed meanwhile.
        """
        try:
            key = value if (type(value).__hash__, type(value).__eq__) in _BUILT_IN else _Key(value)
            made = Namespace(value, next(self._numbers))
            if self.known.setdefault(key, made) is not made:
                raise ValueError("its hash or comparison changed within the call")
        except Exception as error:
            raise refusal(value, error) from error
        return made

    def keep(self, used: Container[int], limit: int = LEAST) -> None:
        """Forget the namespaces whose numbers are not in `used`. O(known).

        `limit` and twice the number of the others bound the next ones.
        """
        for key in [key for key, namespace in self.known.items() if namespace.number not in used]:
            del self.known[key]
        self.limit = max(LEAST, limit, 2 * len(self.known))


class _Key:
    """A value with the hash that it had when it was added; it is compared by its own `==`."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Compare with the value of a call. If that raises, only a value of the same class passes it on."""
        if type(other) is _Key:
            return self is other
        if self._value is other:
            return True
        try:
            return bool(self._value == other)
        except Exception:
            if type(other) is type(self._value):
                raise
            return False


def refusal(value: object, error: Exception) -> InvalidInput:
    """Return the error for a value of a caller that cannot be a namespace, because its hash or comparison raised."""
    return InvalidInput(f"namespace of type {type(value).__name__}: allowed is None or anything hashable ({error})")
