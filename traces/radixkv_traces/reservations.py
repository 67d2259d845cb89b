"""Three ways to reserve memory for sequences that grow: one slab each, a buddy block each, pages.

Knows tokens and what is free. Knows no request: sequences are numbered in the order in which they came and are still
there. Slabs and buddy blocks are made once and never grow; pages are taken as they are needed.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Lengths: TypeAlias = npt.NDArray[np.int64]


class Slabs:
    """A slab of the maximum length for each, whatever it will need."""

    def __init__(self, memory: int, slab: int) -> None:
        self._slab = slab
        self._free = memory // slab

    def admits(self, running: Lengths, length: int, final: int) -> bool:
        """Take a slab."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def leaves(self, index: int) -> None:
        """Give one back."""
        self._free += 1

    def could(self, final: int) -> bool:
        """Whether it is no longer than a slab."""
        return final <= self._slab

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Whole slabs."""
        return len(lengths) * self._slab * steps

    def grows(self, lengths: Lengths, steps: int) -> bool:
        """There is room from the start."""
        return True


class Buddy:
    """The smallest power of two that holds the final length, known beforehand: as kind as this scheme can be.

    Memory that is no power of two is several areas, each one. A block that is free together with its buddy becomes one
    block with it again.
    """

    def __init__(self, memory: int) -> None:
        self._free: dict[int, list[int]] = {1 << order: [] for order in range(memory.bit_length())}
        self._taken: list[tuple[int, int]] = []  # (address, size) in order of admission
        at = 0
        for size in sorted(self._free, reverse=True):
            if memory & size:
                self._free[size].append(at)
                at += size
        self._largest = max(self._free)

    def admits(self, running: Lengths, length: int, final: int) -> bool:
        """Take the smallest free block that is large enough, halved as often as possible."""
        size = _power(final)
        found = next((each for each in sorted(self._free) if each >= size and self._free[each]), None)
        if found is None:
            return False
        at = self._free[found].pop(0)
        while found > size:
            found //= 2
            insort(self._free[found], at + found)
        self._taken.append((at, size))
        return True

    def leaves(self, index: int) -> None:
        """Give the block back, joined with its buddy while that is free."""
        at, size = self._taken.pop(index)
        while size < self._largest and (at ^ size) in self._free[size]:
            self._free[size].remove(at ^ size)
            at &= ~size
            size *= 2
        insort(self._free[size], at)

    def could(self, final: int) -> bool:
        """Whether the largest area holds it."""
        return _power(final) <= self._largest

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Whole blocks."""
        return sum(size for _, size in self._taken) * steps

    def grows(self, lengths: Lengths, steps: int) -> bool:
        """There is room from the start."""
        return True


class Paged:
    """Blocks of some tokens, one more when the last is full."""

    def __init__(self, memory: int, block_size: int) -> None:
        self._size = block_size
        self._blocks = memory // block_size

    def admits(self, running: Lengths, length: int, final: int) -> bool:
        """There are blocks for all, and for one more token each."""
        return self.grows(np.append(running, length), 1)

    def leaves(self, index: int) -> None:
        """Whose blocks they are follows from the lengths: nothing to do."""

    def could(self, final: int) -> bool:
        """Whether the memory holds all of it."""
        return -(-final // self._size) <= self._blocks

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Blocks of the lengths at each step."""
        return self._size * int((_ceilings(lengths + steps, self._size) - _ceilings(lengths, self._size)).sum())

    def grows(self, lengths: Lengths, steps: int) -> bool:
        """Whether there are blocks enough."""
        return int((-(-(lengths + steps) // self._size)).sum()) <= self._blocks


class Growing(Protocol):
    """What can say whether all sequences can grow."""

    def grows(self, lengths: Lengths, steps: int) -> bool:
        """Whether all can grow by so many."""


def most_steps(scheme: Growing, lengths: Lengths, wanted: int) -> int:
    """The most steps, up to `wanted`, that all sequences can grow by. Bisection."""
    if scheme.grows(lengths, wanted):
        return wanted
    low, high = 0, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if scheme.grows(lengths, middle) else (low, middle)
    return low


def _power(tokens: int) -> int:
    return 1 << max(0, tokens - 1).bit_length()


def _ceilings(lengths: Lengths, size: int) -> Lengths:
    """The sum of ceil(k / size) for k = 1..n, for each n."""
    full, rest = np.divmod(lengths, size)
    found: Lengths = size * full * (full + 1) // 2 + rest * (full + 1)
    return found
