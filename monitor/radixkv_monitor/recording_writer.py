"""Write frames to a recording, until it is stopped or the disk is full."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from radixkv import private_files
from radixkv.telemetry.protocol import Frame, Hello
from radixkv.telemetry.recording import RecordingWriter
from radixkv.telemetry.records import EngineFacts


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
