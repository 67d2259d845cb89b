"""Play a recording at any speed, paused, or from any position."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import Event, Lock

from radixkv.errors import ProtocolError
from radixkv.telemetry.protocol import Frame
from radixkv.telemetry.recording import read_recording
from radixkv_monitor.feed import Status, ThreadFeed, Traffic
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.timeline import Timeline

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES = 256 * 2**20
"""The most packed bytes of a recording that are kept; of a longer one, its end."""
_BATCH, _TICK = 32, 0.1


class FileFeed(ThreadFeed):
    """Play the recording at `path` from its start; a background thread first reads the whole file."""

    def __init__(self, path: Path, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path.name, StateBuilder(Timeline(inf, BYTES), seconds=inf), clock)
        self._path = path
        self._player = PastStates(self.builder)
        self._lock = Lock()
        self._nudge = Event()
        self._head: float | None = None
        self._at = clock()
        self._shown: State | None = None
        self._frames = 0
        self.speed = speed
        self.playing = True

    @property
    def latest(self) -> State | None:
        """The state at the current position."""
        return self._shown

    @property
    def now(self) -> float:
        """The current position."""
        return self._head or 0.0

    @property
    def traffic(self) -> Traffic:
        """The frames and bytes that were read."""
        return Traffic(self._frames, self._path.stat().st_size if self._path.exists() else 0)

    def close(self) -> None:
        """Stop playing."""
        self._closing.set()
        self._nudge.set()
        super().close()

    # ---- commands

    def pause(self, playing: bool | None = None) -> None:
        """Pause or resume; without an argument, the other one. Resuming at the end starts again."""
        with self._lock:
            self.playing = not self.playing if playing is None else playing
            if self.playing and self.span and self._head is not None and self._head >= self.span[1]:
                self._head = self.span[0]
        self._nudge.set()

    def seek(self, when: float) -> None:
        """Move to a time, or to the nearest one in the recording."""
        span = self.span
        if span is None:
            return
        with self._lock:
            self._head = min(max(when, span[0]), span[1])
            self._at = self._clock()
        self._nudge.set()

    def faster(self, steps: int = 1) -> float:
        """Select the next higher speed, or with -1 the next lower one."""
        nearest = min(range(len(SPEEDS)), key=lambda at: abs(SPEEDS[at] - self.speed))
        self.speed = SPEEDS[min(max(nearest + steps, 0), len(SPEEDS) - 1)]
        return self.speed

    # ---- the thread

    def _run(self) -> None:
        problem = self._load()
        while not self._closing.is_set():
            self._nudge.wait(_TICK)
            self._nudge.clear()
            self._play(problem)

    def _load(self) -> str:
        """Read the file; return its error, or the engine's last words, or an empty text."""
        played = self._clock()
        self._status = Status("replay", 0.0, "reading the recording")
        try:
            for frames in _batches(read_recording(self._path)):
                self._frames += len(frames)
                self.builder.take(*frames)
                if self._closing.is_set():
                    break
                if self._shown is None or self._clock() - played > _TICK:
                    self._play("reading the recording")
                    played = self._clock()
        except (OSError, ProtocolError) as error:
            return str(error)
        return self.builder.end_reason or ""

    def _play(self, sentence: str) -> None:
        """Advance the position by the elapsed time, and show its state."""
        span = self.span
        if span is None:
            self._status = Status("ended", 0.0, sentence or "the recording holds no state")
            return
        with self._lock:
            now = self._clock()
            if self._head is None:
                self._head = span[0]
            elif self.playing:
                self._head = min(self._head + (now - self._at) * self.speed, span[1])
            self._at = now
            head = self._head
        state = self._player.at(head)
        at_end = head >= span[1] and sentence != "reading the recording"
        reason = self.builder.end_reason or "" if at_end else ""
        self._shown = state if state is None else replace(state, end_reason=reason)
        self._status = Status("ended" if at_end else "replay", span[0], sentence if at_end else "")
        if at_end:
            self.playing = False


def _batches(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    """Group frames, because each group costs a state. Frames before an error are returned before it is raised."""
    batch: list[Frame] = []
    try:
        for frame in frames:
            batch.append(frame)
            if len(batch) == _BATCH:
                yield batch
                batch = []
    except (OSError, ProtocolError):
        if batch:
            yield batch
        raise
    if batch:
        yield batch
