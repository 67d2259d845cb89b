"""The monitor's own cost: measure it, and draw less often when drawing is expensive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.telemetry.process_figures import resident_bytes
from radixkv_monitor.feed import Traffic
from radixkv_monitor.formatting import size


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost over about a second."""

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
    """Measure the cost between one reading and the next."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._traffic = Traffic()

    def read(self, traffic: Traffic) -> Cost:
        """Return the cost since the last reading. Takes about ten microseconds."""
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


FRAMES_PER_SECOND = 5
"""Half of a feed's highest rate, because numbers cannot be read faster and drawing is most of the monitor's cost."""
SHARE = 0.17
"""The share of a core that this process may take; expensive frames are drawn less often."""
LONGEST_INTERVAL = 1.0
"""The seconds after which a frame is drawn at any cost."""


class FrameLimiter:
    """Allow at most `FRAMES_PER_SECOND` frames, and fewer if the process would take more than `share` of a core."""

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
        """Return whether the next frame may be drawn. Takes a microsecond."""
        passed = self._clock() - self._drawn_at
        if passed < 0.9 / FRAMES_PER_SECOND:  # timers are not exact
            return False
        return passed >= LONGEST_INTERVAL or self._spent() - self._spent_at <= self._share * passed

    def drawn(self) -> None:
        """Note that a frame starts; cost from now on counts against the next one."""
        self._drawn_at, self._spent_at = self._clock(), self._spent()
