"""Recordings: a line that says what the file is, then the frames of the protocol: hello, a snapshot, deltas.

Knows files. Does not know where frames come from. The engine's flight recorder, the monitor's `r` key and `--replay`
share this format.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from radixkv.errors import ProtocolError
from radixkv.telemetry.frames import Bye, Frame, Hello
from radixkv.telemetry.protocol import Decoder, encode
from radixkv.telemetry.records import EngineFacts

_log = logging.getLogger(__name__)

MAGIC = b"RADIXKV-TELEMETRY 1\n"
_CHUNK = 64 * 1024


class RecordingWriter:
    """Writes a recording frame by frame; a context manager. Each frame is handed to the system at once.

    The frames behind the hello, which it writes itself, are the caller's: a whole snapshot first. A file that it opened
    it closes; one that it was given it leaves open.
    """

    def __init__(self, target: str | PathLike[str] | IO[bytes], facts: EngineFacts, ts: float = 0.0) -> None:
        """Write the head to a path, or to a file that is open for bytes. Raises OSError as files do."""
        self._owns = isinstance(target, (str, PathLike))
        self._file = _opened(target) if isinstance(target, (str, PathLike)) else target
        self._file.write(MAGIC)
        self.write(Hello(facts, ts=ts))

    def write(self, frame: Frame) -> int:
        """Append a frame; returns its bytes. O(bytes). Raises OSError if the disk is full, say."""
        data = encode(frame)
        self._file.write(data)
        self._file.flush()
        return len(data)

    def close(self) -> None:
        """No more frames; may be called twice."""
        if self._owns:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _opened(path: str | PathLike[str]) -> IO[bytes]:
    return Path(path).open("wb")


def read_recording(path: str | PathLike[str]) -> Iterator[Frame]:
    """The frames of a recording, one by one, the hello first. Holds one frame at a time.

    A recording that ends inside a frame, as after a crash, ends with a Bye that says so. Raises OSError if the file
    cannot be read, and ProtocolError if it is no recording or, behind its good frames, where it is damaged.
    """
    with Path(path).open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ProtocolError(f"{path} is no recording of telemetry: it does not begin with {MAGIC!r}")
        decoder, seq, ts = Decoder(), 0, 0.0
        begun = False
        while chunk := file.read(_CHUNK):
            for frame in decoder.feed(chunk):
                if not begun and not isinstance(frame, Hello):
                    raise ProtocolError(f"{path} does not say whose recording it is: its first frame is no hello")
                begun, seq, ts = True, frame.seq, frame.ts
                yield frame
    if not begun:
        raise ProtocolError(f"{path} holds no frame: the recording ended before it began")
    if decoder.pending:
        reason = f"the recording ends inside a frame: {decoder.pending} bytes of it are there"
        _log.warning("%s: %s", path, reason)
        yield Bye(reason, seq=seq, ts=ts)
