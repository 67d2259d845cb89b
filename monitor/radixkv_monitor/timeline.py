"""The last minutes as frames, packed, so that any moment of them can be built again.

Knows frames and their bytes. Knows no state and no feed. A segment begins with everything, as a snapshot, and goes on
with deltas; a moment is its segment's snapshot and the deltas up to it. One thread adds, others may read.
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
"""How much is kept, at most; the oldest segment goes first."""
SHORT = 64 * 1024
"""No segment ends before it has so many bytes of deltas."""

Piece = Snapshot | Delta


@dataclass
class Segment:
    """Frames of one engine, of which the first `head` are its snapshot; packed together once nothing is added."""

    facts: EngineFacts
    times: list[float] = field(default_factory=list)
    head: int = 0
    _open: list[bytes] | None = field(default_factory=list)
    _packed: bytes = b""
    _sizes: list[int] = field(default_factory=list)

    def add(self, time: float, data: bytes, *, head: bool = False) -> None:
        """One frame more. Times never go back: one that does counts as the time before."""
        assert self._open is not None
        self.times.append(max(time, self.times[-1]) if self.times else time)
        self.head += head
        self._open.append(data)
        self._sizes.append(len(data))

    def pack(self) -> None:
        """Nothing will be added. O(bytes)."""
        assert self._open is not None
        self._packed, self._open = zlib.compress(b"".join(self._open), 1), None

    def frames(self, first: int, last: int) -> bytes:
        """The bytes of frames `first` to before `last`. O(bytes of the segment)."""
        if self._open is not None:
            return b"".join(self._open[first:last])
        begin = sum(self._sizes[:first])
        return zlib.decompress(self._packed)[begin : begin + sum(self._sizes[first:last])]

    @property
    def bytes(self) -> int:
        """About what it holds in memory."""
        return (len(self._packed) if self._open is None else sum(self._sizes)) + 64 * len(self.times)

    @property
    def due(self) -> bool:
        """Whether its deltas have come to more than what two snapshots cost, so that seeking stays cheap."""
        return sum(self._sizes[self.head :]) > max(SHORT, 2 * sum(self._sizes[: self.head]))


class Timeline:
    """Segments, oldest first, bounded in `seconds` and `bytes`; the one that is being written always stays."""

    def __init__(self, seconds: float = SECONDS, bytes: float = BYTES) -> None:
        self._seconds = seconds
        self._bytes = bytes
        self._segments: deque[Segment] = deque()
        self._lock = Lock()

    def begin(self, facts: EngineFacts, snapshot: Sequence[Snapshot]) -> None:
        """A new segment of this engine; `snapshot` is everything. O(snapshot)."""
        segment = Segment(facts)
        for page in snapshot:
            segment.add(page.changes.time, encode(page), head=True)
        with self._lock:
            if self._segments:
                self._segments[-1].pack()
            self._segments.append(segment)
            self._forget()

    def add(self, delta: Delta) -> bool:
        """Append a delta to the newest segment; says whether it is time to `begin` a new one. O(delta)."""
        data = encode(delta)
        with self._lock:
            self._segments[-1].add(delta.changes.time, data)
            self._forget()
            return self._segments[-1].due

    @property
    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest time; None before there is any."""
        with self._lock:
            if not self._segments:
                return None
            return self._segments[0].times[0], self._segments[-1].times[-1]

    @property
    def bytes(self) -> int:
        """About what it holds in memory."""
        with self._lock:
            return sum(segment.bytes for segment in self._segments)

    def frames_until(self, time: float, after: ReadPosition | None = None) -> tuple[ReadPosition, list[Piece]] | None:
        """What to apply to reach `time`: behind `after`, where that leads there, else from a snapshot on.

        Tells where that has led. None while there is nothing. Before the oldest it is the oldest. O(segment).
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
        """All frames, as a recording has them: a hello wherever another engine begins."""
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


@dataclass(frozen=True)
class ReadPosition:
    """How far a reader is: behind so many frames of a segment."""

    segment: Segment
    frame: int
