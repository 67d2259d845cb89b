"""Find the engines that run on this machine, and attach to one.

Each engine has a small JSON file next to its socket. Such a file is checked before it is used, and it never redirects a
client to another socket.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from radixkv import private_files
from radixkv.errors import EngineNotFound, InvalidInput
from radixkv.telemetry.protocol import Attach, encode
from radixkv.telemetry.records import EngineFacts, layout_of
from radixkv.telemetry.socket_paths import folders, is_listening, is_private, is_trusted_peer, process_start

_MOST_BYTES = 64 * 1024  # limit of a description; a usual one has some hundred bytes
_RETRY_INTERVAL = 0.02  # seconds
_ORPHAN_AGE = 10.0


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that runs or ran here (`alive` is False). `tcp` is host:port if it listens there, with a token."""

    engine: str
    pid: int
    process: str | None  # as `socket_paths.process_start` returns it
    started: float
    model: str
    version: str
    device: str
    socket: str
    tcp: str | None = None
    token: str | None = field(default=None, repr=False)


def advertise(facts: EngineFacts, path: Path, tcp: str | None = None, token: str | None = None) -> Path:
    """Write the description of an engine next to its socket, in place of an earlier one. Raises OSError."""
    description = FoundEngine(
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
        json.dump(asdict(description), file)
    fresh.replace(target)
    return target


def engines() -> list[FoundEngine]:
    """List this user's engines on this machine, the oldest first.

    Files of dead engines are removed, and so are sockets without a listener.
    """
    every: list[FoundEngine] = []
    for folder in filter(is_private, folders()):
        for path in sorted(folder.glob("*.json")):
            found = _read(path)
            if found is None:
                continue
            if _is_alive(found):
                every.append(found)
            else:
                with suppress(OSError):  # a file that cannot be removed does no harm
                    path.unlink(missing_ok=True)
                    path.with_suffix(".sock").unlink(missing_ok=True)
        for path in folder.glob("*.sock"):
            _remove_orphan(path)
    return sorted(every, key=lambda found: (found.started, found.socket))


def _remove_orphan(path: Path) -> None:
    """Remove a socket without description and without listener: its process was killed before it wrote one."""
    with suppress(OSError):
        status = path.lstat()
        is_old = (
            time.time() - status.st_mtime > _ORPHAN_AGE
        )  # a starting engine listens before it writes the description
        undescribed = stat.S_ISSOCK(status.st_mode) and not path.with_suffix(".json").exists()
        if is_old and undescribed and not is_listening(path):
            path.unlink(missing_ok=True)


def _read(path: Path) -> FoundEngine | None:
    """Read a description; None if it is not a valid one."""
    try:
        with open(path, "rb", opener=private_files.no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            description = json.loads(file.read(_MOST_BYTES))
        values = [description.get(name) for name in FoundEngine.__slots__]
        found = FoundEngine(*layout_of(FoundEngine).read(values))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    # Use the socket next to the file, not the path inside it: a forged file must not redirect a client.
    return replace(found, socket=str(path.with_suffix(".sock")))


def _is_alive(found: FoundEngine) -> bool:
    """Whether the process that wrote the description runs, and no later one of its number. Without /proc, connect."""
    same = found.process is not None and found.process == process_start(found.pid)
    path = Path(found.socket)
    return path.exists() and (same or is_listening(path))


# ---- attaching


def connect(
    target: int | str | Path | FoundEngine, token: str = "", hz: float = 4.0, timeout: float = 2.0
) -> socket.socket:
    """Connect to an engine; returns a blocking socket on which its frames arrive.

    `target` is a process id, the path of a socket, tcp://host:port, or an entry of `engines()`. TCP requires the token,
    which is looked up if the engine runs here. `hz` is the requested rate of deltas (at most 10), `timeout` in seconds
    is for connecting. Raises EngineNotFound if no engine answers, InvalidInput for an invalid target.
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
    """Split tcp://host:port into host and port. Raises InvalidInput."""
    advice = f"{text!r} is no address: write tcp://127.0.0.1:PORT"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"{advice} ({error})") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path.strip("/"):
        raise InvalidInput(advice)
    return host, port


def _known_token(port: int) -> str:
    """The token of a local engine that listens at the port, or ""."""
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
        raise EngineNotFound(f"process {pid} has no running engine; engines on this machine: {others}")
    return of_it[0]


def _connect_with_retries(connection: socket.socket, path: str, timeout: float) -> None:
    """Connect, and retry while the listener's backlog is full."""
    deadline = time.monotonic() + timeout
    connection.settimeout(timeout)
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_INTERVAL)


def _unix(path: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect_with_retries(connection, path, timeout)
        if not (os.geteuid() == 0 or is_trusted_peer(connection)):
            raise EngineNotFound(f"{path} is not yours: somebody else listens there")
    except BaseException:
        connection.close()
        raise
    return connection
