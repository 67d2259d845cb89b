"""Make a feed from the command's target: a process, a socket, an address, a recording, or the demo."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path

from radixkv.errors import EngineNotFound, InvalidInput
from radixkv.telemetry.discovery import FoundEngine, connect, engines, tcp_address
from radixkv_monitor.feed import ThreadFeed
from radixkv_monitor.formatting import duration
from radixkv_monitor.live import HZ, SocketFeed
from radixkv_monitor.replay import FileFeed

DEMO = Path(__file__).parent / "demo.rec"
"""A recording of eight agents on the bundled model, by scripts/record_demo.py."""

NO_ENGINE = (
    "no running engine of this user was found. Start an engine (without monitor=False), or watch a recorded "
    "one with --demo"
)


def feed_of(target: str, token: str = "") -> ThreadFeed:
    """Return the feed of a process id, a socket's path, tcp://host:port, or a recording. Raises InvalidInput."""
    if target.startswith("tcp://"):
        tcp_address(target)
    if target.startswith("tcp://") or target.isdecimal():
        return SocketFeed(target, lambda: connect(target, token, HZ))
    path = Path(target)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InvalidInput(
            f"{target} is not a process id or tcp://HOST:PORT, and cannot be read as a socket or a recording: "
            f"{error.strerror}"
        ) from error
    if stat.S_ISSOCK(mode):
        return SocketFeed(target, lambda: connect(target, token, HZ))
    if stat.S_ISREG(mode):
        return FileFeed(path)
    raise InvalidInput(f"{target} is neither a socket nor a recording")


def feed_of_found(found: FoundEngine) -> SocketFeed:
    """Return the feed of an engine that was found; if it is gone, of a younger one that runs the same model."""
    return SocketFeed(f"{found.model}, pid {found.pid}", _reconnecting(found))


def demo() -> FileFeed:
    """Return the feed of the demo: a recording of an engine, which begins again at its end."""
    return FileFeed(DEMO, loops=True)


def describe(found: FoundEngine, now: float) -> str:
    """Describe an engine in one line, to choose by."""
    up = duration(now - found.started)
    return f"pid {_name(found)}  {found.model}  {found.device}  up {up}  radixkv {found.version}"


def _name(found: FoundEngine) -> str:
    """Name the process, and the engine in the process if there are several."""
    stem = Path(found.socket).stem
    return stem if stem.startswith(f"{found.pid}-") else str(found.pid)


def _reconnecting(first: FoundEngine) -> Callable[[], socket.socket]:
    """Return a function that connects to `first`, or to its successor."""
    current = first

    def attempt() -> socket.socket:
        nonlocal current
        try:
            return connect(current, hz=HZ)
        except EngineNotFound:
            younger = [each for each in engines() if each.model == current.model and each.started > current.started]
            if not younger:
                raise
            connection = connect(younger[-1], hz=HZ)
            current = younger[-1]
            return connection

    return attempt
