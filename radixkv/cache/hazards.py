"""How soon text is wanted again, by its traits and its age, learnt as it goes.

Knows counts by trait and age bucket, nothing of trees. Ages are told apart by powers of two, so that sessions of
seconds and of days are learnt alike. An age bucket's hazard is the share of the tokens that reach it and are wanted
before they leave it. Each trait has its own, from all tokens that share it; a class of traits, most of which are rare,
has the product of what its traits say, damped as the traits overlap.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.cache.use import Traits

BUCKETS = 24
SHORTEST = 0.25  # seconds; the last bucket is for all above 12 days
DAMP = 0.6  # how much of what one trait says counts, as others say some of it again
PRIOR = 8.0  # blocks that are assumed to behave as all blocks do, for each trait
REFRESH = 32  # uses, or
GROWTH = 1.03  # growth of what was learnt, after which it is looked at anew
CLASSES = 4096  # that are kept at once, used or not

EDGES = [0.0] + [SHORTEST * 2.0**i for i in range(BUCKETS - 1)]
_EVERY = (-1, 0)  # what all have
_WIDTHS = np.diff(np.array([*EDGES, EDGES[-1] * 2.0]))

Counts = list[float]


class ReuseClass:
    """What has the same traits."""

    __slots__ = ("as_of", "reached", "traits", "wanted", "worths")

    def __init__(self, traits: Traits, wanted: tuple[Counts, ...], reached: tuple[Counts, ...]) -> None:
        self.traits = traits
        self.wanted, self.reached = wanted, reached  # the counts of each trait, shared with all that have it
        self.worths: list[float] = []  # by bucket
        self.as_of = -1


class Hazards:
    """Blocks wanted and blocks that reached an age, by trait and age bucket, and the worth that they say."""

    __slots__ = ("_as_of", "_by_trait", "_classes", "_leans", "_next", "_uses")

    def __init__(self) -> None:
        self._by_trait: dict[tuple[int, int], tuple[Counts, Counts]] = {_EVERY: _none()}  # (field, value) -> counts
        self._classes: dict[Traits, ReuseClass] = {}
        self._leans: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
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
            counts = [self._by_trait.setdefault(trait, _none()) for trait in (_EVERY, *enumerate(traits))]
            wanted, reached = zip(*counts, strict=True)
            known = self._classes[traits] = ReuseClass(traits, wanted, reached)
        return known

    def used(self) -> None:
        """A use ended: every so often what was derived from the counts is derived anew."""
        self._uses += 1
        if self._uses >= self._next:
            self._next = max(self._uses + REFRESH, self._uses * GROWTH)
            self._as_of += 1
            self._leans.clear()

    def worth(self, kin: ReuseClass, bucket: int) -> float:
        """Uses per second that a block earns at its best from this age on: the higher, the later it goes.

        It is the largest ratio, over how long one would keep it, of the chance that it is wanted to the time that it
        takes room: Gittins' index of a job that pays once. O(1) amortised.
        """
        if kin.as_of != self._as_of:
            kin.worths = _best_rates(self._hazards(kin.traits))
            kin.as_of = self._as_of
        return kin.worths[bucket]

    def _hazards(self, traits: Traits) -> npt.NDArray[np.float64]:
        leans = self._leans
        base = leans.get(_EVERY)
        if base is None:
            wanted, reached = np.array(self._by_trait[_EVERY])
            base = leans[_EVERY] = np.log((wanted + 0.5) / (reached + 5.0))
        total = base.copy()
        for trait in enumerate(traits):
            lean = leans.get(trait)
            if lean is None:
                lean = leans[trait] = self._lean(trait, base)
            total += lean
        hazards: npt.NDArray[np.float64] = np.minimum(np.exp(total), 0.99)
        return hazards

    def _lean(self, trait: tuple[int, int], base: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What a trait adds to the logarithm of everybody's hazard."""
        wanted, reached = np.array(self._by_trait[trait])
        prior = PRIOR * np.exp(base)
        lean: npt.NDArray[np.float64] = DAMP * (np.log((wanted + prior) / (reached + PRIOR)) - base)
        return lean


def count(rows: tuple[Counts, ...], bucket: int, blocks: float) -> None:
    """So many blocks more, for each trait of a class."""
    for row in rows:
        row[bucket] += blocks


def _none() -> tuple[Counts, Counts]:
    return [0.0] * BUCKETS, [0.0] * BUCKETS


def _best_rates(hazards: npt.NDArray[np.float64]) -> list[float]:
    """For each bucket, the best ratio of wants to time over the ends of this and all later buckets. O(buckets^2)."""
    alive = np.ones(BUCKETS + 1)
    np.cumprod(1.0 - hazards, out=alive[1:])
    spent = np.zeros(BUCKETS + 1)
    np.cumsum(_WIDTHS * (alive[:-1] + alive[1:]) / 2, out=spent[1:])
    gain = alive[:-1, None] - alive[None, 1:]
    time = spent[None, 1:] - spent[:-1, None]
    rates = np.where(_LATER, gain / np.where(_LATER, time, 1.0), 0.0)
    best: list[float] = rates.max(axis=1).tolist()
    return best


_LATER = np.triu(np.ones((BUCKETS, BUCKETS), bool))
