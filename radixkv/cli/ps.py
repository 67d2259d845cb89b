"""`radixkv ps`: list the running engines of this user.

Each engine is attached to by its telemetry socket until its first snapshot has arrived; no torch is loaded.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence

from radixkv.cli.entry_point import table
from radixkv.errors import ProtocolError, TelemetryError
from radixkv.telemetry.discovery import FoundEngine, connect, engines
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Decoder, Delta, Frame, Hello, Snapshot
from radixkv.telemetry.records import EngineFacts

_TIMEOUT = 2.0  # seconds for all engines together
_CHUNK = 256 * 1024
_HEAD = ("PID", "MODEL", "DEVICE", "POOL", "HIT RATE", "RUNNING", "WAITING", "SESSIONS", "UP", "SOCKET")
_TEXTS = [_HEAD.index(name) for name in ("MODEL", "DEVICE", "SOCKET")]  # aligned to the left


def run(arguments: argparse.Namespace) -> int:
    """List the engines of this user; return 0, also if there is none."""
    looks = _look(engines())
    if arguments.json:
        json.dump([look.plain() for look in looks], sys.stdout, indent=2)
        print()
    elif not looks:
        print("No engine is running. An engine is listed here from radixkv.Engine.load(...) until it is closed.")
    else:
        print(table(_HEAD, [_row(look) for look in looks], left=_TEXTS))
    return 0


class Look:
    """The state of one engine in its first frames, or the reason why there is none."""

    def __init__(self, found: FoundEngine) -> None:
        """Attach to the engine; an error is kept as `problem`."""
        self.found = found
        self.facts: EngineFacts | None = None
        self.problem: str | None = "does not answer"
        self.connection: socket.socket | None = None
        self._mirror, self._decoder = Mirror(), Decoder()
        self._whole = False
        try:
            self.connection = connect(found, hz=1.0)
            self.connection.setblocking(False)
        except TelemetryError as error:
            self.problem = str(error)

    @property
    def done(self) -> bool:
        """Whether the state has arrived, or cannot arrive any more."""
        return self.connection is None

    def read(self) -> None:
        """Read the available frames; close the connection when the state is complete or on an error."""
        assert self.connection is not None
        try:
            data = self.connection.recv(_CHUNK)
            for frame in self._decoder.feed(data):
                self._add(frame)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            data, self.problem = b"", str(error)
        if self._whole and self._mirror.time:  # 0 until the first frame with a state
            self.problem = None
            self.close()
        elif not data:
            self.close()

    def _add(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self.facts = frame.facts
        elif isinstance(frame, Snapshot):
            self._mirror.apply(frame.changes)
            self._whole = frame.last
        elif isinstance(frame, Delta):
            self._mirror.apply(frame.changes)
        elif isinstance(frame, Bye):
            self.problem = frame.reason

    def close(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def plain(self) -> dict[str, object]:
        """Return the state as plain values, for scripts; unknown ones are None."""
        found, known = self.found, self.problem is None
        stats = self._mirror.stats if known else {}
        return {
            "pid": found.pid,
            "engine": found.engine,
            "model": found.model,
            "version": found.version,
            "device": found.device,
            "socket": found.socket,
            "tcp": found.tcp,
            "uptime_s": round(time.time() - found.started, 3),
            "num_blocks": self.facts.num_blocks if self.facts else None,
            **{name: stats.get(f"cache.{name}") for name in ("held_blocks", "cached_blocks", "free_blocks")},
            **{name: stats.get(name) for name in ("prompt_tokens", "cached_tokens", "running", "waiting", "finished")},
            "sessions": sum(not each.closed for each in self._mirror.sessions.values()) if known else None,
            "problem": self.problem,
        }


def _look(found: Sequence[FoundEngine]) -> list[Look]:
    """Attach to all engines at once, so that the timeout applies once, not once per engine."""
    deadline = time.monotonic() + _TIMEOUT
    looks = [Look(each) for each in found]
    try:
        with selectors.DefaultSelector() as selector:
            for look in looks:
                if look.connection is not None:
                    selector.register(look.connection, selectors.EVENT_READ, look)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data.read()
                    if key.data.done:
                        selector.unregister(key.fileobj)
    finally:
        for look in looks:
            look.close()
    return looks


def _row(look: Look) -> tuple[str, ...]:
    said = look.plain()
    used = None if look.problem else _sum(said["held_blocks"], said["cached_blocks"])
    return (
        str(said["pid"]),
        _printable(look.found.model),
        _printable(look.found.device),
        _share(used, said["num_blocks"]),
        _share(said["cached_tokens"], said["prompt_tokens"]),
        *(_count(said[name]) for name in ("running", "waiting", "sessions")),
        _duration(look.found.started),
        _printable(look.found.socket if look.problem is None else f"{look.found.socket} ({look.problem})"),
    )


def _sum(*numbers: object) -> float | None:
    known = [number for number in numbers if isinstance(number, (int, float))]
    return sum(known) if len(known) == len(numbers) else None


def _share(part: object, whole: object) -> str:
    """Format a share in percent, rounded down, so that 100% means all."""
    if not isinstance(part, (int, float)) or not isinstance(whole, (int, float)) or whole <= 0:
        return "-"
    return f"{int(100 * part / whole)}%"


def _count(number: object) -> str:
    return f"{number:.0f}" if isinstance(number, (int, float)) else "-"


def _duration(started: float) -> str:
    seconds = max(0, int(time.time() - started))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _printable(text: str) -> str:
    """Replace control characters, because names come from files of other programs."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
