"""Keep the frames of the last minutes, packed, so that any moment of them can be restored.

A segment begins with a snapshot and continues with deltas. A moment is the snapshot of its segment and the deltas up to
it. One thread adds frames; others may read.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from radixkv.telemetry.protocol import Decoder, Delta, Hello, Snapshot, encode
from radixkv.telemetry.records import EngineFacts

SECONDS = 600.0
BYTES = 12 * 1024 * 1024
"""The most that is kept; the oldest segment is dropped first."""
SHORT = 64 * 1024
"""The least bytes of deltas in a complete segment."""

Piece = Snapshot | Delta


@dataclass
class Segment:
    """Frames of one engine: first `head` frames of a snapshot, then deltas. They are compressed when the segment is
    complete.
    """

    facts: EngineFacts
    times: list[float] = field(default_factory=list)
    head: int = 0
    _open: list[bytes] | None = field(default_factory=list)
    _packed: bytes = b""
    _sizes: list[int] = field(default_factory=list)

    def add(self, time: float, data: bytes, *, head: bool = False) -> None:
        """Append a frame. A time before the last one is replaced by the last one, so times never decrease."""
        assert self._open is not None
        self.times.append(max(time, self.times[-1]) if self.times else time)
        self.head += head
        self._open.append(data)
        self._sizes.append(len(data))

    def pack(self) -> None:
        """Compress a complete segment. O(bytes)."""
        assert self._open is not None
        self._packed, self._open = zlib.compress(b"".join(self._open), 1), None

    def frames(self, first: int, last: int) -> bytes:
        """Return the bytes of frames `first` to before `last`. O(bytes of the segment)."""
        if self._open is not None:
            return b"".join(self._open[first:last])
        begin = sum(self._sizes[:first])
        return zlib.decompress(self._packed)[begin : begin + sum(self._sizes[first:last])]

    @property
    def bytes(self) -> int:
        """Approximate bytes in memory."""
        return (len(self._packed) if self._open is None else sum(self._sizes)) + 64 * len(self.times)

    @property
    def due(self) -> bool:
        """Return whether the deltas cost more than two snapshots, so that the next segment should begin."""
        return sum(self._sizes[self.head :]) > max(SHORT, 2 * sum(self._sizes[: self.head]))


class Timeline:
    """Segments, oldest first, limited in `seconds` and `bytes`; the one that is being written always stays."""

    def __init__(self, seconds: float = SECONDS, bytes: float = BYTES) -> None:
        self._seconds = seconds
        self._bytes = bytes
        self._segments: deque[Segment] = deque()
        self._lock = Lock()

    def begin(self, facts: EngineFacts, snapshot: Sequence[Snapshot]) -> None:
        """Begin a segment of this engine; `snapshot` is its whole state. O(snapshot)."""
        segment = Segment(facts)
        for page in snapshot:
            segment.add(_time(page), encode(page), head=True)
        with self._lock:
            if self._segments:
                self._segments[-1].pack()
            self._segments.append(segment)
            self._forget()

    def add(self, delta: Delta) -> bool:
        """Append a delta to the newest segment; return whether it is time to `begin` a new one. O(delta)."""
        data = encode(delta)
        with self._lock:
            self._segments[-1].add(_time(delta), data)
            self._forget()
            return self._segments[-1].due

    @property
    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest time; None without frames."""
        with self._lock:
            if not self._segments:
                return None
            return self._segments[0].times[0], self._segments[-1].times[-1]

    @property
    def bytes(self) -> int:
        """Approximate bytes in memory."""
        with self._lock:
            return sum(segment.bytes for segment in self._segments)

    def frames_until(self, time: float, after: ReadPosition | None = None) -> tuple[ReadPosition, list[Piece]] | None:
        """Return the frames that lead to `time`, from `after` on if it is in the same segment, else from a snapshot on.

        Also returns the new read position. None without frames. A time before the oldest frame means the oldest.
        O(segment).
        """
        with self._lock:
            if not self._segments:
                return None
            at = max(bisect_right([each.times[0] for each in self._segments], time) - 1, 0)
            segment = self._segments[at]
            last = max(bisect_right(segment.times, time), segment.head)
            follows = after is not None and after.segment is segment and after.frame <= last
            data = segment.frames(after.frame if after is not None and follows else 0, last)
        return ReadPosition(segment, last), [
            each for each in Decoder().feed(data) if isinstance(each, Snapshot | Delta)
        ]

    def all_frames(self) -> Iterator[Hello | Piece]:
        """Yield all frames as a recording has them: a hello before the frames of each engine."""
        with self._lock:
            segments = [(segment, len(segment.times)) for segment in self._segments]
        engine = None
        for segment, count in segments:
            if segment.facts.engine != engine:
                engine = segment.facts.engine
                yield Hello(segment.facts, ts=segment.times[0])
            with self._lock:
                data = segment.frames(0, count)
            for frame in Decoder().feed(data):
                if isinstance(frame, Snapshot | Delta):
                    yield frame

    def _forget(self) -> None:
        newest = self._segments[-1].times[-1]
        size = sum(each.bytes for each in self._segments)
        while len(self._segments) > 1 and (size > self._bytes or newest - self._segments[1].times[0] > self._seconds):
            size -= self._segments.popleft().bytes


def _time(frame: Piece) -> float:
    """Return the time at which a frame was sent. It may be later than the time of its state, which a long step
    delays."""
    return max(frame.ts, frame.changes.time)


@dataclass(frozen=True)
class ReadPosition:
    """The position of a reader: the number of frames read in a segment."""

    segment: Segment
    frame: int
