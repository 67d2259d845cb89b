"""When the next picture may come, so that the monitor stays small beside the engine that it watches.

Knows clocks only. Knows no screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FRAMES_PER_SECOND = 5
"""Half of what a feed may tell: nobody reads numbers faster, and drawing is most of what a monitor costs."""
SHARE = 0.17
"""Of a core, for everything in this process: where pictures cost more, they come less often."""
LONGEST = 1.0
"""Seconds that a picture waits at most, whatever it costs."""


class Pace:
    """Not more often than `FRAMES_PER_SECOND`, and not so often that this process takes more than `share` of a core."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.process_time,
    ) -> None:
        self._share, self._clock, self._spent = share, clock, spent
        self._drawn_at = self._spent_at = float("-inf")

    def ready(self) -> bool:
        """Whether the next picture may be drawn. A microsecond."""
        passed = self._clock() - self._drawn_at
        if passed < 0.9 / FRAMES_PER_SECOND:  # timers are not exact
            return False
        return passed >= LONGEST or self._spent() - self._spent_at <= self._share * passed

    def drawn(self) -> None:
        """A picture has been begun: what is spent from now on counts against the next."""
        self._drawn_at, self._spent_at = self._clock(), self._spent()
