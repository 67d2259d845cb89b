"""Where states come from: what the app sees of a source, and the thread that reads it.

Knows frames, states and how a source is doing. Knows no screen. A feed reads on a thread of its own; what it hands out
is frozen, so that the app may take it at any time.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from radixkv_monitor.recording_writer import LiveRecording, save
from radixkv_monitor.state import State
from radixkv_monitor.state_builder import PastStates, StateBuilder

_log = logging.getLogger(__name__)

Link = Literal["connecting", "live", "stale", "replay", "ended"]


@dataclass(frozen=True, slots=True)
class Status:
    """How the source is doing; `sentence` is for the person, empty while all is well. `since` is seconds since 1970."""

    link: Link
    since: float
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has come in so far."""

    frames: int = 0
    bytes: int = 0


class Feed(ABC):
    """A source of states. Start it once, close it once; everything else may be asked at any time, from any thread."""

    title: str = ""
    """What it reads, for the top line."""
    peer: str = ""
    """The name of the socket that answers, without its ending: the process id, and which engine of that process."""

    @abstractmethod
    def start(self) -> None:
        """Begin to read. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading and let go of everything. May be called twice."""

    @property
    @abstractmethod
    def latest(self) -> State | None:
        """The newest state; None before the first."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """How the source is doing."""

    @property
    @abstractmethod
    def now(self) -> float:
        """What ages are counted to: the present, or where a source that is not live has stopped."""

    @property
    def traffic(self) -> Traffic:
        """What has come in so far."""
        return Traffic()

    @property
    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest time that `at` can show."""
        return None

    def at(self, when: float) -> State | None:
        """The state at a time in the span, or the nearest one."""
        return self.latest

    @property
    def recording(self) -> LiveRecording | None:
        """The recording that is being made, or the last one."""
        return None

    def record(self, path: Path) -> None:
        """Write everything from now on to a file. Raises OSError, and ValueError if there is nothing to record."""
        raise ValueError(f"{self.title} cannot be recorded")

    def stop_recording(self) -> None:  # noqa: B027  (most feeds of tests cannot record, and need not stop it)
        """Close the recording, if there is one."""

    def save(self, path: Path) -> int:
        """Write all that is remembered to a file; the number of frames. Raises OSError and ValueError likewise."""
        raise ValueError(f"{self.title} remembers nothing")


class ThreadFeed(Feed):
    """A feed whose `_run` takes frames into `builder` on a thread of its own until `_closing` is set."""

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
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading; waits for the thread, which is daemonic, at most a second."""
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
        """How the source is doing."""
        return self._status

    @property
    def now(self) -> float:
        """The present, while the source is live."""
        status, latest = self._status, self.latest
        now = self._clock() if status.link == "live" else status.since
        return max(now, latest.time) if latest is not None else now

    @property
    def span(self) -> tuple[float, float] | None:
        """What is remembered."""
        return self.builder.timeline.span

    def at(self, when: float) -> State | None:
        """A state of the past. For one thread, the app's."""
        return self._past.at(when)

    @property
    def recording(self) -> LiveRecording | None:
        """The recording that is being made, or the last one."""
        return self.builder.recording

    def record(self, path: Path) -> None:
        """Write everything from now on to a file."""
        self.builder.record(path)

    def stop_recording(self) -> None:
        """Close the recording."""
        self.builder.stop_recording()

    def save(self, path: Path) -> int:
        """Write all that is remembered to a file."""
        if self.span is None:
            raise ValueError("nothing to save yet: no engine has told its state")
        return save(path, self.builder.timeline.all_frames())
