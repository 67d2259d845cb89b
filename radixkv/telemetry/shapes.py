"""What the values of a packed record must look like: their number, types and ranges, read off the record's class.

Knows type annotations. Does not know what a record means, nor frames. What arrives from a socket or a file goes through
here before anybody believes it, so that whoever shows a record need not expect surprises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from math import isfinite
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

MOST_INT = 2**63 - 1
MOST_BLOCKS = 2**31
_SIGNED = "priority"  # the one number that may be below zero
_RUNS = "blocks"  # (first, count, first, count, ...)
_SIGNATURES = 1024  # combinations of types that were found right and are remembered: far more than honest peers send


class Shape:
    """The values of one record class, in the order of its fields."""

    def __init__(self, record: type) -> None:
        hints = get_type_hints(record)
        every = fields(record)
        self.name = record.__name__
        self.names = tuple(each.name for each in every)
        self.needed = sum(each.default is MISSING for each in every)
        self.values = attrgetter(*self.names)
        self._kinds = [_kinds(hints[name]) for name in self.names]
        self._words = {at: words for at, name in enumerate(self.names) if (words := _words(hints[name]))}
        self._known: set[tuple[type, ...]] = set()

    def check(self, values: Sequence[Any]) -> None:
        """ValueError if these are not the values of such a record.

        Values at the end that have a default may be missing, and there may be more than we know: an earlier or a later
        release wrote them. O(values).
        """
        if len(values) < self.needed:
            raise ValueError(f"{self.name} has at least {self.needed} values, not {len(values)}")
        types = tuple(map(type, values[: len(self.names)]))
        if types not in self._known:
            self._check_types(types)
        for at, kind in enumerate(types):
            if kind is int:
                least = -MOST_INT if self.names[at] == _SIGNED else 0
                self._demand(least <= values[at] <= MOST_INT, at, values[at])
            elif kind is float:
                self._demand(isfinite(values[at]), at, values[at])
            elif kind is tuple:
                self._check_numbers(at, values[at])
        for at, words in self._words.items():
            if at < len(types) and values[at] is not None:
                self._demand(values[at] in words, at, values[at])

    def _check_types(self, types: tuple[type, ...]) -> None:
        for at, (kind, allowed) in enumerate(zip(types, self._kinds, strict=False)):
            if kind not in allowed:
                raise ValueError(f"{self.name}.{self.names[at]} cannot be a {kind.__name__}")
        if len(self._known) < _SIGNATURES:
            self._known.add(types)

    def _check_numbers(self, at: int, numbers: tuple[Any, ...]) -> None:
        """Token ids or runs of blocks; runs that cover more than there can be would cost whoever expands them."""
        self._demand(not numbers or set(map(type, numbers)) == {int}, at, numbers)
        self._demand(not numbers or (min(numbers) >= 0 and max(numbers) < MOST_BLOCKS), at, numbers)
        if self.names[at] == _RUNS:
            self._demand(len(numbers) % 2 == 0 and sum(numbers[1::2]) <= MOST_BLOCKS, at, numbers)

    def _demand(self, right: bool, at: int, value: Any) -> None:
        if not right:
            raise ValueError(f"{self.name}.{self.names[at]} cannot be {str(value)[:80]}")


_SHAPES: dict[type, Shape] = {}


def shape_of(record: type) -> Shape:
    """The shape of a record class, read once."""
    if record not in _SHAPES:
        _SHAPES[record] = Shape(record)
    return _SHAPES[record]


def _kinds(hint: Any) -> frozenset[type]:
    """The exact types that a field may have: bool is no int here, but an int may stand for a float."""
    if get_origin(hint) is Literal:
        return frozenset({str})
    if get_origin(hint) is tuple:
        return frozenset({tuple})
    if parts := get_args(hint):  # X | None
        return frozenset().union(*map(_kinds, parts))
    return frozenset({float, int}) if hint is float else frozenset({cast(type, hint)})


def _words(hint: Any) -> frozenset[str]:
    """The words that a field may have, if they are listed."""
    if get_origin(hint) is Literal:
        return frozenset(get_args(hint))
    listed = [_words(part) for part in get_args(hint) if part is not NoneType]
    return frozenset().union(*listed)
