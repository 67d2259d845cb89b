"""Estimate the token hit rates that LRU pools of other sizes would have on the same requests.

A block's stack distance is the number of distinct blocks used since its last use; it hits in a pool of at least that
many blocks. A request touches its path from the deepest block to the root, so pools evict tails first, as the cache
does. The stack is exact up to a number of blocks. Above it, only blocks whose ids are at most a threshold are kept:
SHARDS of a fixed size (Waldspurger et al., FAST 2015). Hits are all tokens less the missed ones of the sample, divided
by its rate. This is SHARDS-adj: the difference between expected and sampled uses is added to the smallest distance.

Only the pool without limit hits blocks that are deeper than the largest pool, and an engine meets ever more of them.
They have a lower threshold and about a quarter of the sample at most, so that the other rates stay right.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from math import ceil, inf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint64]
Figures: TypeAlias = npt.NDArray[np.float64]  # requests, prompt tokens, cached tokens, then the hit tokens of SIZES
Mask: TypeAlias = npt.NDArray[np.bool_]
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, inf)  # of the pools of a curve, as multiples of the real one
_MINUTES = 10  # of the recent window
_KEPT, _KEPT_DEEP = 7 / 8, 1 / 8  # of the sample, when a threshold falls
_CLEAR, _FINE = 0.005, 0.02  # changes of a hit rate: a smaller one is left out, or shown with a decimal
_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]


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
    def curve(self) -> WhatIfCurve:
        """The curve of the recent requests if there are any, else of all."""
        return self.recent if self.recent.prompt_tokens else self.since_load

    @property
    def sentence(self) -> str:
        """The curve in words."""
        if not self.curve.prompt_tokens:
            return "No request has ended yet."
        _, half, now, twice, *_, most = self.curve.hit_rates
        gain, loss, rest = twice - now, now - half, most - twice
        digits = int(any(_CLEAR <= change < _FINE for change in (gain, loss, rest)))
        gained = f"raise hits from {now:.{digits}%} to {twice:.{digits}%}"
        first = gained if gain >= _CLEAR else f"not raise hits ({now:.{digits}%})"
        cost = f"; half of it would cost {100 * loss:.{digits}f} points" if loss >= _CLEAR else ""
        bound = f"; no pool could hit more than {most:.{digits}%}" if rest >= _CLEAR else ""
        return f"Twice the pool would {first}{cost}{bound}."

    def as_fields(self) -> dict[str, Any]:
        """Return plain ints, lists and strings, for telemetry and JSON."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_fields(cls, said: Mapping[str, Any]) -> WhatIfReport:
        """Return the report of `as_fields`; unknown fields are left out. Raises KeyError for a missing one."""
        recent, since_load = (
            WhatIfCurve(each["requests"], each["prompt_tokens"], each["cached_tokens"], tuple(each["hit_tokens"]))
            for each in (said["recent"], said["since_load"])
        )
        return cls(said["pool_blocks"], recent, since_load, said["dropped"], tuple(said.get("reasons", ())))


class WhatIf:
    """The stack of used blocks, and the hits of the requests so far. Not thread-safe."""

    def __init__(self, pool_blocks: int, block_size: int, sampled_blocks: int = 8192, computed_tokens: int = 1) -> None:
        """Begin with an empty stack. Of each prompt, at least the last `computed_tokens` tokens miss."""
        self._pool_blocks, self._block_size, self._computed_tokens = pool_blocks, block_size, computed_tokens
        self._above = np.maximum(1, np.floor(np.array(SIZES) * pool_blocks)) - 1  # blocks above the last one that hits
        self._stamps: dict[int, int] = {}  # id of a sampled block -> its last use
        self._order = np.empty(sampled_blocks, np.int64)  # the stamps, sorted: the top of the stack is the last one
        self._highest = self._highest_deep = np.uint64(2**64 - 1)  # ids of blocks in the largest pool, and below it
        self._since_load = np.zeros(3 + len(SIZES))
        self._minutes: deque[tuple[int, Figures]] = deque(maxlen=_MINUTES)
        self._clock = self._dropped = 0

    def add(self, ids: Ids, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count the hits of a prompt, then touch its path and the reply's: `ids` of full blocks, root first.

        An id stands for the block and all tokens before it in its namespace. `now` is in seconds. O(blocks + sample).
        """
        sampled, names, places = self._find(ids)
        if not self._minutes or self._minutes[-1][0] < now // 60:
            self._minutes.append((int(now // 60), np.zeros_like(self._since_load)))
        hit_tokens = self._hit_tokens(ids, sampled, places, prompt_tokens - self._computed_tokens)
        figures = np.array((1, prompt_tokens, cached_tokens, *hit_tokens.tolist()))
        for window in (self._since_load, self._minutes[-1][1]):
            np.add(window, figures, out=window)
        self._touch(names, places)

    def touch(self, ids: Ids) -> None:
        """Use the path of another reply to the prompt of the last `add`."""
        self._touch(*self._find(ids)[1:])

    def drop(self, count: int = 1) -> None:
        """Count requests that were not added."""
        self._dropped += count

    def report(self, now: float) -> WhatIfReport:
        """Return the curves of the last ten minutes and since load."""
        recent = [figures for minute, figures in self._minutes if minute > now // 60 - _MINUTES]
        windows = sum(recent, np.zeros_like(self._since_load)), self._since_load
        rounded = ([max(0, round(each)) for each in figures.tolist()] for figures in windows)
        curves = [WhatIfCurve(each[0], each[1], each[2], (*each[3:-1], max(each[-2:]))) for each in rounded]
        return WhatIfReport(self._pool_blocks, curves[0], curves[1], self._dropped)

    def check(self) -> None:
        """Assert that the stack, the sample and the counts agree. O(sample log sample)."""
        order = self._order[: len(self._stamps)].tolist()
        assert sorted(self._stamps.values()) == order and all(before < after for before, after in pairwise(order))
        assert max(self._stamps, default=0) <= int(self._highest) and max(order, default=-1) < self._clock
        assert self._highest_deep <= self._highest
        assert all(before < after for (before, _), (after, _) in pairwise(self._minutes))
        for _, prompt, _, *hits in (self._since_load, *(figures for _, figures in self._minutes)):
            assert all(before <= after for before, after in pairwise([*hits[:-1], prompt])) and hits[-1] <= prompt

    def _find(self, ids: Ids) -> tuple[Mask, list[int], npt.NDArray[np.int64]]:
        """Return which blocks of a path are in the sample, their ids, and where the known ones are in the stack."""
        sampled = ids <= self._highest
        names = ids[sampled].tolist()
        stamps = [stamp for stamp in map(self._stamps.get, names) if stamp is not None]
        if len(self._stamps) + len(names) - len(stamps) > len(self._order):
            self._lower_threshold(names)
            return self._find(ids)
        return sampled, names, self._order[: len(self._stamps)].searchsorted(np.array(stamps, np.int64))

    def _hit_tokens(self, ids: Ids, sampled: Mask, places: npt.NDArray[np.int64], most: int) -> Figures:
        """Return the hit tokens of each size, at most `most`. Distances grow along a path: each size hits its head."""
        blocks = max(0, min(len(ids), -(-most // self._block_size)))
        tokens = max(0, min(most, blocks * self._block_size))
        rate = float(self._highest) / 2**64
        hits = (len(self._stamps) - 1 - places).searchsorted(self._above * rate, side="right")
        missed = self._tokens(sampled[:blocks], tokens) - hits * self._block_size
        hit_tokens: Figures = tokens - np.maximum(missed, 0) / rate
        if self._highest_deep < self._highest:
            sampled = ids[:blocks] <= self._highest_deep
            known = sum(map(self._stamps.__contains__, ids[:blocks][sampled].tolist()))
            missed_by_all = self._tokens(sampled, tokens) - known * self._block_size
            hit_tokens[-1] = tokens - max(0, missed_by_all) / (float(self._highest_deep) / 2**64)
        return hit_tokens

    def _tokens(self, sampled: Mask, tokens: int) -> int:
        """Return the tokens in the sampled blocks of `tokens` tokens; the last block may be part-filled."""
        lacking = len(sampled) * self._block_size - tokens if len(sampled) and sampled[-1] else 0
        return int(np.count_nonzero(sampled)) * self._block_size - lacking

    def _touch(self, names: list[int], places: npt.NDArray[np.int64]) -> None:
        """Move the path to the top of the stack: the deepest block first, the root last."""
        end, rest, clock = len(self._stamps), len(self._stamps) - len(places), self._clock + len(names)
        lowest = places[-1] if len(places) else end  # blocks below it stay where they are
        kept = np.ones(end - lowest, np.bool_)
        kept[places - lowest] = False
        self._order[lowest:rest] = self._order[lowest:end][kept]
        self._order[rest : rest + len(names)] = np.arange(self._clock, clock)
        self._stamps.update(zip(names, range(clock - 1, self._clock - 1, -1), strict=True))
        self._clock = clock

    def _lower_threshold(self, names: list[int]) -> None:
        """Let the blocks with the highest ids leave, so that there is room for a path: deep ones if they are many."""
        size, inside = len(self._order), ceil((self._above[-2] + 1) * float(self._highest) / 2**64)
        first = self._order.item(max(0, len(self._stamps) - inside))  # in the largest pool
        deep = {each for each, stamp in self._stamps.items() if stamp < first}
        many = len(deep) > 2 * size * _KEPT_DEEP + 1
        among, kept = (deep, _KEPT_DEEP) if many else ({*self._stamps, *names}, _KEPT)
        highest = np.sort(np.fromiter(among, np.uint64))[ceil(size * kept) - 1]
        self._highest_deep = min(self._highest_deep, highest)
        self._highest = self._highest if many else highest
        for each in filter(int(self._highest_deep if many else highest).__lt__, among):
            self._stamps.pop(each, None)
        self._order[: len(self._stamps)] = sorted(self._stamps.values())


def prefix_ids(tokens: Sequence[int] | npt.NDArray[np.int32], block_size: int, key: bytes) -> Ids:
    """Return a keyed hash of each full block of `tokens` (ints below 2**32) and all tokens before it. O(tokens)."""
    pairs = np.arange(0, len(tokens) << 32, 1 << 32, dtype=np.uint64)  # the position above the token
    np.add(pairs, tokens, out=pairs, casting="unsafe")
    pairs ^= np.frombuffer(blake2b(key, digest_size=8).digest(), np.uint64)
    return mixed(pairs).cumsum()[block_size - 1 :: block_size]


def mixed(numbers: Ids) -> Ids:
    """Return numbers that look uniform: the finalizer of SplitMix64, one to one."""
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> np.uint64(31))
