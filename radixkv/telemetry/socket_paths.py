"""The paths of engines' sockets, in folders that only their user can enter.

Sockets and folders are checked before they are used: a folder that other users can enter is refused.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import gettempdir

from radixkv.errors import UnsafeFolder

LONGEST_PATH = 103
"""The limit of a socket's path in bytes: that of macOS, which is lower than that of Linux."""
_LONGEST_NAME = "4194304-999.sock"
_CONNECT_TIMEOUT = 0.5  # seconds to wait for a listening socket to accept
_taken: dict[str, tuple[int, int]] = {}  # the names of this process's engines, and the identity of each socket file
_lock = threading.Lock()


def folders() -> list[Path]:
    """The folders where engines of this user may be: the runtime folder, and a private one in the temporary folder."""
    own = Path(gettempdir()) / f"radixkv-{os.geteuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime) / "radixkv", own] if os.path.isabs(runtime) else [own]


def own_folder() -> Path:
    """Return the first of these folders that is private and has short enough paths; create it if it is missing.

    Raises UnsafeFolder if there is none, with the reason for each.
    """
    reasons = []
    for folder in folders():
        reason = _folder_problem(folder)
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    raise UnsafeFolder(f"no folder for the monitor's socket: {'; '.join(reasons)}")


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user that no other user can read or write."""
    return _privacy_problem(folder) is None


def _folder_problem(folder: Path) -> str | None:
    """The reason why the folder cannot be used, None if it can; it is created if it is missing."""
    if len(os.fsencode(folder / _LONGEST_NAME)) > LONGEST_PATH:
        return f"its path is too long for a socket's, which has {LONGEST_PATH} bytes: set XDG_RUNTIME_DIR or TMPDIR"
    try:
        above = folder.parent.stat()
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            return f"other users may rename the files in {folder.parent}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return _privacy_problem(folder)


def _privacy_problem(folder: Path) -> str | None:
    """The reason why other users could access the folder's files; None if they cannot."""
    try:
        status = folder.lstat()  # not stat: another user may have placed a link
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"others can enter it: chmod 700 {folder}"
    return None


# ---- socket files


def claim() -> tuple[Path, socket.socket]:
    """Bind a listening socket of this process, and return it with its path: `<pid>.sock`, `<pid>-2.sock` and so on.

    Files of a dead process with the same number are removed. Raises UnsafeFolder or OSError.
    """
    folder = own_folder()
    with _lock:
        for stem in _stems():
            path = folder / f"{stem}.sock"
            if stem in _taken or is_listening(path):
                continue
            listener = _bind(path)
            if listener is not None:
                _taken[stem] = _identity(path)
                return path, listener
    raise AssertionError("the numbers do not end")


def is_claimed(path: Path) -> bool:
    """Whether the claimed socket still exists: runtime folders may be cleaned."""
    with _lock:
        return _is_ours(path)


def release(path: Path) -> None:
    """Remove a claimed socket and its description, unless another process has replaced them.

    In a forked child it does nothing, because the child has no claims.
    """
    with _lock:
        mine = _is_ours(path)
        _taken.pop(path.stem, None)
    for each in (path.with_suffix(".json"), path) if mine else ():
        with suppress(OSError):  # an error here must not disturb the end of an engine
            each.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        return path.stem in _taken and _taken[path.stem] == _identity(path)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int]:
    """The identity of a file, which is unique while the socket is open."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def _stems() -> Iterator[str]:
    yield str(os.getpid())
    for number in count(2):
        yield f"{os.getpid()}-{number}"


def _bind(path: Path) -> socket.socket | None:
    """Bind a listening socket at the path; None if another process was faster."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def is_listening(path: Path) -> bool:
    """Whether a process listens at the socket's path; a busy one counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
    return True


def _clear_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent may have held it
    _taken.clear()


os.register_at_fork(after_in_child=_clear_after_fork)


# ---- peers and processes


def peer_user(connection: socket.socket) -> int | None:
    """The user at the other end of a Unix socket; None where the system does not report it."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(user)
    if sys.platform == "darwin":  # struct xucred: version, user, number of groups, groups
        _, user = struct.unpack_from("2I", connection.getsockopt(0, getattr(socket, "LOCAL_PEERCRED", 1), 76))
        return int(user)
    return None


def peer_process(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None where the system does not report it."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(process) or None  # 0 is a process that this one cannot see, as in another container
    if sys.platform == "darwin":
        return int(connection.getsockopt(0, getattr(socket, "LOCAL_PEERPID", 2))) or None
    return None


def is_trusted_peer(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is this user, or root, which can read every file anyway."""
    return peer_user(connection) in (None, os.geteuid(), 0)


def process_start(pid: int) -> str | None:
    """A mark that no later process of the same number has: the boot id and the start tick. None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks and brackets
    except OSError:
        return None
    return f"{boot}:{fields[19]}"
