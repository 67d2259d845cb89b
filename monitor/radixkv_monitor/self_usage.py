"""What the monitor itself costs: share of a core, memory, and what it reads.

Knows this process and a feed's traffic. Knows no screen.

When the next picture may come, so that the monitor stays small beside the engine that it watches.

Knows clocks only. Knows no screen.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from radixkv_monitor.feed import Traffic
from radixkv_monitor.formatting import size

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Cost:
    """Over the last second or so."""

    cpu: float = 0.0
    resident: int = 0
    frames_per_second: float = 0.0
    bytes_per_second: float = 0.0

    def __str__(self) -> str:
        return (
            f"{100 * self.cpu:.0f}% of a core, {size(self.resident)}, "
            f"{self.frames_per_second:.0f} frames/s, {size(self.bytes_per_second)}/s"
        )


class UsageMeter:
    """Measures between one reading and the next."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._traffic = Traffic()

    def read(self, traffic: Traffic) -> Cost:
        """The cost since the last reading. Some ten microseconds."""
        wall, cpu = time.monotonic(), time.process_time()
        seconds = max(wall - self._wall, 1e-3)
        cost = Cost(
            cpu=(cpu - self._cpu) / seconds,
            resident=resident_bytes(),
            frames_per_second=max(0, traffic.frames - self._traffic.frames) / seconds,
            bytes_per_second=max(0, traffic.bytes - self._traffic.bytes) / seconds,
        )
        self._wall, self._cpu, self._traffic = wall, cpu, traffic
        return cost


def resident_bytes() -> int:
    """Memory that this process holds now; where the system does not say, the most that it ever held."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


FRAMES_PER_SECOND = 5
"""Half of what a feed may tell: nobody reads numbers faster, and drawing is most of what a monitor costs."""
SHARE = 0.17
"""Of a core, for everything in this process: where pictures cost more, they come less often."""
LONGEST_INTERVAL = 1.0
"""Seconds that a picture waits at most, whatever it costs."""


class FrameLimiter:
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
        return passed >= LONGEST_INTERVAL or self._spent() - self._spent_at <= self._share * passed

    def drawn(self) -> None:
        """A picture has been begun: what is spent from now on counts against the next."""
        self._drawn_at, self._spent_at = self._clock(), self._spent()
