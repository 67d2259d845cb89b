"""Sources of states: the interface that the app reads, and the thread that reads a source.

A feed reads on a thread of its own. The states that it returns are frozen, so the app may take them at any time.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from radixkv.telemetry.command_queue import Outcome
from radixkv_monitor.state import State, age_time
from radixkv_monitor.state_builder import LiveRecording, PastStates, StateBuilder, save

_log = logging.getLogger(__name__)

Link = Literal["connecting", "live", "silent", "stale", "replay", "ended"]


@dataclass(frozen=True, slots=True)
class Status:
    """The condition of the source. `sentence` is for the reader, and empty while all is well. `since` is seconds since
    1970.

    A source is silent if it is connected but sends nothing, for `silence` seconds so far. It is stale if it cannot be
    reached. In both cases `since` is the time of the last frame, or of the end of the connection.
    """

    link: Link
    since: float
    sentence: str = ""
    silence: float = 0.0


CUT = "inside a frame"
"""The reason of the end of a recording that lacks a part of its last frame, as after a crash."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a recording: the reason of its last frame, and the byte of the first damaged or incomplete frame.

    `reason` is empty if the recording was stopped while the engine ran, and `CUT` if it is incomplete.
    """

    reason: str = ""
    damaged_at: int | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The frames and bytes received so far."""

    frames: int = 0
    bytes: int = 0


class Feed(ABC):
    """A source of states. Start it once and close it once; all other methods may be called at any time, from any
    thread.
    """

    title: str = ""
    """The name of the source, for the top line."""
    peer: str = ""
    """The name of the connected socket without its suffix: the process id, and which engine of that process."""

    @abstractmethod
    def start(self) -> None:
        """Start reading. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading and release everything. May be called twice."""

    @property
    @abstractmethod
    def latest(self) -> State | None:
        """The newest state; None before the first."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """The condition of the source."""

    @property
    @abstractmethod
    def now(self) -> float:
        """The time that ages are counted to: the present, or the last time of a source that is not live."""

    @property
    def current(self) -> State | None:
        """The newest state with its age, and whether the source is silent or stale; None before the first."""
        state, status = self.latest, self.status
        if state is None:
            return None
        silence = status.silence if status.link == "silent" else 0.0
        return replace(state, now=age_time(state, self.now), stale=status.link == "stale", silence=silence)

    @property
    def traffic(self) -> Traffic:
        """The frames and bytes received so far."""
        return Traffic()

    @property
    def ending(self) -> Ending:
        """The end of a recording that was read whole; of other sources without content."""
        return Ending()

    @property
    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest time that `at` can show."""
        return None

    def at(self, when: float) -> State | None:
        """Return the state at a time in the span, or the nearest one."""
        return self.latest

    @property
    def recording(self) -> LiveRecording | None:
        """The recording that is being made, or the last one."""
        return None

    def record(self, path: Path) -> None:
        """Write all frames from now on to a file. Raises OSError, and ValueError if there is nothing to record."""
        raise ValueError(f"{self.title} cannot be recorded")

    def stop_recording(self) -> None:  # noqa: B027  (most feeds of tests cannot record, and need not stop it)
        """Close the recording, if there is one."""

    def command(self, verb: str, number: int, engine: str) -> Future[Outcome]:
        """Send a command to the engine of this name; the future gets the outcome, and never an error."""
        refused: Future[Outcome] = Future()
        refused.set_result(Outcome(False, f"{self.title} takes no commands"))
        return refused

    def save(self, path: Path) -> int:
        """Write the whole history to a file; return the number of frames. Raises OSError and ValueError likewise."""
        raise ValueError(f"{self.title} has no history")


class ThreadFeed(Feed):
    """A feed whose `_run` passes frames to `builder` on a thread of its own until `_closing` is set."""

    def __init__(self, title: str, builder: StateBuilder | None = None, clock: Callable[[], float] = time.time) -> None:
        self.title = title
        self._clock = clock
        self.builder = builder or StateBuilder()
        self._past = PastStates(self.builder)
        self._closing = Event()
        self._status = Status("connecting", 0.0)
        self._thread = Thread(target=self._run_safely, name="radixkv-monitor-feed", daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Read until closed."""

    def _run_safely(self) -> None:
        try:
            self._run()
        except Exception as error:
            _log.exception("the feed broke")
            self._status = Status("ended", self._status.since, f"reading stopped: {type(error).__name__}: {error}")

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading. Waits at most a second for the thread, which is a daemon."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self.builder.stop_recording()

    @property
    def latest(self) -> State | None:
        """The newest state."""
        return self.builder.latest

    @property
    def status(self) -> Status:
        """The condition of the source."""
        return self._status

    @property
    def now(self) -> float:
        """The present, while the source is live; then the time of its last news."""
        status, latest = self._status, self.latest
        now = self._clock() if status.link == "live" else status.since
        return max(now, latest.time) if latest is not None else now

    @property
    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest time of the history."""
        return self.builder.timeline.span

    def at(self, when: float) -> State | None:
        """Return a past state. For one thread only, the app's."""
        return self._past.at(when)

    @property
    def recording(self) -> LiveRecording | None:
        """The recording that is being made, or the last one."""
        return self.builder.recording

    def record(self, path: Path) -> None:
        """Write all frames from now on to a file."""
        self.builder.record(path)

    def stop_recording(self) -> None:
        """Close the recording."""
        self.builder.stop_recording()

    def save(self, path: Path) -> int:
        """Write the whole history to a file."""
        if self.span is None:
            raise ValueError("nothing to save yet: no engine has sent its state")
        return save(path, self.builder.timeline.all_frames())
