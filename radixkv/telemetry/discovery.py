"""Which engines run here, and how to attach to one: a small json file beside each socket.

Knows those files and the first frame of a client. Knows neither what an engine tells nor who shows it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from radixkv.errors import EngineNotFound, InvalidInput
from radixkv.telemetry.protocol import Attach, encode
from radixkv.telemetry.records import EngineFacts
from radixkv.telemetry.socket_paths import folders, is_listening, is_private, is_trusted_peer, process_start

_LARGEST = 64 * 1024  # bytes of a description; ours have some hundreds
_AGAIN = 0.02  # seconds
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that is or was there. `tcp` is host:port, with a token, if it also listens there."""

    engine: str
    pid: int
    process: str | None  # as `socket_paths.process_start` says it
    started: float
    model: str
    version: str
    device: str
    socket: str
    tcp: str | None = None
    token: str | None = field(default=None, repr=False)
    alive: bool = True


def advertise(facts: EngineFacts, path: Path, tcp: str | None = None, token: str | None = None) -> Path:
    """Say beside the socket whose it is; replaces what was said before. Raises OSError."""
    said = FoundEngine(
        engine=facts.engine,
        pid=os.getpid(),
        process=process_start(os.getpid()),
        started=facts.started,
        model=facts.model,
        version=facts.version,
        device=facts.device,
        socket=str(path),
        tcp=tcp,
        token=token,
    )
    target = path.with_suffix(".json")
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({name: value for name, value in asdict(said).items() if name != "alive"}, file)
    fresh.replace(target)
    return target


def engines(*, dead: bool = False) -> list[FoundEngine]:
    """The engines of this user that run on this machine, the oldest first.

    Files of dead ones are removed, and sockets that nobody listens on; with `dead` they are left, and dead ones are
    listed too, with `alive` False.
    """
    every: list[FoundEngine] = []
    for folder in filter(is_private, folders()):
        for path in sorted(folder.glob("*.json")):
            found = _read(path)
            if found is None:
                continue
            if found.alive or dead:
                every.append(found)
            else:
                with suppress(OSError):  # what cannot be removed is in nobody's way
                    path.unlink(missing_ok=True)
                    path.with_suffix(".sock").unlink(missing_ok=True)
        for path in () if dead else folder.glob("*.sock"):
            _forget_unsaid(path)
    return sorted(every, key=lambda found: (found.started, found.socket))


def _forget_unsaid(path: Path) -> None:
    """Remove a socket that has no description, if nobody listens: its process was killed before it could say more."""
    with suppress(OSError):
        there = path.lstat()
        is_old = (
            time.time() - there.st_mtime > _GRACE
        )  # an engine that begins listens a moment after its socket is there
        unsaid = stat.S_ISSOCK(there.st_mode) and not path.with_suffix(".json").exists()
        if is_old and unsaid and not is_listening(path):
            path.unlink(missing_ok=True)


def _read(path: Path) -> FoundEngine | None:
    """What a description says, and whether it is still true; None if it is none."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            there = os.fstat(file.fileno())
            if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid():
                return None
            said = json.loads(file.read(_LARGEST))
        # The socket is the one beside it, whatever it says: nobody is sent elsewhere by a file.
        known = {name: said.get(name) for name in FoundEngine.__slots__ if name not in ("socket", "alive")}
        found = FoundEngine(**known, socket=str(path.with_suffix(".sock")))
        return replace(found, alive=_is_alive(found)) if _is_sound(found) else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for anybody: a pipe has two ends."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _is_sound(found: FoundEngine) -> bool:
    """Whether its values have the right types."""
    texts = (found.engine, found.model, found.version, found.device)
    rest = (found.process, found.tcp, found.token)
    return (
        all(isinstance(text, str) for text in texts)
        and all(text is None or isinstance(text, str) for text in rest)
        and type(found.pid) is int
        and type(found.started) in (int, float)
    )


def _is_alive(found: FoundEngine) -> bool:
    """By its process, which another one of the same number is not; else (no /proc, a container) by connecting."""
    same = found.process is not None and found.process == process_start(found.pid)
    path = Path(found.socket)
    return path.exists() and (same or is_listening(path))


# ---- attaching


def connect(
    target: int | str | Path | FoundEngine, token: str = "", hz: float = 4.0, timeout: float = 2.0
) -> socket.socket:
    """A connected, blocking socket on which the engine's frames arrive.

    `target` is a process id, the path of a socket, tcp://host:port, or one of `engines()`. TCP asks for the token,
    which is looked up if the engine runs here. `hz` is how often deltas should come (at most 10), `timeout` in seconds
    is for connecting. Raises EngineNotFound if nobody answers, InvalidInput for a target that is none.
    """
    where = f"{target.socket if isinstance(target, FoundEngine) else target}"
    try:
        if where.startswith("tcp://"):
            host, port = tcp_address(where)
            connection = socket.create_connection((host, port), timeout)
            token = token or _known_token(port)
        else:
            connection = _unix(_path_of(target), timeout)
    except OSError as error:
        raise EngineNotFound(f"no engine answers at {where}: {error.strerror or error}") from error
    try:
        connection.sendall(encode(Attach(token, hz)))
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise EngineNotFound(f"the engine at {where} hung up: {error.strerror or error}") from error
        raise
    return connection


def tcp_address(text: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises InvalidInput."""
    advice = f"{text!r} is no address: write tcp://127.0.0.1:PORT"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"{advice} ({error})") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path.strip("/"):
        raise InvalidInput(advice)
    return host, port


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _known_token(port: int) -> str:
    """The token of a local engine that listens at the port, or nothing."""
    tokens = (found.token for found in engines() if found.tcp and found.tcp.rpartition(":")[2] == str(port))
    return next(filter(None, tokens), "")


def _path_of(target: int | str | Path | FoundEngine) -> str:
    if isinstance(target, FoundEngine):
        return target.socket
    if isinstance(target, int) or (isinstance(target, str) and target.isdecimal()):
        return _socket_of(int(target))
    return str(target)


def _socket_of(pid: int) -> str:
    running = engines()
    of_it = [found.socket for found in running if found.pid == pid]
    if len(of_it) > 1:
        raise EngineNotFound(f"process {pid} runs {len(of_it)} engines: name a socket: {', '.join(of_it)}")
    if not of_it:
        others = ", ".join(str(found.pid) for found in running) or "none"
        raise EngineNotFound(f"process {pid} runs no engine that can be watched; running here: {others}")
    return of_it[0]


def _dial(connection: socket.socket, path: str, timeout: float) -> None:
    """Connect, again and again while too many others are about to."""
    deadline = time.monotonic() + timeout
    connection.settimeout(timeout)
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN)


def _unix(path: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _dial(connection, path, timeout)
        if not (os.geteuid() == 0 or is_trusted_peer(connection)):
            raise EngineNotFound(f"{path} is not yours: somebody else listens there")
    except BaseException:
        connection.close()
        raise
    return connection
