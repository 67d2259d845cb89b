"""Bounded memory of what was evicted: it serves explain and regret (and, later, eviction that learns).

Knows token runs, where they hung and when they went. Knows no block. A ghost hangs where its tokens used to follow:
below (owner, position, first token). The owner is a node's mark, which names one text: a trimmed node gets a new mark
and its ghost keeps the old one, so that chains of ghosts are followed by comparing tokens, never hashes, and nothing is
told of a text that took another's place. Oldest ghosts are forgotten first; adding one is O(run).

For a policy that learns, the oldest fade before they are forgotten: of a faded run only the length and a hash are kept,
which is enough to count that it was wanted, not to tell anybody so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from radixkv.cache.tokens import WIDTH

if TYPE_CHECKING:
    from radixkv.cache.predictive.access_records import AccessRecord

Owner = Hashable  # a node's id, or a namespace's root
Place = tuple[Owner, int, bytes]  # where a run hung: below whom, behind how many tokens, its first


class Pressure(NamedTuple):
    """Why something was evicted: `wanted` blocks were asked for at once when only `free` were free."""

    wanted: int
    free: int

    def __str__(self) -> str:
        return f"to make room for {self.wanted} block{'s' * (self.wanted != 1)} when {self.free} were free"


class Ghost:
    """A run of tokens that was evicted."""

    __slots__ = ("digest", "eviction", "key", "next", "pressure", "regretted", "size", "time", "use")

    def __init__(
        self,
        key: bytearray,
        following: Owner,
        time: float,
        pressure: Pressure,
        eviction: int,
        use: AccessRecord | None = None,
    ) -> None:
        self.key = key
        self.next = following  # the owner below which what followed this run hangs
        self.time = time
        self.pressure = pressure
        self.eviction = eviction  # its number
        self.regretted = 0  # tokens of it that were counted, each once
        self.use = use  # the last use of its text, for a policy that learns
        self.size = len(key)  # bytes, faded or not
        self.digest: int | None = None  # of the tokens, once it has faded

    def fade(self) -> None:
        """Keep a hash in the place of the tokens."""
        self.digest, self.key = hash(bytes(self.key)), bytearray()

    def matched(self, raw: bytes, at: int) -> int:
        """Bytes of `raw[at:]` that it agrees with; a faded one agrees with all of it or nothing."""
        if self.digest is None:
            return common_prefix(raw, at, self.key)
        return self.size if hash(raw[at : at + self.size]) == self.digest else 0


class Ghosts:
    """At most `capacity` tokens and `most` runs, those included that have faded.

    `forgotten`, if given, is told of each that goes, and where it hung; only then they fade.
    """

    __slots__ = ("_bytes", "_capacity", "_faded", "_forgotten", "_most", "_runs")

    def __init__(
        self, capacity: int, most: int, forgotten: Callable[[AccessRecord | None, int], None] | None = None
    ) -> None:
        self._runs: OrderedDict[Place, Ghost] = OrderedDict()
        self._faded: OrderedDict[Place, Ghost] = OrderedDict()
        self._forgotten = forgotten
        self._bytes = 0
        self._capacity = capacity * WIDTH
        self._most = most

    def __len__(self) -> int:
        return len(self._runs) + len(self._faded)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return self._bytes // WIDTH

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self._faded.clear()
        self._bytes = 0

    def add(self, owner: Owner, position: int, ghost: Ghost) -> None:
        """Remember a run that followed `position` tokens below `owner`."""
        runs = self._runs
        place = (owner, position, bytes(ghost.key[:WIDTH]))
        old = runs.pop(place, None) or self._faded.pop(place, None)
        if old is not None:
            self._bytes -= len(old.key)
            if old.use is not ghost.use:
                self._forget(old, position)
        runs[place] = ghost
        self._bytes += len(ghost.key)
        while self._bytes > self._capacity or len(self) > self._most:
            self._shrink()

    def follow(self, owner: Owner, position: int, raw: bytes, *, faded: bool = False) -> list[tuple[Ghost, int]]:
        """The ghosts along `raw`, which follows `position` tokens below `owner`, each with its tokens that match.

        Of those that have faded nothing is told unless they are asked for.
        """
        found: list[tuple[Ghost, int]] = []
        at = 0
        while ghost := self._at((owner, position + at // WIDTH, raw[at : at + WIDTH]), faded):
            matched = ghost.matched(raw, at)
            if not matched:
                break
            found.append((ghost, matched // WIDTH))
            at += matched
            if matched < ghost.size:
                break
            owner = ghost.next
        return found

    def adopt(self, owner: Owner, position: int, raw: bytes, mark: Owner) -> Owner:
        """`raw`, which hung there, is published again: the owner of what followed it, `mark` if nothing is known."""
        if self._at((owner, position, raw[:WIDTH]), faded=True) is None:
            return mark
        found = self.follow(owner, position, raw, faded=True)
        if not found:
            return mark
        ghost, matched = found[-1]
        if sum(tokens for _, tokens in found) * WIDTH < len(raw):
            return mark
        rest = ghost.key[matched * WIDTH :]
        if not rest:
            return ghost.next
        left = Ghost(rest, ghost.next, ghost.time, ghost.pressure, ghost.eviction, ghost.use)
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

    def _at(self, place: Place, faded: bool) -> Ghost | None:
        return self._runs.get(place) or (self._faded.get(place) if faded else None)

    def _shrink(self) -> None:
        """Let the oldest that has its tokens fade, or forget the oldest of all."""
        fades = self._forgotten is not None and self._bytes > self._capacity
        if self._faded and not fades:
            place, ghost = self._faded.popitem(last=False)
            self._forget(ghost, place[1])
            return
        place, ghost = self._runs.popitem(last=False)
        self._bytes -= len(ghost.key)
        if fades:
            ghost.fade()
            self._faded[place] = ghost
        else:
            self._forget(ghost, place[1])

    def _forget(self, ghost: Ghost, position: int) -> None:
        if self._forgotten is not None:
            self._forgotten(ghost.use, position)


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
