"""How soon text is wanted again, by its traits and its age, learnt as it goes.

Knows counts by trait and age bucket, nothing of trees. Ages are told apart by powers of two, so that sessions of
seconds and of days are learnt alike. An age bucket's hazard is the share of the tokens that reach it and are wanted
before they leave it. Each trait has its own, from all tokens that share it; a class of traits, most of which are rare,
has the product of what its traits say, damped as the traits overlap.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from radixkv.cache.predictive.access_records import Traits

BUCKETS = 24
SHORTEST = 0.25  # seconds; the last bucket is for all above 12 days
DAMP = 0.6  # how much of what one trait says counts, as others say some of it again
PRIOR = 8.0  # blocks that are assumed to behave as all blocks do, for each trait
REFRESH = 64  # uses, or
GROWTH = 1.1  # growth of what was learnt, after which it is looked at anew
CLASSES = 4096  # that are kept at once, used or not

EDGES = [0.0] + [SHORTEST * 2.0**i for i in range(BUCKETS - 1)]
_EVERY = (-1, 0)  # what all have
_WIDTHS = [end - start for start, end in pairwise([*EDGES, EDGES[-1] * 2.0])]

Counts = npt.NDArray[np.float64]  # [wanted or reached, age bucket], in blocks


class ReuseClass:
    """What has the same traits: what was counted of it since all was looked at, and what it was worth then."""

    __slots__ = ("as_of", "by_trait", "reached", "traits", "wanted", "worths")

    def __init__(self, traits: Traits, by_trait: tuple[Counts, ...]) -> None:
        self.traits = traits
        self.by_trait = by_trait  # the counts of each trait, shared with all that have it
        self.wanted = [0.0] * BUCKETS
        self.reached = [0.0] * BUCKETS
        self.worths: list[float] = []  # by bucket
        self.as_of = -1


class HazardModel:
    """Blocks wanted and blocks that reached an age, by trait and age bucket, and the worth that they say."""

    __slots__ = ("_as_of", "_by_trait", "_classes", "_counted", "_log_ratios", "_next", "_uses")

    def __init__(self) -> None:
        self._by_trait: dict[tuple[int, int], Counts] = {_EVERY: _none()}  # (field, value) -> counts
        self._classes: dict[Traits, ReuseClass] = {}
        self._counted: dict[ReuseClass, None] = {}  # classes with counts that their traits do not have yet
        self._log_ratios: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._uses = self._as_of = 0
        self._next = float(REFRESH)

    def __len__(self) -> int:
        """Traits that are told apart."""
        return len(self._by_trait)

    def classed(self, traits: Traits) -> ReuseClass:
        """The class of these traits. O(1)."""
        known = self._classes.get(traits)
        if known is None:
            if len(self._classes) >= CLASSES:
                self._classes.clear()  # who is in use stays with its users
            counts = tuple(self._by_trait.setdefault(trait, _none()) for trait in (_EVERY, *enumerate(traits)))
            known = self._classes[traits] = ReuseClass(traits, counts)
        return known

    def reach(self, reuse_class: ReuseClass, bucket: int, blocks: float) -> None:
        """So many blocks of a class came to an age. O(1)."""
        reuse_class.reached[bucket] += blocks
        self._counted[reuse_class] = None

    def want(self, reuse_class: ReuseClass, bucket: int, blocks: float) -> None:
        """So many blocks of a class were wanted at an age. O(1)."""
        reuse_class.wanted[bucket] += blocks
        self._counted[reuse_class] = None

    def look(self) -> None:
        """What was counted so far is what worths are derived from, from now on. O(classes counted)."""
        for reuse_class in self._counted:
            counts = np.array((reuse_class.wanted, reuse_class.reached))
            for trait in reuse_class.by_trait:
                trait += counts
            reuse_class.wanted, reuse_class.reached = [0.0] * BUCKETS, [0.0] * BUCKETS
        self._counted.clear()
        self._log_ratios.clear()
        self._as_of += 1

    def used(self) -> None:
        """A use ended: every so often what was derived from the counts is derived anew."""
        self._uses += 1
        if self._uses >= self._next:
            self._next = max(self._uses + REFRESH, self._uses * GROWTH)
            self.look()

    def worth(self, reuse_class: ReuseClass, bucket: int) -> float:
        """Uses per second that a block earns at its best from this age on: the higher, the later it goes.

        It is the largest ratio, over how long one would keep it, of the chance that it is wanted to the time that it
        takes room: Gittins' index of a job that pays once. O(1) amortised.
        """
        if reuse_class.as_of != self._as_of:
            reuse_class.worths = _best_rates(self._hazards(reuse_class.traits).tolist())
            reuse_class.as_of = self._as_of
        return reuse_class.worths[bucket]

    def _hazards(self, traits: Traits) -> npt.NDArray[np.float64]:
        log_ratios = self._log_ratios
        base = log_ratios.get(_EVERY)
        if base is None:
            wanted, reached = np.array(self._by_trait[_EVERY])
            base = log_ratios[_EVERY] = np.log((wanted + 0.5) / (reached + 5.0))
        total = base.copy()
        for trait in enumerate(traits):
            log_ratio = log_ratios.get(trait)
            if log_ratio is None:
                log_ratio = log_ratios[trait] = self._log_ratio(trait, base)
            total += log_ratio
        hazards: npt.NDArray[np.float64] = np.minimum(np.exp(total, out=total), 0.99, out=total)
        return hazards

    def _log_ratio(self, trait: tuple[int, int], base: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What a trait adds to the logarithm of everybody's hazard."""
        wanted, reached = np.array(self._by_trait[trait])
        prior = PRIOR * np.exp(base)
        log_ratio: npt.NDArray[np.float64] = DAMP * (np.log((wanted + prior) / (reached + PRIOR)) - base)
        return log_ratio


def _none() -> Counts:
    return np.zeros((2, BUCKETS))


def _best_rates(hazards: list[float]) -> list[float]:
    """For each bucket, the best ratio of wants to time over the ends of this and all later buckets. O(buckets).

    Each end is a point (time spent so far, chance that it was wanted by then); the best ratio from one of them is the
    slope to the next corner of the upper hull of all that follow.
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
