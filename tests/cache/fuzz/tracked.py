"""The model of one open sequence, and of one pin."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radixkv.cache import Pin, WritePlan
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.announcements import Announcement
from radixkv.cache.types import Purpose
from tests.cache.naive import Texts
from tests.cache.verbs import Ids

SHAPES: tuple[Callable[[Sequence[int]], Ids], ...] = (
    lambda tokens: list(tokens),
    lambda tokens: tuple(tokens),
    lambda tokens: array("i", tokens),
    lambda tokens: np.asarray(tokens, dtype=np.int32),
    lambda tokens: np.asarray(tokens, dtype=np.int64),
)


@dataclass
class Tracked:
    """The model of one open sequence."""

    seq: CacheSequence
    namespace: Hashable
    tokens: list[int]
    published: int
    table: list[int]
    purpose: Purpose = "request"
    plan: WritePlan | None = None
    planned: list[int] = field(default_factory=list)
    executed: bool = False
    unknown: int = -1  # the position of the token that the cache does not have yet; -1 for none
    forked: bool = False  # whether another sequence may read its unpublished tokens

    @property
    def readable(self) -> bool:
        """Whether the block table's content is valid: a planned copy may not have run yet."""
        return self.plan is None or self.executed

    @property
    def shown(self) -> list[int]:
        """The tokens that the sequence shows."""
        return [-1 if at == self.unknown else token for at, token in enumerate(self.tokens)]


@dataclass
class Pinned:
    """The model of one pin."""

    pin: Pin
    namespace: Hashable
    tokens: list[int]
    expires: float


Announced = tuple[Announcement, Hashable, list[int]]  # the model of one announcement: its namespace and text


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the leading tokens that two texts share."""
    shared = min(len(left), len(right))
    if left[:shared] == right[:shared]:
        return shared
    return next(i for i in range(shared) if left[i] != right[i])


def leaves(texts: Texts) -> list[list[int]]:
    """The texts that are not a prefix of another one."""
    found: list[list[int]] = []
    waiting: list[tuple[list[int], dict]] = [([], texts.root)]  # type: ignore[type-arg]  # recursive
    while waiting:
        text, node = waiting.pop()
        if not node and text:
            found.append(text)
        waiting += [([*text, token], child) for token, child in node.items()]
    return found
