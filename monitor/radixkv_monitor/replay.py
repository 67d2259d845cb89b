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
from radixkv.telemetry.recording import RecordingReader
from radixkv_monitor.feed import CUT, Ending, Status, ThreadFeed, Traffic
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder
from radixkv_monitor.timeline import Timeline

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES = 256 * 2**20
"""The most packed bytes of a recording that are kept; of a longer one, its end."""
_BATCH, _TICK = 32, 0.1


class FileFeed(ThreadFeed):
    """Play the recording at `path` from its start; a background thread first reads the whole file."""

    def __init__(
        self, path: Path, *, speed: float = 1.0, loops: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`loops` begins again at the end."""
        super().__init__(path.name, StateBuilder(Timeline(inf, BYTES), seconds=inf), clock)
        self._path, self._loops = path, loops
        self._player = PastStates(self.builder)
        self._lock = Lock()
        self._nudge = Event()
        self._head: float | None = None
        self._at = clock()
        self._shown: State | None = None
        self._frames = 0
        self._reader = RecordingReader(path)
        self._problem = ""
        self._loaded = Event()
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

    @property
    def progress(self) -> float:
        """The share of the file that was read, 0 to 1."""
        if self._loaded.is_set():
            return 1.0
        whole = self._path.stat().st_size if self._path.exists() else 0
        return min(1.0, self._reader.bytes_read / whole) if whole else 0.0

    @property
    def ending(self) -> Ending:
        """The end of the recording, after it was read whole."""
        if not self._loaded.is_set():
            return Ending()
        reason = CUT if self._reader.cut else self._problem or self.builder.end_reason or ""
        return Ending(reason, self._reader.damaged_at)

    def wait_until_loaded(self, timeout: float) -> bool:
        """Wait until the whole file was read, at most `timeout` seconds; return whether it was."""
        return self._loaded.wait(timeout)

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
        try:
            self._load()
        except (OSError, ProtocolError) as error:
            self._problem = str(error)
        finally:
            self._loaded.set()
        while not self._closing.is_set():
            self._play()
            self._nudge.wait(_TICK)
            self._nudge.clear()

    def _load(self) -> None:
        """Read the file, and play the part that was read."""
        played = self._clock()
        self._play()
        for frames in _batches(iter(self._reader)):
            self._frames += len(frames)
            self.builder.take(*frames)
            if self._closing.is_set():
                break
            if self._shown is None or self._clock() - played > _TICK:
                self._play()
                played = self._clock()

    def _play(self) -> None:
        """Advance the position by the elapsed time, and show its state."""
        span, loaded = self.span, self._loaded.is_set()
        reading = "" if loaded else f"reading the recording, {self.progress:.0%}"
        if span is None:
            problem = reading or self._problem or self.builder.end_reason or "the recording holds no state"
            self._status = Status("ended" if loaded else "replay", 0.0, problem)
            return
        with self._lock:
            now = self._clock()
            if self._head is None:
                self._head = span[0]
            elif self.playing:
                self._head = min(self._head + (now - self._at) * self.speed, span[1])
                if self._loops and loaded and self._head == span[1]:
                    self._head = span[0]
            self._at = now
            head = self._head
        state = self._player.at(head)
        at_end = loaded and head >= span[1]
        reason = self._damage or self.builder.end_reason or "" if at_end else ""
        self._shown = state if state is None else replace(state, end_reason=reason)
        self._status = Status(
            "ended" if at_end else "replay", span[0], reading or self._damage or self._problem or reason
        )
        if at_end:
            self.playing = False

    @property
    def _damage(self) -> str:
        at = self._reader.damaged_at
        if at is None:
            return ""
        return f"the recording is {'cut' if self._reader.cut else 'damaged'} after byte {at:,}"


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
