"""Estimate the token hit rates that LRU pools of other sizes would have on the same requests.

A block hits in a pool if at most as many distinct blocks as the pool has were used since its last use, itself included:
its stack distance. A request touches its path from the deepest block to the root. A block's ancestors are therefore
always above it in the stack, and a pool evicts from the tails, as the cache does.

The stack holds the blocks whose ids are at most a threshold, which falls when their number reaches the limit: SHARDS of
a fixed size (Waldspurger et al., FAST 2015). Below the limit the curve is exact. Hits are all tokens in full blocks,
less the missed tokens of the sample divided by its rate. That is the paper's correction, SHARDS-adj: it adds the
difference between the expected and the sampled references to the smallest distance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint64]
Figures: TypeAlias = npt.NDArray[np.float64]  # requests, prompt tokens, cached tokens, then hit tokens of SIZES

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, inf)
"""The sizes of the pools of a curve, as multiples of the real one."""
MINUTES = 10
"""The length of the recent window."""

_HIGHEST = 2**64 - 1
_KEPT = 15 / 16  # of the sample, when the threshold falls
_CLEAR = 0.005  # of hit rate: a change below half a point is not worth a clause


@dataclass(frozen=True, slots=True)
class WhatIfCurve:
    """The hits of the requests of one window, measured and in pools of SIZES."""

    requests: int
    prompt_tokens: int
    cached_tokens: int  # as the engine measured them
    hit_tokens: tuple[int, ...]

    @property
    def hit_rates(self) -> tuple[float, ...]:
        """The token hit rate of each size; 0.0 without tokens."""
        return tuple(hits / max(1, self.prompt_tokens) for hits in self.hit_tokens)

    @property
    def measured(self) -> float:
        """The token hit rate that the engine measured; 0.0 without tokens."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """The curve of one moment. `reasons` name what makes the engine differ from an LRU pool of its size."""

    pool_blocks: int
    recent: WhatIfCurve  # of the last ten minutes
    since_load: WhatIfCurve
    dropped: int  # requests that came too fast to be added
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The curve in words, of the recent requests if there are any."""
        curve = self.recent if self.recent.prompt_tokens else self.since_load
        if not curve.prompt_tokens:
            return "No prompt has been served yet."
        rates = dict(zip(SIZES, curve.hit_rates, strict=True))
        now, twice, most = rates[1.0], rates[2.0], rates[inf]
        if twice - now < _CLEAR:
            clauses = [f"Twice the pool would not raise hits ({now:.0%})"]
        else:
            clauses = [f"Twice the pool would raise hits from {now:.0%} to {twice:.0%}"]
        if now - rates[0.5] >= _CLEAR:
            clauses.append(f"half of it would cost {_points(100 * (now - rates[0.5]))}")
        if most - twice >= _CLEAR:
            clauses.append(f"no pool could hit more than {most:.0%}")
        return "; ".join(clauses) + "."

    def as_fields(self) -> dict[str, Any]:
        """Return plain ints, lists and strings, for telemetry and JSON."""
        return asdict(self)

    @classmethod
    def from_fields(cls, said: Mapping[str, Any]) -> WhatIfReport:
        """Return the report of `as_fields`; unknown fields are left out. Raises KeyError for a missing one."""
        curves = {name: _curve_of(said[name]) for name in ("recent", "since_load")}
        return cls(said["pool_blocks"], **curves, dropped=said["dropped"], reasons=tuple(said.get("reasons", ())))


class WhatIf:
    """The stack of used blocks, and the hits of the requests so far. Not thread-safe."""

    def __init__(
        self, pool_blocks: int, block_size: int, sampled_blocks: int = 8192, *, computed_tokens: int = 1
    ) -> None:
        """Begin with an empty stack. Of each prompt, at least the last `computed_tokens` tokens miss."""
        self._pool_blocks, self._block_size = pool_blocks, block_size
        self._limit, self._computed_tokens = sampled_blocks, computed_tokens
        self._blocks = np.maximum(1, np.floor(np.array(SIZES) * pool_blocks))
        self._stamps: dict[int, int] = {}  # id of a sampled block -> its last use
        self._order = np.empty(0, np.int64)  # the stamps, sorted: the top of the stack is at the end
        self._clock = 0
        self._threshold = _HIGHEST
        self._since_load = np.zeros(3 + len(SIZES))
        self._minutes: deque[tuple[int, Figures]] = deque(maxlen=MINUTES)
        self._dropped = 0

    def add(self, ids: Ids, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count the hits of a request, and touch its path of blocks, root first in `ids`. O(blocks + sample).

        An id stands for a full block and all tokens before it in its namespace. `ids` may go on after the prompt, for
        the reply. `now` is in seconds.
        """
        sampled = np.flatnonzero(ids <= np.uint64(self._threshold))
        names = ids[sampled].tolist()
        stamps = [stamp for stamp in map(self._stamps.get, names) if stamp is not None]
        if len(self._stamps) + len(names) - len(stamps) > self._limit:
            self._lower_threshold(names)
            return self.add(ids, prompt_tokens, cached_tokens, now)
        places = np.searchsorted(self._order, stamps)
        hits = self._hit_tokens(sampled, places, len(ids), prompt_tokens - self._computed_tokens)
        self._count(np.concatenate(([1, prompt_tokens, cached_tokens], hits)), now)
        self._touch(names, places)
        return None

    def drop(self, count: int = 1) -> None:
        """Count requests that were not added."""
        self._dropped += count

    def report(self, now: float) -> WhatIfReport:
        """Return the curves of the last ten minutes and since load."""
        recent = [figures for minute, figures in self._minutes if minute > now // 60 - MINUTES]
        curves = _curve(sum(recent, np.zeros_like(self._since_load))), _curve(self._since_load)
        return WhatIfReport(self._pool_blocks, *curves, dropped=self._dropped)

    def check(self) -> None:
        """Assert that the stack, the sample and the counts agree. O(sample log sample)."""
        assert sorted(self._stamps.values()) == self._order.tolist()
        assert len(self._stamps) <= self._limit and max(self._stamps, default=0) <= self._threshold
        assert len(set(self._order.tolist())) == len(self._order) and max(self._order, default=-1) < self._clock
        minutes = [minute for minute, _ in self._minutes]
        assert all(before < after for before, after in pairwise(minutes))
        recent = sum((figures for _, figures in self._minutes), np.zeros_like(self._since_load))
        assert (recent[:3] <= self._since_load[:3]).all()
        for _, prompt, _, *hits in (recent, self._since_load):
            assert all(before <= after for before, after in pairwise([*hits, prompt]))

    def _hit_tokens(
        self, sampled: npt.NDArray[np.int64], places: npt.NDArray[np.int64], count: int, most: int
    ) -> Figures:
        """Return the hit tokens of each size, estimated from the sampled blocks of a path of `count` blocks.

        Distances grow along a path, so that each size hits its beginning.
        """
        starts = np.append(sampled, 0) * self._block_size
        weights = np.clip(most - starts, 0, self._block_size)
        weights[-1] = 0
        missed = np.cumsum(weights[::-1])[::-1]  # if this sampled block is the first miss
        rate = (self._threshold + 1) / 2**64
        hits = np.searchsorted(len(self._order) - 1 - places, (self._blocks - 1) * rate, side="right")
        full = max(0, min(most, count * self._block_size))
        return full - missed[hits] / rate

    def _touch(self, names: list[int], places: npt.NDArray[np.int64]) -> None:
        """Move the path to the top of the stack: the deepest block first, the root last."""
        kept = np.ones(len(self._order), np.bool_)
        kept[places] = False
        end = self._clock + len(names)
        self._order = np.concatenate((self._order[kept], np.arange(self._clock, end)))
        self._stamps.update(zip(names, range(end - 1, self._clock - 1, -1), strict=True))
        self._clock = end

    def _lower_threshold(self, names: list[int]) -> None:
        """Let blocks with the highest ids leave, so that there is room for a path."""
        ids = np.unique(np.array([*self._stamps, *names], np.uint64))
        self._threshold = int(ids[int(self._limit * _KEPT) - 1])
        self._stamps = {each: stamp for each, stamp in self._stamps.items() if each <= self._threshold}
        self._order = np.sort(np.fromiter(self._stamps.values(), np.int64, len(self._stamps)))

    def _count(self, figures: Figures, now: float) -> None:
        minute = int(now // 60)
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append((minute, np.zeros_like(figures)))
        self._since_load += figures
        self._minutes[-1][1][:] += figures


def prefix_ids(tokens: npt.ArrayLike, block_size: int, key: bytes) -> Ids:
    """Return an id for each full block of `tokens` (ints below 2**32) and all tokens before it. O(tokens).

    An id is a keyed hash: the sum of the mixed (position, token) pairs up to its end, mixed again.
    """
    count = len(np.asarray(tokens)) // block_size
    first, last = np.frombuffer(blake2b(key, digest_size=16).digest(), np.uint64)
    pairs = np.arange(count * block_size, dtype=np.uint64) << np.uint64(32)
    pairs |= np.asarray(tokens)[: len(pairs)].astype(np.uint64)
    sums = np.cumsum(mixed(pairs ^ first).reshape(count, block_size).sum(axis=1, dtype=np.uint64), dtype=np.uint64)
    return mixed(sums ^ last)


def mixed(numbers: Ids) -> Ids:
    """Return numbers that look uniform: the finalizer of SplitMix64, one to one."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _curve(figures: Figures) -> WhatIfCurve:
    requests, prompt, cached, *hits = (max(0, round(each)) for each in figures.tolist())
    return WhatIfCurve(requests, prompt, cached, tuple(hits))


def _curve_of(said: Mapping[str, Any]) -> WhatIfCurve:
    kept = {field.name: said[field.name] for field in fields(WhatIfCurve)}
    return WhatIfCurve(**kept | {"hit_tokens": tuple(kept["hit_tokens"])})


def _points(change: float) -> str:
    return f"{change:.0f} point{'' if round(change) == 1 else 's'}"
