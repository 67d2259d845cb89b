"""The options of a cache, the cache that has them, and examples that cover each pair of options.

A new option is a field of `Options`, a row of `CHOICES`, and an argument in `new_cache`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from radixkv.cache import POLICIES, Observer, PrefixCache
from radixkv.cache.recurrent import Spacing

GRID = 4  # the chunks of `aligned`, in tokens


@dataclass(frozen=True, slots=True)
class Options:
    """What a run uses. The last four fields change what is said and done, all others are options of the cache."""

    block_size: int = 4
    eviction: str = "lru"
    host: bool = False  # a host tier
    disk: bool = False  # a disk below the host tier; without one it has no effect
    states: bool = False  # recurrent state
    aligned: bool = False  # as in a deterministic engine: hits and snapshots end on multiples of GRID
    watched: bool = False  # an observer and a change tracker
    ample: bool = False  # the last tier has room for all texts, and the state slots for all snapshots
    pins: bool = True
    forks: bool = True  # forks and groups of beams
    audits: bool = True
    compressed: bool = False  # half of the new texts follow a compressed prefix


CHOICES: dict[str, tuple[Any, ...]] = {
    "block_size": (1, 3, 4, 16),
    "eviction": tuple(POLICIES),
    "host": (False, True),
    "disk": (False, True),
    "states": (False, True),
    "aligned": (False, True),
    "watched": (False, True),
    "ample": (False, True),
    "pins": (False, True),
    "forks": (False, True),
    "audits": (False, True),
    "compressed": (False, True),
}

EXCLUSIVE: dict[tuple[str, str], str] = {("disk", "states"): "snapshots stay in memory"}
"""Pairs of options that do not combine yet, and why."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many blocks, rows and slots a cache has."""

    num_blocks: int
    host_blocks: int = 0
    rows: int = 0
    snapshots: int = 0
    host_snapshots: int = 0
    spacing: Spacing | None = None


def new_cache(
    options: Options, sizes: Sizes, clock: Callable[[], float], observer: Observer | None = None
) -> PrefixCache:
    """Return a cache with these options."""
    shape = (sizes.num_blocks, options.block_size, options.eviction, clock, observer)
    return PrefixCache(
        *shape,
        host_blocks=sizes.host_blocks,
        state_rows=sizes.rows,
        state_snapshots=sizes.snapshots,
        host_snapshots=sizes.host_snapshots,
        state_spacing=sizes.spacing,
    )


Choice = tuple[str, Any]


def combines(choices: Mapping[str, Any]) -> bool:
    """Whether no two of the chosen options exclude each other."""
    return not any(choices.get(one) and choices.get(other) for one, other in EXCLUSIVE)


def pairs(options: Options) -> set[tuple[Choice, Choice]]:
    """The pairs of choices in these options."""
    return set(combinations([(name, getattr(options, name)) for name in CHOICES], 2))


def all_pairs() -> set[tuple[Choice, Choice]]:
    """The pairs of choices that combine."""
    found = set()
    for (one, ones), (other, others) in combinations(CHOICES.items(), 2):
        found |= {((one, a), (other, b)) for a, b in product(ones, others) if combines({one: a, other: b})}
    return found


def draw(rng: random.Random, **chosen: Any) -> Options:
    """Draw options that combine; `chosen` ones are kept."""
    while True:
        choices = {name: rng.choice(values) for name, values in CHOICES.items()} | chosen
        if combines(choices):
            return Options(**choices)


@cache
def covering() -> list[Options]:
    """A few options in which each pair of choices occurs, by a greedy search."""
    rng, missing, found = random.Random(32), all_pairs(), list[Options]()
    while missing:
        first, second = min(missing, key=repr)
        tries = [draw(rng, **dict((first, second))) for _ in range(200)]
        best = max(tries, key=lambda each: len(pairs(each) & missing))
        found.append(best)
        missing -= pairs(best)
    return found
