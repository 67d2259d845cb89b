"""The frames of one engine: numbered deltas, snapshots of their sum, and the flight recorder.

One caller at a time, except for `save`.
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
from radixkv.telemetry.protocol import Bye, Delta, Frame, Gap, Hello, Reply, Snapshot, encode, snapshot_frames
from radixkv.telemetry.recording import FlightRecorder
from radixkv.telemetry.records import Changes, EngineFacts

_PAUSE_S = 0.002  # seconds between two pages, in which the engine's thread gets the interpreter


class FrameLog:
    """Number changes, and encode them: deltas for all clients, a snapshot for one, and a recording."""

    def __init__(self, facts: EngineFacts, flight: FlightRecorder) -> None:
        self.last_append = 0.0  # on the monotonic clock
        self._facts, self._flight = facts, flight
        self._mirror = Mirror()
        self._mirror.time = time.time()  # until the first collection, which a long step may delay
        self._seq = 0

    def heartbeat(self, *, current: bool) -> Changes:
        """Return changes without content, to show that the engine is alive.

        Their time is now if the last changes are still the `current` state, else the time of the last changes.
        """
        return Changes(time.time() if current else self._mirror.time)

    def append(self, changes: Changes, send: Callable[[bytes], None]) -> None:
        """Number the changes, send them to all clients, and add them to the flight recorder.

        Nothing happens if they cannot be encoded.
        """
        deltas = [
            encode(Delta(page, seq=seq, ts=time.time()))
            for seq, page in enumerate(paginate(_with_changed_stats(changes, self._mirror), _pause), self._seq + 1)
        ]
        self._mirror.apply(changes)
        self._seq += len(deltas)
        self.last_append = time.monotonic()
        for delta in deltas:
            send(delta)
        self._keep(deltas)

    def _keep(self, deltas: list[bytes]) -> None:
        if self._flight.is_due(self.last_append):
            self._flight.begin(self._everything(), self.last_append)  # its snapshot includes these changes
            return
        for delta in deltas:
            self._flight.add(delta)

    def snapshot(self, dropped: int | None, control: bool = False) -> Iterator[bytes]:
        """Return the frames of a whole snapshot for one client, cut now and encoded one by one.

        A gap frame precedes them if `dropped` deltas were lost, a hello frame if that is None. The hello says whether
        the client may send commands.
        """
        now, facts = time.time(), replace(self._facts, control=control)
        first = Hello(facts, seq=self._seq, ts=now) if dropped is None else Gap(dropped, seq=self._seq, ts=now)
        return chain([encode(first)], self._everything())

    def _everything(self) -> Iterator[bytes]:
        """Cut a whole snapshot now; its frames are encoded one by one."""
        frames = snapshot_frames(self._mirror, self._seq, time.time(), _pause)
        return map(_encoded, frames)

    def reply(self, reply: Reply) -> bytes:
        """Encode the reply to a command."""
        return encode(replace(reply, seq=self._seq, ts=time.time()))

    def bye(self, reason: str) -> bytes:
        """Encode the last frame of a connection."""
        return encode(Bye(reason, seq=self._seq, ts=time.time()))

    def save(self, path: str | os.PathLike[str], last: Changes | None, why: str | None) -> int:
        """Write the last minutes as a recording, followed by the changes `last` and a bye with the reason `why`.

        Returns the size in bytes. May be called from any thread. Raises OSError.
        """
        now = time.time()
        cut = paginate(last) if last is not None else []
        more: list[Frame] = [Delta(page, seq=seq, ts=now) for seq, page in enumerate(cut, self._seq + 1)]
        if why is not None:
            more.append(Bye(why, seq=self._seq + len(cut), ts=now))
        return self._flight.save(path, now, more)


def _pause() -> None:
    """Let the engine's thread have the interpreter."""
    time.sleep(_PAUSE_S)


def _encoded(frame: Snapshot) -> bytes:
    data = encode(frame)
    if not frame.last:
        _pause()
    return data


def _with_changed_stats(changes: Changes, known: Mirror) -> Changes:
    """Leave out an unchanged what-if report, and stats that are unchanged, infinite or NaN."""
    before, report = ({}, None) if changes.reset else (known.stats, known.what_if)
    fresh = {name: value for name, value in changes.stats.items() if before.get(name) != value and isfinite(value)}
    return replace(changes, stats=fresh, what_if=None if changes.what_if == report else changes.what_if)
