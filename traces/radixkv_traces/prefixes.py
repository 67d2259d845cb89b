"""Numbers for prefixes: two blocks of a trace get one number exactly if they and all before them are the same.

Knows chains of ids. Knows no request and no cache. All ids are sorted at once, which takes some 30 bytes for each and
no Python object; only where one id stands below several others is each looked up below the block before it.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int32]


def prefix_numbers(ids: array[int], counts: array[int], roots: array[int]) -> tuple[Numbers, Numbers]:
    """A number int32 for each id, in order of first use, and for each number the one before it, -1 for a chain's first.

    The ids of all chains, one after the other; `counts` says how many each has, and what has different `roots` (>= 0)
    shares nothing. O(n log n).

    >>> [each.tolist() for each in prefix_numbers(array("q", [70, 50, 70, 60]), array("q", [2, 2]), array("q", [0, 0]))]
    [[0, 1, 0, 2], [-1, 0, 0]]
    """
    numbers = _by_id(np.frombuffer(ids, np.int64))
    lengths, below = np.frombuffer(counts, np.int64), -1 - np.frombuffer(roots, np.int64)
    heads = (np.cumsum(lengths) - lengths)[lengths > 0]
    before = _before(numbers, heads, below[lengths > 0])
    above = _above(numbers, before)
    if not np.array_equal(above[numbers], before):
        numbers = _by_path(numbers, heads, below[lengths > 0])
        above = _above(numbers, _before(numbers, heads, below[lengths > 0]))
    return numbers, np.maximum(above, -1)


def _by_id(ids: npt.NDArray[np.int64]) -> Numbers:
    """Equal ids have equal numbers, wherever they stand."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    new = np.ones(len(ids), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    del ordered
    first = order[new]  # where each id is used first
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    numbers = np.empty(len(ids), np.int32)
    numbers[order] = rank[np.cumsum(new, dtype=np.int32) - 1]
    return numbers


def _by_path(ids: Numbers, heads: npt.NDArray[np.int64], roots: npt.NDArray[np.int64]) -> Numbers:
    """Each id below the block before it: for ids that stand below several. O(n) Python objects."""
    known: dict[tuple[int, int], int] = {}
    numbers = np.empty(len(ids), np.int32)
    for head, end, at in zip(heads.tolist(), [*heads[1:].tolist(), len(ids)], roots.tolist(), strict=True):
        for place, each in enumerate(ids[head:end].tolist(), head):
            numbers[place] = at = known.setdefault((at, each), len(known))
    return numbers


def _before(numbers: Numbers, heads: npt.NDArray[np.int64], roots: npt.NDArray[np.int64]) -> Numbers:
    """The number before each, or its chain's root."""
    before = np.empty_like(numbers)
    before[1:] = numbers[:-1]
    before[heads] = roots
    return before


def _above(numbers: Numbers, before: Numbers) -> Numbers:
    above = np.empty(int(numbers.max(initial=-1)) + 1, np.int32)
    above[numbers] = before
    return above
