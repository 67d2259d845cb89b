"""What the values of a packed record must look like: their number, types and ranges, read off the record's class.

Knows type annotations. Does not know what a record means, nor frames. What arrives from a socket or a file goes through
here before anybody believes it, so that whoever shows a record need not expect surprises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from math import isfinite
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

MOST_INT = 2**63 - 1
MOST_BLOCKS = 2**31
_SIGNED = "priority"  # the one number that may be below zero
_RUNS = "blocks"  # (first, count, first, count, ...)
_INTS = {int}
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
        self._known: dict[tuple[type, ...], _Plan] = {}

    def check(self, values: Sequence[Any]) -> Sequence[int]:
        """ValueError if these are not the values of such a record; returns the places of those that are texts.

        Values at the end that have a default may be missing: an earlier release wrote them. O(values).
        """
        types = tuple(map(type, values))
        plan = self._known.get(types) or self._planned(types)
        if not plan.in_range(values):
            self._explain(values)
        for at in plan.tuples:
            self._check_numbers(at, values[at])
        for at, words in plan.words:
            self._demand(values[at] in words, at, values[at])
        return plan.texts

    def _planned(self, types: tuple[type, ...]) -> _Plan:
        """What is left to look at, once the types were found right."""
        if not self.needed <= len(types) <= len(self.names):
            raise ValueError(f"{self.name} has {self.needed} to {len(self.names)} values, not {len(types)}")
        for at, (kind, allowed) in enumerate(zip(types, self._kinds, strict=False)):
            if kind not in allowed:
                raise ValueError(f"{self.name}.{self.names[at]} cannot be a {kind.__name__}")
        plan = _Plan(types, self.names, self._words)
        if len(self._known) < _SIGNATURES:
            self._known[types] = plan
        return plan

    def _explain(self, values: Sequence[Any]) -> None:
        """Say which number is out of range; none is, if only their sum was."""
        for at, value in enumerate(values):
            if type(value) is int:
                least = -MOST_INT if self.names[at] == _SIGNED else 0
                self._demand(least <= value <= MOST_INT, at, value)
            elif type(value) is float:
                self._demand(isfinite(value), at, value)

    def _check_numbers(self, at: int, numbers: tuple[Any, ...]) -> None:
        """Token ids or runs of blocks; runs that cover more than there can be would cost whoever expands them."""
        if not numbers:
            return
        right = set(map(type, numbers)) == _INTS and min(numbers) >= 0 and max(numbers) < MOST_BLOCKS
        if right and self.names[at] == _RUNS:
            right = len(numbers) % 2 == 0 and sum(numbers[1::2]) <= MOST_BLOCKS
        self._demand(right, at, numbers)

    def _demand(self, right: bool, at: int, value: Any) -> None:
        if not right:
            raise ValueError(f"{self.name}.{self.names[at]} cannot be {str(value)[:80]}")


class _Plan:
    """How to look at values of certain types fast: most of the checks are one call each, and C runs it."""

    __slots__ = ("_counts", "_floats", "_signed", "texts", "tuples", "words")

    def __init__(self, types: tuple[type, ...], names: tuple[str, ...], words: dict[int, frozenset[str]]) -> None:
        ints = [at for at, kind in enumerate(types) if kind is int]
        self._counts = _getter([at for at in ints if names[at] != _SIGNED])
        self._signed = [at for at in ints if names[at] == _SIGNED]
        self._floats = _getter([at for at, kind in enumerate(types) if kind is float])
        self.tuples = [at for at, kind in enumerate(types) if kind is tuple]
        self.texts = [at for at, kind in enumerate(types) if kind is str]
        self.words = [(at, allowed) for at, allowed in words.items() if at < len(types) and types[at] is str]

    def in_range(self, values: Sequence[Any]) -> bool:
        """False if a number may be out of range."""
        counts, floats = self._counts, self._floats
        if counts is not None and not (min(counts(values)) >= 0 and max(counts(values)) <= MOST_INT):
            return False
        if floats is not None and not isfinite(sum(floats(values))):
            return False
        return all(abs(values[at]) <= MOST_INT for at in self._signed)


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """The values at these places, always as a tuple; None if there are none."""
    if not places:
        return None
    return itemgetter(*places, places[0])


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
