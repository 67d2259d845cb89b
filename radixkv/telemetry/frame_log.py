"""What was told of an engine so far: its sum, which number it has, and the last minutes of it; and all frames of it.

Knows changes, frames and their order. Knows no engine, client or thread: one caller at a time, but for `save`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import isfinite

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.paging import paginate
from radixkv.telemetry.protocol import Bye, Delta, Frame, Gap, Hello, Snapshot, encode, snapshot_frames
from radixkv.telemetry.recording import FlightRecorder
from radixkv.telemetry.records import Changes, EngineFacts

_REST = 0.002  # seconds between two pages: who packs a large tree in one go keeps the engine from its interpreter


class FrameLog:
    """Numbers changes, and makes frames of them: deltas for all, a snapshot for one, and a recording."""

    def __init__(self, facts: EngineFacts, flight: FlightRecorder) -> None:
        self.told_at = 0.0  # on the monotonic clock
        self._facts, self._flight = facts, flight
        self._mirror = Mirror()
        self._seq = 0

    @property
    def nothing_new(self) -> Changes:
        """For a sign of life."""
        return Changes(self._mirror.time)

    def tell(self, changes: Changes, give: Callable[[bytes], None]) -> None:
        """Number the changes, give them to everybody, and keep them for a while; none of it if they cannot be told."""
        deltas = [
            encode(Delta(page, seq=seq, ts=time.time()))
            for seq, page in enumerate(paginate(_news(changes, self._mirror), _rest), self._seq + 1)
        ]
        self._mirror.apply(changes)
        self._seq += len(deltas)
        self.told_at = time.monotonic()
        for delta in deltas:
            give(delta)
        self._keep(deltas)

    def _keep(self, deltas: list[bytes]) -> None:
        if self._flight.is_due(self.told_at):
            self._flight.begin(self._everything(), self.told_at)  # which has these changes in it
            return
        for delta in deltas:
            self._flight.add(delta)

    def snapshot(self, dropped: int | None) -> Iterator[bytes]:
        """The frames of everything for one client, cut now and encoded when it takes them; behind a gap if deltas were
        dropped, behind a hello if not (None).
        """
        now = time.time()
        first = Hello(self._facts, seq=self._seq, ts=now) if dropped is None else Gap(dropped, seq=self._seq, ts=now)
        return chain([encode(first)], self._everything())

    def _everything(self) -> Iterator[bytes]:
        """All frames of a snapshot, cut at once and encoded one by one."""
        frames = snapshot_frames(self._mirror, self._seq, time.time(), _rest)
        return map(_encoded, frames)

    def bye(self, reason: str) -> bytes:
        """The last frame for one client."""
        return encode(Bye(reason, seq=self._seq, ts=time.time()))

    def save(self, path: str | os.PathLike[str], last: Changes | None, why: str | None) -> int:
        """Write the last minutes as a recording, `last` behind them and `why` nothing comes after that; its bytes.

        For any thread. Raises OSError.
        """
        now = time.time()
        cut = paginate(last) if last is not None else []
        more: list[Frame] = [Delta(page, seq=seq, ts=now) for seq, page in enumerate(cut, self._seq + 1)]
        if why is not None:
            more.append(Bye(why, seq=self._seq + len(cut), ts=now))
        return self._flight.save(path, now, more)


def _rest() -> None:
    """Let the engine's thread have the interpreter."""
    time.sleep(_REST)


def _encoded(frame: Snapshot) -> bytes:
    data = encode(frame)
    if not frame.last:
        _rest()
    return data


def _news(changes: Changes, known: Mirror) -> Changes:
    """The changes without those stats that are what they were, or that are no numbers."""
    before = {} if changes.reset else known.stats
    fresh = {name: value for name, value in changes.stats.items() if before.get(name) != value and isfinite(value)}
    return replace(changes, stats=fresh)
