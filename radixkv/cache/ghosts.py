"""Bounded memory of what was evicted: it serves explain and regret (and, later, eviction that learns).

Knows token runs, where they hung and when they went. Knows no block. A ghost hangs where its tokens used to follow:
below (owner, position, first token). The owner is a node's mark, which names one text: a trimmed node gets a new mark
and its ghost keeps the old one, so that chains of ghosts are followed by comparing tokens, never hashes, and nothing is
told of a text that took another's place. Oldest ghosts are forgotten first; adding one is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from radixkv.cache.tokens import WIDTH

Owner = Hashable  # a node's id, or a namespace's root


class Pressure(NamedTuple):
    """Why something was evicted: `wanted` blocks were asked for at once when only `free` were free."""

    wanted: int
    free: int

    def __str__(self) -> str:
        return f"to make room for {self.wanted} block{'s' * (self.wanted != 1)} when {self.free} were free"


class Ghost:
    """A run of tokens that was evicted."""

    __slots__ = ("eviction", "key", "next", "pressure", "regretted", "time")

    def __init__(self, key: bytearray, following: Owner, time: float, pressure: Pressure, eviction: int) -> None:
        self.key = key
        self.next = following  # the owner below which what followed this run hangs
        self.time = time
        self.pressure = pressure
        self.eviction = eviction  # its number
        self.regretted = 0  # tokens of it that were counted, each once


class Ghosts:
    """At most `capacity` tokens and `most` runs."""

    __slots__ = ("_bytes", "_capacity", "_most", "_runs")

    def __init__(self, capacity: int, most: int) -> None:
        self._runs: OrderedDict[tuple[Owner, int, bytes], Ghost] = OrderedDict()
        self._bytes = 0
        self._capacity = capacity * WIDTH
        self._most = most

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return self._bytes // WIDTH

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self._bytes = 0

    def add(self, owner: Owner, position: int, ghost: Ghost) -> None:
        """Remember a run that followed `position` tokens below `owner`."""
        runs = self._runs
        place = (owner, position, bytes(ghost.key[:WIDTH]))
        old = runs.pop(place, None)
        if old is not None:
            self._bytes -= len(old.key)
        runs[place] = ghost
        self._bytes += len(ghost.key)
        while self._bytes > self._capacity or len(runs) > self._most:
            self._bytes -= len(runs.popitem(last=False)[1].key)

    def follow(self, owner: Owner, position: int, raw: bytes) -> list[tuple[Ghost, int]]:
        """The ghosts along `raw`, which follows `position` tokens below `owner`, each with its tokens that match."""
        found: list[tuple[Ghost, int]] = []
        at = 0
        while ghost := self._runs.get((owner, position + at // WIDTH, raw[at : at + WIDTH])):
            matched = common_prefix(raw, at, ghost.key)
            found.append((ghost, matched // WIDTH))
            at += matched
            if matched < len(ghost.key):
                break
            owner = ghost.next
        return found

    def adopt(self, owner: Owner, position: int, raw: bytes, mark: Owner) -> Owner:
        """`raw`, which hung there, is published again: the owner of what followed it, `mark` if nothing is known."""
        if (owner, position, raw[:WIDTH]) not in self._runs:
            return mark
        found = self.follow(owner, position, raw)
        ghost, matched = found[-1]
        if sum(tokens for _, tokens in found) * WIDTH < len(raw):
            return mark
        rest = ghost.key[matched * WIDTH :]
        if not rest:
            return ghost.next
        left = Ghost(rest, ghost.next, ghost.time, ghost.pressure, ghost.eviction)
        self.add(mark, position + len(raw) // WIDTH, left)
        return mark

    def regret(self, owner: Owner, position: int, raw: bytes) -> list[tuple[Ghost, int]]:
        """Tokens of `raw`, behind `position`, that would hit had they not been evicted, by ghost; each counts once."""
        if (owner, position, raw[:WIDTH]) not in self._runs:
            return []
        wanted = []
        for ghost, matched in self.follow(owner, position, raw):
            if matched > ghost.regretted:
                wanted.append((ghost, matched - ghost.regretted))
                ghost.regretted = matched
        return wanted


def common_prefix(raw: bytes, at: int, key: bytes | bytearray) -> int:
    """Bytes of whole tokens that `raw[at:]` and `key` share: one comparison if they agree, bisection if not."""
    low, high = 0, min(len(key), len(raw) - at) // WIDTH
    if raw.startswith(key[: high * WIDTH], at):
        return high * WIDTH
    while high - low > 1:  # the first `low` tokens agree, the first `high` do not
        middle = (low + high) // 2
        if raw.startswith(key[low * WIDTH : middle * WIDTH], at + low * WIDTH):
            low = middle
        else:
            high = middle
    return low * WIDTH
