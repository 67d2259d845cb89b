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
from math import ceil, inf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.int64]
Figures: TypeAlias = npt.NDArray[np.float64]  # requests, prompt tokens, cached tokens, then hit tokens of SIZES

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, inf)
"""The sizes of the pools of a curve, as multiples of the real one."""
MINUTES = 10
"""The length of the recent window."""

_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT, _POSITION = np.uint64(31), np.uint64(32)
_KEPT = 7 / 8  # of the sample, when the threshold falls
_CLEAR, _FINE = 0.005, 0.02  # changes of a hit rate: a smaller one is left out, or shown with a decimal


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
        _, half, now, twice, *_, most = curve.hit_rates
        digits = int(any(_CLEAR <= change < _FINE for change in (twice - now, now - half, most - twice)))
        if twice - now < _CLEAR:
            clauses = [f"Twice the pool would not raise hits ({now:.{digits}%})"]
        else:
            clauses = [f"Twice the pool would raise hits from {now:.{digits}%} to {twice:.{digits}%}"]
        if now - half >= _CLEAR:
            clauses.append(f"half of it would cost {100 * (now - half):.{digits}f} points")
        if most - twice >= _CLEAR:
            clauses.append(f"no pool could hit more than {most:.{digits}%}")
        return "; ".join(clauses) + "."

    def as_fields(self) -> dict[str, Any]:
        """Return plain ints, lists and strings, for telemetry and JSON."""
        return asdict(self, dict_factory=_plain)

    @classmethod
    def from_fields(cls, said: Mapping[str, Any]) -> WhatIfReport:
        """Return the report of `as_fields`; unknown fields are left out. Raises KeyError for a missing one."""
        recent, since_load = _curve_of(said["recent"]), _curve_of(said["since_load"])
        return cls(said["pool_blocks"], recent, since_load, said["dropped"], tuple(said.get("reasons", ())))


class WhatIf:
    """The stack of used blocks, and the hits of the requests so far. Not thread-safe."""

    def __init__(
        self, pool_blocks: int, block_size: int, sampled_blocks: int = 8192, *, computed_tokens: int = 1
    ) -> None:
        """Begin with an empty stack. Of each prompt, at least the last `computed_tokens` tokens miss."""
        self._pool_blocks, self._block_size, self._computed_tokens = pool_blocks, block_size, computed_tokens
        self._above = np.maximum(1, np.floor(np.array(SIZES) * pool_blocks)) - 1  # blocks above the last one that hits
        self._stamps: dict[int, int] = {}  # id of a sampled block -> its last use
        self._order = np.empty(sampled_blocks, np.int64)  # the stamps, sorted: the top of the stack is the last one
        self._clock = 0
        self._threshold, self._rate = np.uint64(2**64 - 1), 1.0
        self._since_load = np.zeros(3 + len(SIZES))
        self._minutes: deque[tuple[int, Figures]] = deque(maxlen=MINUTES)
        self._dropped = 0

    def add(self, ids: Ids, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count the hits of a request, and touch its path of blocks, root first in `ids`. O(blocks + sample).

        An id stands for a full block and all tokens before it in its namespace. `ids` may go on after the prompt, for
        the reply. `now` is in seconds.
        """
        sampled, names, places = self._find(ids)
        figures = np.empty(3 + len(SIZES))
        figures[:3] = 1, prompt_tokens, cached_tokens
        figures[3:] = self._hit_tokens(sampled, places, prompt_tokens - self._computed_tokens)
        self._count(figures, now)
        self._touch(names, places)

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
        order = self._order[: len(self._stamps)].tolist()
        assert sorted(self._stamps.values()) == order
        assert len(set(order)) == len(order) and max(order, default=-1) < self._clock
        assert max(self._stamps, default=0) <= int(self._threshold)
        minutes = [minute for minute, _ in self._minutes]
        assert all(before < after for before, after in pairwise(minutes))
        recent = sum((figures for _, figures in self._minutes), np.zeros_like(self._since_load))
        assert (recent[:3] <= self._since_load[:3]).all()
        for _, prompt, _, *hits in (recent, self._since_load):
            assert all(before <= after for before, after in pairwise([*hits, prompt]))

    def _find(self, ids: Ids) -> tuple[Flags, list[int], Places]:
        """Return which blocks of a path are in the sample, their ids, and where the known ones are in the stack."""
        sampled = ids <= self._threshold
        names = ids[sampled].tolist()
        stamps = [stamp for stamp in map(self._stamps.get, names) if stamp is not None]
        if len(self._stamps) + len(names) - len(stamps) > len(self._order):
            self._lower_threshold(names)
            return self._find(ids)
        return sampled, names, self._order[: len(self._stamps)].searchsorted(np.array(stamps, np.int64))

    def _hit_tokens(self, sampled: Flags, places: Places, most: int) -> Figures:
        """Return the hit tokens of each size, at most `most`, from the places in the stack of the path's known blocks.

        Distances grow along a path, so that each size hits its beginning.
        """
        blocks = max(0, min(len(sampled), -(-most // self._block_size)))
        tokens = max(0, min(most, blocks * self._block_size))
        lacking = blocks * self._block_size - tokens if blocks and sampled[blocks - 1] else 0  # of the last block
        hits = (len(self._stamps) - 1 - places).searchsorted(self._above * self._rate, side="right")
        missed = (np.count_nonzero(sampled[:blocks]) - hits) * self._block_size - lacking
        estimated: Figures = tokens - np.maximum(missed, 0) / self._rate
        return estimated

    def _touch(self, names: list[int], places: Places) -> None:
        """Move the path to the top of the stack: the deepest block first, the root last."""
        end, clock = len(self._stamps), self._clock + len(names)
        if len(places):
            lowest = places[-1]
            kept = np.ones(end - lowest, np.bool_)
            kept[places - lowest] = False
            self._order[lowest : end - len(places)] = self._order[lowest:end][kept]
        self._order[end - len(places) : end - len(places) + len(names)] = np.arange(self._clock, clock)
        self._stamps.update(zip(names, range(clock - 1, self._clock - 1, -1), strict=True))
        self._clock = clock

    def _lower_threshold(self, names: list[int]) -> None:
        """Let the blocks with the highest ids leave, so that there is room for a path."""
        ids = np.sort(np.fromiter({**self._stamps, **dict.fromkeys(names)}, np.uint64))
        self._threshold = ids[ceil(len(self._order) * _KEPT) - 1]
        highest = int(self._threshold)
        self._rate = (highest + 1) / 2**64
        self._stamps = {each: stamp for each, stamp in self._stamps.items() if each <= highest}
        self._order[: len(self._stamps)] = sorted(self._stamps.values())

    def _count(self, figures: Figures, now: float) -> None:
        minute = int(now // 60)
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append((minute, np.zeros_like(figures)))
        self._since_load += figures
        self._minutes[-1][1][:] += figures


def prefix_ids(tokens: npt.ArrayLike, block_size: int, key: bytes) -> Ids:
    """Return an id for each full block of `tokens` (ints below 2**32) and all tokens before it. O(tokens).

    An id is a keyed hash: the sum of the mixed pairs of position and token.
    """
    found = np.asarray(tokens)
    pairs = np.arange(len(found), dtype=np.uint64) << _POSITION
    np.add(pairs, found, out=pairs, casting="unsafe")
    pairs ^= np.frombuffer(blake2b(key, digest_size=8).digest(), np.uint64)
    return mixed(pairs).cumsum()[block_size - 1 :: block_size]


def mixed(numbers: Ids) -> Ids:
    """Return numbers that look uniform: the finalizer of SplitMix64, one to one."""
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _LAST_SHIFT)


def _curve(figures: Figures) -> WhatIfCurve:
    requests, prompt, cached, *hits = (max(0, round(each)) for each in figures.tolist())
    return WhatIfCurve(requests, prompt, cached, tuple(hits))


def _curve_of(said: Mapping[str, Any]) -> WhatIfCurve:
    kept = {field.name: said[field.name] for field in fields(WhatIfCurve)}
    return WhatIfCurve(**kept | {"hit_tokens": tuple(kept["hit_tokens"])})


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}
