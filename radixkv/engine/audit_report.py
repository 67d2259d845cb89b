"""What an audit found. Knows numbers only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """A cached run that was not what its tokens give, and what was done about it.

    The first and the last wrong token lie at `start` and `end - 1`; the first is off in `part` ("key" or "value") of
    `layer`, and the worst by `deviation` root mean squares. `dropped_blocks` left the cache: those of the run, and of
    whatever was computed behind it. `failed_requests` read it at that moment, `released_pins` held it.
    """

    namespace: Hashable
    start: int
    end: int
    layer: int
    part: str
    deviation: float
    dropped_blocks: int
    failed_requests: int
    released_pins: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """How many cached blocks were computed again, in how many of them something differed, and what."""

    blocks: int
    differ: int
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """The sentence that one wants to read."""
        return f"{self.blocks:,} blocks audited, {self.differ:,} differ"
