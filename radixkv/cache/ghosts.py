"""Ghosts: a bounded memory of evicted token runs, for `explain`, for regret and for policies that learn.

A ghost is filed where its tokens used to follow: under (owner, position, first token). The owner is a node's
`ghost_owner`, which names one text. A trimmed node gets a new owner and its ghost keeps the old one. A root has the
number of its namespace, also if it was removed and made again. So chains of ghosts are followed by comparing tokens,
never hashes, and a ghost is never found for another text. Oldest ghosts are forgotten first; adding one is O(run).

With a policy that learns, old ghosts fade before they are forgotten: only the length and a hash of the run are kept.
That is enough to count a reuse, and too little to explain one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.cache.types import Pressure

Place = tuple[int, int, bytes]  # of a run: the owner, the number of tokens before it, its first token


class Ghost:
    """A run of tokens that was evicted."""

    __slots__ = ("digest", "eviction", "key", "next", "policy_data", "pressure", "regretted", "size", "time")

    def __init__(
        self, key: bytearray, following: int, time: float, pressure: Pressure, eviction: int, policy_data: Any = None
    ) -> None:
        self.key = key
        self.next = following  # the owner of the runs that followed this one
        self.time = time
        self.pressure = pressure
        self.eviction = eviction  # its number
        self.regretted = 0  # tokens of it that were counted as regret, each once
        self.policy_data = policy_data  # of its node
        self.size = len(key)  # bytes, faded or not
        self.digest: int | None = None  # of the tokens, once it has faded

    def fade(self) -> None:
        """Replace the tokens by a hash."""
        self.digest, self.key = hash(bytes(self.key)), bytearray()

    def matched(self, raw: bytes, at: int) -> int:
        """Bytes of `raw[at:]` that agree with it; a faded ghost agrees with all of it or nothing."""
        if self.digest is None:
            return common_prefix(raw, at, self.key)
        return self.size if hash(raw[at : at + self.size]) == self.digest else 0


class Ghosts:
    """At most `most` ghosts, faded ones included, with at most `capacity` tokens.

    `forget` is called with the policy_data and the position of each ghost that is forgotten. Without it ghosts do not
    fade.
    """

    __slots__ = ("_bytes", "_capacity", "_faded", "_forget", "_most", "_runs")

    def __init__(self, capacity: int, most: int, forget: Callable[[Any, int], None] | None = None) -> None:
        self._runs: OrderedDict[Place, Ghost] = OrderedDict()
        self._faded: OrderedDict[Place, Ghost] = OrderedDict()
        self._forget = forget
        self._bytes = 0
        self._capacity = capacity * WIDTH
        self._most = most

    def __len__(self) -> int:
        return len(self._runs) + len(self._faded)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return self._bytes // WIDTH

    def owners(self) -> set[int]:
        """Return the owners that have ghosts. O(ghosts)."""
        return {place[0] for runs in (self._runs, self._faded) for place in runs}

    def clear(self) -> None:
        """Forget everything, without calling `forget`."""
        self._runs.clear()
        self._faded.clear()
        self._bytes = 0

    def drop(self, owners: Iterable[int]) -> None:
        """Forget the ghosts below these owners, and the ghosts that follow them. O(ghosts)."""
        places: dict[int, list[Place]] = {}
        for place in (*self._runs, *self._faded):
            places.setdefault(place[0], []).append(place)
        waiting = list(owners)
        while waiting:
            for place in places.pop(waiting.pop(), ()):
                ghost = self._runs.pop(place, None) or self._faded.pop(place)
                self._bytes -= len(ghost.key)
                self._forgotten(ghost, place[1])
                waiting.append(ghost.next)

    def add(self, owner: int, position: int, ghost: Ghost) -> None:
        """Remember a run that followed `position` tokens below `owner`."""
        runs = self._runs
        place = (owner, position, bytes(ghost.key[:WIDTH]))
        old = runs.pop(place, None) or self._faded.pop(place, None)
        if old is not None:
            self._bytes -= len(old.key)
            if old.policy_data is not ghost.policy_data:
                self._forgotten(old, position)
        runs[place] = ghost
        self._bytes += len(ghost.key)
        while self._bytes > self._capacity or len(runs) + len(self._faded) > self._most:
            self._shrink()

    def follow(self, owner: int, position: int, raw: bytes, *, faded: bool = False) -> list[tuple[Ghost, int]]:
        """The ghosts along `raw`, which follows `position` tokens below `owner`, each with its matching tokens.

        Faded ghosts are left out unless `faded` asks for them.
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

    def adopt(self, owner: int, position: int, raw: bytes, new: int) -> int:
        """Return the owner for a node that publishes `raw` there again: the old one of that text, or else `new`."""
        if self._at((owner, position, raw[:WIDTH]), faded=True) is None:
            return new
        found = self.follow(owner, position, raw, faded=True)
        if not found:
            return new
        ghost, matched = found[-1]
        if sum(tokens for _, tokens in found) * WIDTH < len(raw):
            return new
        rest = ghost.key[matched * WIDTH :]
        if not rest:
            return ghost.next
        left = Ghost(rest, ghost.next, ghost.time, ghost.pressure, ghost.eviction, ghost.policy_data)
        self.add(new, position + len(raw) // WIDTH, left)
        return new

    def regret(self, owner: int, position: int, raw: bytes) -> list[tuple[Ghost, int]]:
        """Tokens of `raw`, after `position`, that would hit without the evictions, by ghost; each counts once."""
        if (owner, position, raw[:WIDTH]) not in self._runs:
            return []
        regretted = []
        for ghost, matched in self.follow(owner, position, raw):
            if matched > ghost.regretted:
                regretted.append((ghost, matched - ghost.regretted))
                ghost.regretted = matched
        return regretted

    def _at(self, place: Place, faded: bool) -> Ghost | None:
        return self._runs.get(place) or (self._faded.get(place) if faded else None)

    def _shrink(self) -> None:
        """Let the oldest ghost that has its tokens fade, or forget the oldest of all."""
        fades = self._forget is not None and self._bytes > self._capacity
        if self._faded and not fades:
            place, ghost = self._faded.popitem(last=False)
            self._forgotten(ghost, place[1])
            return
        place, ghost = self._runs.popitem(last=False)
        self._bytes -= len(ghost.key)
        if fades:
            ghost.fade()
            self._faded[place] = ghost
        else:
            self._forgotten(ghost, place[1])

    def _forgotten(self, ghost: Ghost, position: int) -> None:
        if self._forget is not None:
            self._forget(ghost.policy_data, position)
