"""The CPU time and the memory of the engine's process, measured at most once a second on the publisher's thread."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path

from radixkv.telemetry.records import PROCESS_NAMES

Figures = Mapping[str, float]
NO_FIGURES: Figures = {}
_INTERVAL_S = 1.0
_STATM = Path("/proc/self/statm")


class ProcessFigures:
    """Measure this process by the names of `PROCESS_NAMES`.

    `device_memory` returns the reserved and the whole memory of the device in bytes; None on a CPU, where both names
    are absent. About 20 us a measurement; an error of a source leaves its names out.

    >>> sorted(ProcessFigures().due(now=5.0))
    ['process_cpu_seconds', 'process_rss_bytes']
    """

    def __init__(self, device_memory: Callable[[], tuple[int, int]] | None = None) -> None:
        self._device_memory = device_memory
        self._measured_at = -inf

    def due(self, now: float) -> Figures:
        """Return the figures; none if they were returned less than a second before `now`, a monotonic time."""
        if now - self._measured_at < _INTERVAL_S:
            return NO_FIGURES
        self._measured_at = now
        return self.measure()

    def measure(self) -> Figures:
        """Return the figures of this moment."""
        cpu, rss, reserved, total = PROCESS_NAMES
        figures: dict[str, float] = {cpu: time.process_time()}
        try:
            figures[rss] = resident_bytes()
            if self._device_memory is not None:
                figures[reserved], figures[total] = self._device_memory()
        except (OSError, ValueError, RuntimeError):
            return figures
        return figures


def resident_bytes() -> int:
    """Return the resident memory of this process; its peak where the system does not report the present size."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _page_bytes()
    except (FileNotFoundError, PermissionError):
        return _peak_bytes()


def _peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_page_bytes = partial(os.sysconf, "SC_PAGE_SIZE")
