"""The hazard model: how soon text is used again, by its traits and its age, learnt as the cache runs.

Ages are counted in buckets by powers of two, so that sessions of seconds and of days are learnt alike. The hazard of an
age bucket is the share of the tokens that reach it and are reused before they leave it. Each trait has its own counts,
from all tokens that share it. A reuse class is a combination of traits, and most are rare: its hazard is the product of
the traits' ratios, damped because traits overlap.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BUCKETS = 24
SHORTEST = 0.25  # seconds; the last bucket is for all above 12 days
DAMP = 0.6  # weight of the ratio of one trait, as other traits state part of it again
PRIOR = 8.0  # blocks that are assumed to behave as all blocks do, for each trait
REFRESH = 64  # ended accesses, or
GROWTH = 1.1  # growth of the counts, after which hazards are derived again
CLASSES = 4096  # that are kept at once

EDGES = [0.0] + [SHORTEST * 2.0**i for i in range(BUCKETS - 1)]
_EVERY = (-1, 0)  # the trait that all tokens have
_WIDTHS = [end - start for start, end in pairwise([*EDGES, EDGES[-1] * 2.0])]

Counts = npt.NDArray[np.float64]  # [reused or reached, age bucket], in blocks


class Traits(NamedTuple):
    """The properties of a piece of text by which its reuse is learnt."""

    uses: int  # earlier accesses of the tokens, at most MOST_USES
    fresh: int  # size class of the part of the prompt that was never accessed before
    gap: int  # size class of the seconds since the last access of the continued text, 0 if it continues none
    output: int  # size class of the generated tokens
    kind: int  # why the turn ended, as a number
    last: bool  # of the path's last block


class ReuseClass:
    """Text with the same traits: its counts since hazards were last derived, and the worths that followed from them."""

    __slots__ = ("as_of", "by_trait", "reached", "reused", "traits", "worths")

    def __init__(self, traits: Traits, by_trait: tuple[Counts, ...]) -> None:
        self.traits = traits
        self.by_trait = by_trait  # the counts of each trait, shared with all classes that have it
        self.reused = [0.0] * BUCKETS
        self.reached = [0.0] * BUCKETS
        self.worths: list[float] = []  # by bucket
        self.as_of = -1  # the derivation that `worths` belong to


class HazardModel:
    """Blocks reused and blocks that reached an age, by trait and age bucket, and the worths that follow from them."""

    __slots__ = ("_as_of", "_by_trait", "_classes", "_counted", "_ended", "_log_ratios", "_next")

    def __init__(self) -> None:
        self._by_trait: dict[tuple[int, int], Counts] = {_EVERY: _no_counts()}  # (field, value) -> counts
        self._classes: dict[Traits, ReuseClass] = {}
        self._counted: dict[ReuseClass, None] = {}  # classes with counts that their traits do not have yet
        self._log_ratios: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._ended = self._as_of = 0
        self._next = float(REFRESH)

    def __len__(self) -> int:
        """Number of distinct traits."""
        return len(self._by_trait)

    def classed(self, traits: Traits) -> ReuseClass:
        """Return the class of these traits. O(1)."""
        known = self._classes.get(traits)
        if known is None:
            if len(self._classes) >= CLASSES:
                self._classes.clear()  # access records keep the classes that they use
            counts = tuple(self._by_trait.setdefault(trait, _no_counts()) for trait in (_EVERY, *enumerate(traits)))
            known = self._classes[traits] = ReuseClass(traits, counts)
        return known

    def reach(self, reuse_class: ReuseClass, bucket: int, blocks: float) -> None:
        """Count blocks of a class that reached an age. O(1)."""
        reuse_class.reached[bucket] += blocks
        self._counted[reuse_class] = None

    def reuse(self, reuse_class: ReuseClass, bucket: int, blocks: float) -> None:
        """Count blocks of a class that were used again at an age. O(1)."""
        reuse_class.reused[bucket] += blocks
        self._counted[reuse_class] = None

    def refresh(self) -> None:
        """Derive worths from the present counts from now on. O(classes counted)."""
        for reuse_class in self._counted:
            counts = np.array((reuse_class.reused, reuse_class.reached))
            for trait in reuse_class.by_trait:
                trait += counts
            reuse_class.reused, reuse_class.reached = [0.0] * BUCKETS, [0.0] * BUCKETS
        self._counted.clear()
        self._log_ratios.clear()
        self._as_of += 1

    def ended(self) -> None:
        """Note that an access ended; from time to time this refreshes the model."""
        self._ended += 1
        if self._ended >= self._next:
            self._next = max(self._ended + REFRESH, self._ended * GROWTH)
            self.refresh()

    def worth(self, reuse_class: ReuseClass, bucket: int) -> float:
        """Best rate of reuses per second that a block earns from this age on: leaves of low worth are evicted first.

        It is the largest ratio, over all times to keep the block, of the chance of a reuse to the expected time in the
        pool: Gittins' index of a job that pays once. O(1) amortised.
        """
        if reuse_class.as_of != self._as_of:
            reuse_class.worths = _best_rates(self._hazards(reuse_class.traits).tolist())
            reuse_class.as_of = self._as_of
        return reuse_class.worths[bucket]

    def _hazards(self, traits: Traits) -> npt.NDArray[np.float64]:
        log_ratios = self._log_ratios
        base = log_ratios.get(_EVERY)
        if base is None:
            reused, reached = np.array(self._by_trait[_EVERY])
            base = log_ratios[_EVERY] = np.log((reused + 0.5) / (reached + 5.0))
        total = base.copy()
        for trait in enumerate(traits):
            log_ratio = log_ratios.get(trait)
            if log_ratio is None:
                log_ratio = log_ratios[trait] = self._log_ratio(trait, base)
            total += log_ratio
        hazards: npt.NDArray[np.float64] = np.minimum(np.exp(total, out=total), 0.99, out=total)
        return hazards

    def _log_ratio(self, trait: tuple[int, int], base: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The damped logarithm of the ratio of a trait's hazard to the hazard of all tokens."""
        reused, reached = np.array(self._by_trait[trait])
        prior = PRIOR * np.exp(base)
        log_ratio: npt.NDArray[np.float64] = DAMP * (np.log((reused + prior) / (reached + PRIOR)) - base)
        return log_ratio


def _no_counts() -> Counts:
    return np.zeros((2, BUCKETS))


def _best_rates(hazards: list[float]) -> list[float]:
    """For each bucket, the best ratio of reuses to time over the ends of this and all later buckets. O(buckets).

    Each end is a point (time spent so far, chance of a reuse by then). The best ratio from a point is the slope to the
    next corner of the upper hull of all later points.
    """
    alive, time = 1.0, 0.0
    points, rates = [(0.0, 0.0)], []
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        time += width * alive * (1.0 - hazard / 2)
        alive *= 1.0 - hazard
        points.append((time, 1.0 - alive))
    hull = [(*points.pop(), -1.0)]  # time, chance, slope to the next corner; the first point comes last
    while points:
        time, chance = points.pop()
        while (rate := _slope(hull[-1], time, chance)) <= hull[-1][2]:
            hull.pop()
        hull.append((time, chance, rate))
        rates.append(rate)
    return rates[::-1]


def _slope(corner: tuple[float, float, float], time: float, chance: float) -> float:
    ahead = corner[0] - time
    return (corner[1] - chance) / ahead if ahead > 0.0 else 0.0
