"""Recordings: a header line, then frames of the protocol: a hello, a snapshot, deltas.

The engine's flight recorder, the monitor's `r` key and `--replay` share this format. The flight recorder keeps its
frames in memory and writes no file until it is asked to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import IO, Self

from radixkv import private_files
from radixkv.errors import ProtocolError
from radixkv.telemetry.protocol import Bye, Decoder, Frame, Hello, encode
from radixkv.telemetry.records import EngineFacts

_log = logging.getLogger(__name__)

_NAME, _VERSION = b"RADIXKV-TELEMETRY ", 1
MAGIC = b"%b%d\n" % (_NAME, _VERSION)
_CHUNK = 64 * 1024
_SEGMENTS = 10  # parts of the flight recorder's time and bytes


class RecordingWriter:
    """Write a recording frame by frame, each flushed to the system at once. A context manager.

    It writes the hello; the caller writes the frames after it, a whole snapshot first. A file that the writer opened is
    closed with it; a file that it was given stays open.
    """

    def __init__(self, target: str | PathLike[str] | IO[bytes], facts: EngineFacts, ts: float = 0.0) -> None:
        """Write the header to a new private file at a path, or to a file that is open for bytes. Raises OSError."""
        head = MAGIC + encode(Hello(facts, ts=ts))
        self._owns = isinstance(target, (str, PathLike))
        if isinstance(target, (str, PathLike)):
            self._file = private_files.begin(target, head)
        else:
            self._file = target
            self._file.write(head)

    def write(self, frame: Frame) -> int:
        """Append a frame; returns its bytes. O(bytes). Raises OSError, for example for a full disk."""
        data = encode(frame)
        self._file.write(data)
        self._file.flush()
        return len(data)

    def close(self) -> None:
        """Close the file. May be called twice. Raises OSError."""
        if self._owns:
            private_files.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class _Segment:
    """Frames that begin with a whole snapshot."""

    begun: float
    frames: list[bytes]
    size: int
    snapshot: int  # its bytes


class FlightRecorder:
    """The last minutes of an engine, as encoded frames in memory; for any thread.

    Frames are in segments that begin with a snapshot, so that the oldest segment can be dropped. `seconds` are kept, or
    less if they take more than `max_bytes`. A tenth of that and the newest snapshot may be added to it.
    """

    def __init__(self, facts: EngineFacts, seconds: float = 600.0, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._facts = facts
        self._seconds, self._max_bytes = seconds, max_bytes
        self._segments: deque[_Segment] = deque()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def is_due(self, now: float) -> bool:
        """Whether the next frames should be a whole snapshot, passed to `begin`. O(1)."""
        if not self._segments:
            return True
        newest = self._segments[-1]
        deltas = newest.size - newest.snapshot
        return now - newest.begun >= self._seconds / _SEGMENTS or deltas >= self._max_bytes // _SEGMENTS

    def begin(self, snapshot: Iterable[bytes], now: float) -> None:
        """Begin a segment with the frames of a snapshot, and drop old ones; `now` is in seconds of any clock."""
        frames = list(snapshot)
        size = sum(map(len, frames))
        with self._lock:
            self._segments.append(_Segment(now, frames, size, size))
            while len(self._segments) > 1 and self._may_go(now):
                self._segments.popleft()

    def add(self, delta: bytes) -> None:
        """Append the frame of a delta, after a first `begin`. O(1)."""
        with self._lock:
            newest = self._segments[-1]
            newest.frames.append(delta)
            newest.size += len(delta)

    def _may_go(self, now: float) -> bool:
        """Whether the oldest segment is too old, or the total is too large."""
        total = sum(segment.size for segment in self._segments)
        return self._segments[1].begun <= now - self._seconds or total > self._max_bytes

    def save(self, path: str | PathLike[str], ts: float, more: Iterable[Frame] = ()) -> int:
        """Write all segments, and then `more`, as a recording; returns its bytes. The segments are kept.

        The file appears complete or not at all, and replaces one of the same name. Raises OSError.
        """
        with self._lock:
            frames = [frame for segment in self._segments for frame in segment.frames]
        with private_files.replacing(path) as file:
            writer = RecordingWriter(file, self._facts, ts)
            file.writelines(frames)
            for frame in more:
                writer.write(frame)
            return file.tell()


def _check_head(path: str | PathLike[str], head: bytes) -> None:
    if head == MAGIC:
        return
    if head.startswith(_NAME):
        version = head.removeprefix(_NAME).decode("ascii", "replace").strip()
        raise ProtocolError(f"{path} is a recording of version {version}; this program reads version {_VERSION}")
    raise ProtocolError(f"{path} is not a telemetry recording: its first line is not {MAGIC.decode().strip()!r}")


def read_recording(path: str | PathLike[str]) -> Iterator[Frame]:
    """Read the frames of a recording one by one, as `RecordingReader` does, with the same errors."""
    return iter(RecordingReader(path))


class RecordingReader:
    """Read the frames of the recording at `path` one by one, the hello first. Holds one frame at a time.

    A recording that ends inside a frame, as after a crash, ends with a Bye that says so. `bytes_read` counts the bytes
    so far. `damaged_at` is the number of bytes before the first frame that is damaged or incomplete, None without one,
    and `cut` is True if that frame is incomplete.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = path
        self.bytes_read = 0
        self.damaged_at: int | None = None
        self.cut = False

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames.

        Raises OSError if the file cannot be read, and ProtocolError if it is not a recording or, after its valid
        frames, where it is damaged.
        """
        with Path(self.path).open("rb") as file:
            _check_head(self.path, file.read(len(MAGIC)))
            decoder, seq, ts = Decoder(), 0, 0.0
            started = False
            while chunk := file.read(_CHUNK):
                self.bytes_read = file.tell()
                for frame in self._whole(decoder, chunk):
                    if not started and not isinstance(frame, Hello):
                        raise ProtocolError(
                            f"{self.path} does not say whose recording it is: its first frame is no hello"
                        )
                    started, seq, ts = True, frame.seq, frame.ts
                    yield frame
        if decoder.pending or not started:
            self.damaged_at, self.cut = max(self.bytes_read, len(MAGIC)) - decoder.pending, True
        if not started:
            raise ProtocolError(f"{self.path} holds no frame: the recording ended before it began")
        if decoder.pending:
            reason = f"the recording ends inside a frame: {decoder.pending} bytes of it are there"
            _log.warning("%s: %s", self.path, reason)
            yield Bye(reason, seq=seq, ts=ts)

    def _whole(self, decoder: Decoder, chunk: bytes) -> Iterator[Frame]:
        """Decode a chunk; an error names the last valid byte of the file."""
        good = self.bytes_read - len(chunk) - decoder.pending
        try:
            for frame in decoder.feed(chunk):
                good = self.bytes_read - decoder.pending
                yield frame
        except ProtocolError as error:
            self.damaged_at = good
            raise ProtocolError(f"{self.path} is damaged after byte {good:,}: {error}") from error
