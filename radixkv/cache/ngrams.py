"""Find where the last tokens of a text occurred before: hash chains of n-grams, as in LZ77 (RFC 1951, section 4).

A ring of tokens keeps the newest text. Each place has a link to the place before it whose n-gram has the same hash.
Hashes only suggest places: tokens are compared one by one, so a collision, or a link into overwritten text, finds
nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

LONGEST = 24
"""Tokens of a match that are compared: longer matches are no better."""

_LINKS = 8  # places of a chain that are tried
_FACTOR = 0x9E3779B97F4A7C15
_BITS = 64
_FEW = 8  # tokens from which numpy is faster


class NgramIndex:
    """The newest `capacity` tokens of a text that grows, and the places of its n-grams of `gram` tokens.

    A place is the position of an n-gram's last token, counted from the beginning of the text.
    """

    def __init__(self, gram: int, capacity: int, *, heads: int) -> None:
        """Take 8 bytes a token, and 4 for each of at least `heads` chains."""
        self.gram, self.capacity, self.length = gram, capacity, 0
        self.tokens = np.full(capacity, -1, np.int32)  # place p at p % capacity; -1 was wiped
        self._view = self.tokens.data  # reads one token in half the time
        self._links = np.zeros(capacity, np.int32)  # the ring's place before, from 1 on; 0 for none
        bits = max(heads - 1, 1).bit_length()
        self._shift, self._heads = _BITS - bits, np.zeros(1 << bits, np.int32)
        self._factors = [pow(_FACTOR, each + 1, 1 << _BITS) for each in range(gram)]
        self._begin = 0  # of the present piece

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return int(self.tokens.nbytes + self._links.nbytes + self._heads.nbytes)

    def append(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Continue the present piece of text. O(tokens): about 0.1 us for each of many."""
        if len(tokens) < _FEW:
            for token in tokens:
                self._append_one(int(token))
            return
        given = np.asarray(tokens, np.int32)
        for start in range(0, len(given), self.capacity):
            self._append_many(given[start : start + self.capacity])

    def part(self) -> None:
        """Begin another piece of text: no n-gram reaches back over this place."""
        self._begin = self.length

    def read(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the tokens [start, stop) of the text, which are still there."""
        first, last = start % self.capacity, (stop - 1) % self.capacity + 1
        if stop <= start:
            return self.tokens[:0]
        return self.tokens[first:last] if first < last else np.concatenate((self.tokens[first:], self.tokens[:last]))

    def places(self, suffix: Sequence[int]) -> Iterator[int]:
        """Yield places whose n-gram may equal the last tokens of `suffix`, the latest first."""
        if len(suffix) < self.gram:
            return
        link, later = int(self._heads[self._hash(suffix[-self.gram :])]), self.length
        for _ in range(_LINKS):
            place = self.length - 1 - (self.length - link) % self.capacity
            if not link or not 0 <= place < later:  # a link into overwritten text leads to a later place
                return
            yield place
            link, later = int(self._links[link - 1]), place

    def matched(self, place: int, suffix: Sequence[int], low: int, more_than: int = 0) -> int:
        """Return how many last tokens of `suffix` end at `place`, without the text before `low`; at most `LONGEST`.

        Returns 0 unless they are more than `more_than`.
        """
        tokens, capacity = self._view, self.capacity
        most = min(len(suffix), LONGEST, place + 1 - max(low, self.length - capacity))
        if most <= more_than or tokens[(place - more_than) % capacity] != suffix[-1 - more_than]:
            return 0
        for count in range(most):
            if tokens[(place - count) % capacity] != suffix[-1 - count]:
                return count
        return most

    def clear(self) -> None:
        """Forget the text, and leave no token of it in memory."""
        used = min(self.length, self.capacity)
        self.tokens[:used], self._links[:used] = -1, 0
        self._heads[:] = 0
        self.length = self._begin = 0

    def _hash(self, tokens: Sequence[int]) -> int:
        total = sum(factor * int(token) for factor, token in zip(self._factors, tokens, strict=True))
        return (total & ((1 << _BITS) - 1)) >> self._shift

    def _append_one(self, token: int) -> None:
        at = self.length % self.capacity
        self.tokens[at] = token
        self.length += 1
        self._links[at] = 0
        if self.length - self._begin >= self.gram <= self.capacity:
            chain = self._hash(self.read(self.length - self.gram, self.length).tolist())
            self._links[at], self._heads[chain] = self._heads[chain], at + 1

    def _append_many(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append at most `capacity` tokens."""
        start, count, gram = self.length, len(tokens), self.gram
        slots = (start + np.arange(count)) % self.capacity
        before = self.read(max(self._begin, start - gram + 1, start - self.capacity + count), start)
        window = np.concatenate((before, tokens)).astype(np.uint64)
        self.tokens[slots], self._links[slots] = tokens, 0
        self.length += count
        whole = len(window) - gram + 1
        if whole <= 0:
            return
        total = np.zeros(whole, np.uint64)
        for place, factor in enumerate(self._factors):
            total += np.uint64(factor) * window[place : place + whole]
        chains = (total >> np.uint64(self._shift)).astype(np.int64)
        ends = slots[count - whole :] + 1
        order = np.argsort(chains, kind="stable")
        found = chains[order]
        again = np.flatnonzero(found[1:] == found[:-1]) + 1
        links = self._heads[chains]
        links[order[again]] = ends[order[again - 1]]
        self._links[ends - 1] = links
        self._heads[chains] = ends  # of equal chains, the last one stays
