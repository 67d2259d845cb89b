"""Build states from frames: the present state, and any state of the past that the timeline holds; and record frames.

One thread adds frames; another one may read `latest` and use a `PastStates`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import Lock

from radixkv import private_files
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Delta, Frame, Gap, Hello, Snapshot, snapshot_frames
from radixkv.telemetry.recording import RecordingWriter
from radixkv.telemetry.records import Changes, EngineFacts
from radixkv_monitor.history import SECONDS, Sampler
from radixkv_monitor.state import Sample, State, StateCopier, age_time
from radixkv_monitor.timeline import ReadPosition, Timeline


class LiveRecording:
    """A recording in progress at `path`; `trouble` is the error that ended it, if any."""

    def __init__(self, path: Path, facts: EngineFacts, frames: Iterable[Frame], ts: float) -> None:
        """Start with the whole state, as `frames`. Raises OSError if the file cannot be written."""
        self.path = path
        self.bytes = 0
        self.trouble: str | None = None
        self._writer: RecordingWriter | None = RecordingWriter(path, facts, ts)
        try:
            for frame in frames:
                self.bytes += self._writer.write(frame)
        except OSError:
            with suppress(OSError):
                self._writer.close()
            path.unlink(missing_ok=True)
            raise

    @property
    def running(self) -> bool:
        """Return whether frames are still written."""
        return self._writer is not None

    def write(self, frames: Iterable[Frame]) -> None:
        """Append frames. A full disk ends the recording and raises nothing."""
        if self._writer is None:
            return
        try:
            for frame in frames:
                self.bytes += self._writer.write(frame)
        except OSError as error:
            self.trouble = f"recording stopped: {error.strerror or error}"
            self.stop()

    def stop(self) -> None:
        """Close the file; may be called twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self.trouble = self.trouble or f"the recording may lack its end: {error.strerror or error}"


def save(path: Path, frames: Iterable[Frame]) -> int:
    """Write frames that begin with a hello to a file, as a whole; return their number. Raises OSError."""
    count = 0
    writer: RecordingWriter | None = None
    with private_files.replacing(path) as file:
        for frame in frames:
            if writer is None:
                assert isinstance(frame, Hello)
                writer = RecordingWriter(file, frame.facts, frame.ts)
            else:
                writer.write(frame)
            count += 1
    return count


_lines = count(1)
_time = attrgetter("time")


class StateBuilder:
    """The sum of all frames so far."""

    def __init__(self, timeline: Timeline | None = None, seconds: float = SECONDS) -> None:
        """Keep `seconds` of samples, and the frames that `timeline` keeps (default: ten minutes)."""
        self.timeline = timeline or Timeline()
        self.latest: State | None = None
        self.facts: EngineFacts | None = None
        self.engines = 0
        self.dropped = 0
        self.end_reason: str | None = None
        self._sampler = Sampler(seconds)
        self._mirror = Mirror()
        self._copier: StateCopier | None = None
        self._baselines: dict[str, Sample] = {}  # the first sample of each engine
        self._pages: list[Snapshot] = []
        self._whole = False
        self._was_unseen = True  # whether changes before the snapshot were missed
        self._seq = 0
        self._sent = 0.0
        self._received = 0.0
        self._lock = Lock()
        self.recording: LiveRecording | None = None

    def take(self, *frames: Frame) -> State | None:
        """Add frames; return the new state if they made one. O(frames); O(state) for a snapshot."""
        applied: list[Changes] = []
        with self._lock:
            for frame in frames:
                applied += self._take(frame)
            if self.recording is not None:
                self.recording.write(frames)
        return self._publish(applied) if applied else None

    def record(self, path: Path) -> None:
        """Write the whole state, and then each new frame, to a file. Raises OSError, and ValueError before the first
        state.
        """
        self.stop_recording()
        with self._lock:
            if self.facts is None or self.latest is None:
                raise ValueError("nothing to record yet: no engine has sent its state")
            ts = max(self._mirror.time, self._sent)  # an idle engine's state may be as of an hour ago
            self.recording = LiveRecording(path, self.facts, snapshot_frames(self._mirror, self._seq, ts), ts)

    def stop_recording(self) -> None:
        """Close the recording, if there is one; `recording` still names its file."""
        with self._lock:
            if self.recording is not None:
                self.recording.stop()

    def _take(self, frame: Frame) -> list[Changes]:
        self._seq, self._sent = frame.seq, frame.ts
        if isinstance(frame, Hello):
            self._hello(frame.facts)
        elif isinstance(frame, Gap):
            self.dropped += frame.dropped
            self._whole = False
        elif isinstance(frame, Bye):
            self.end_reason = frame.reason
        elif isinstance(frame, Snapshot):
            return self._snapshot(frame)
        elif isinstance(frame, Delta) and self._whole:
            return self._delta(frame)
        return []

    def _hello(self, facts: EngineFacts) -> None:
        if self.facts is None or self.facts.engine != facts.engine:
            self.engines += 1
        facts = replace(facts, control=False)  # it is a fact of the connection, not of recordings
        self.facts, self.end_reason, self._pages, self._whole = facts, None, [], False
        self._copier = StateCopier(facts, next(_lines))

    def _snapshot(self, frame: Snapshot) -> list[Changes]:
        """Collect the pages of a snapshot; apply them when the last one is there."""
        if self.facts is None:
            return []
        if frame.page == 0:
            self._pages, self._whole, self._was_unseen = [], False, not self._whole
        if frame.page != len(self._pages):
            return []  # a recording may begin between two pages
        self._pages.append(frame)
        if not frame.last:
            return []
        pages, self._pages, self._whole = self._pages, [], True
        for page in pages:
            self._mirror.apply(page.changes)
        self._received = received(pages[-1], self._mirror)
        engine, stats = self.facts.engine, self._mirror.stats
        self._sampler.note(self._mirror.time, engine, stats, unseen=self._was_unseen)
        self._baselines.setdefault(engine, Sample(self._mirror.time, engine, dict(stats)))
        self.timeline.begin(self.facts, pages)
        return [page.changes for page in pages]

    def _delta(self, frame: Delta) -> list[Changes]:
        assert self.facts is not None
        self._mirror.apply(frame.changes)
        self._received = received(frame, self._mirror)
        self._sampler.note(self._mirror.time, self.facts.engine, self._mirror.stats)
        if self.timeline.add(frame):
            self.timeline.begin(self.facts, list(snapshot_frames(self._mirror, frame.seq, frame.ts)))
        return [frame.changes]

    def _publish(self, applied: list[Changes]) -> State:
        assert self._copier is not None and self.facts is not None
        state = self._copier.take(self._mirror, applied, self._sampler.samples)
        self.latest = replace(state, baseline=self.baseline(self.facts.engine), received=self._received)
        return self.latest

    def baseline(self, engine: str) -> Sample | None:
        """Return the first sample of an engine, which is that at which the monitor attached, or the recording began."""
        return self._baselines.get(engine)


def received(frame: Snapshot | Delta, mirror: Mirror) -> float:
    """Return the time at which the newest frame was sent, at least the time of the state.

    An idle engine may send the state of an hour ago to a new client, and it is valid now.
    """
    busy = mirror.live or mirror.stats.get("running") or mirror.stats.get("waiting")
    return max(frame.ts, mirror.time) if busy or isinstance(frame, Delta) else mirror.time


class PastStates:
    """Read past states from a builder's timeline. Moving forward in small steps is cheap."""

    def __init__(self, builder: StateBuilder) -> None:
        self._intake = builder
        self._mirror = Mirror()
        self._copier: StateCopier | None = None
        self._mark: ReadPosition | None = None
        self._last: State | None = None

    def at(self, time: float) -> State | None:
        """Return the state at `time`, or the nearest one. O(segment), or O(changes) going forward."""
        found = self._intake.timeline.frames_until(time, self._mark)
        if found is None:
            return None
        mark, frames = found
        applied = [frame.changes for frame in frames]
        if self._mark is None or mark.segment is not self._mark.segment or any(each.reset for each in applied):
            self._mirror, self._copier = Mirror(), StateCopier(mark.segment.facts, next(_lines))
        elif not frames:
            return self._last
        self._mark = mark
        for changes in applied:
            self._mirror.apply(changes)
        assert self._copier is not None
        state = self._copier.take(self._mirror, applied, self._history(mark.segment.facts.engine))
        newest = frames[-1]
        baseline = self._intake.baseline(mark.segment.facts.engine)
        state = replace(state, baseline=baseline, received=received(newest, self._mirror))
        self._last = replace(state, now=age_time(state, newest.ts))
        return self._last

    def _history(self, engine: str) -> tuple[Sample, ...]:
        """Return the samples up to the mirror's time, and one of the mirror."""
        known = self._intake.latest.history if self._intake.latest is not None else ()
        now = self._mirror.time
        first, last = bisect_right(known, now - SECONDS, key=_time), bisect_left(known, now, key=_time)
        return (*known[max(first - 1, 0) : last], Sample(now, engine, dict(self._mirror.stats)))
