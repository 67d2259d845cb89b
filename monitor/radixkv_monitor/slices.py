"""Run long work on the app's thread in slices, so that keys are handled and frames are drawn in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from textual.message_pump import MessagePump

LARGE = 20_000
"""The nodes from which on a view reads all of them in slices."""
SECONDS = 0.04
"""The time after which a slice ends, so that a key waits no longer."""
PAUSE = 0.005
"""The time between two slices."""


class Work(NamedTuple):
    """The steps, which yield the completed share; a function that shows the share; and one for the end."""

    steps: Iterator[float]
    show: Callable[[float], None]
    done: Callable[[], None]


class SlicedWork:
    """At most one piece of work of a widget. It ends with the widget, because its timers do."""

    def __init__(self, widget: MessagePump, clock: Callable[[], float] = time.perf_counter) -> None:
        self._widget, self._clock = widget, clock
        self._work: Work | None = None

    @property
    def is_running(self) -> bool:
        """Return whether work has begun and not ended."""
        return self._work is not None

    def start(self, steps: Iterator[float], show: Callable[[float], None], done: Callable[[], None]) -> None:
        """Take all `steps`, which yield the completed share. Between slices `show` it; call `done` after the last one.

        The first slice comes after the caller's messages were handled, so `show(0.0)` is on screen before it.
        """
        assert not self.is_running
        self._work = Work(steps, show, done)
        show(0.0)
        self._widget.set_timer(PAUSE, self._slice)

    def _slice(self) -> None:
        assert self._work is not None
        work, end = self._work, self._clock() + SECONDS
        for share in work.steps:
            if self._clock() >= end:
                work.show(share)
                self._widget.set_timer(PAUSE, self._slice)
                return
        self._work = None
        work.done()
