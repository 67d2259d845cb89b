"""Where an engine's socket lies, and that nobody else can get at it.

Knows folders, socket files, processes and whose they are. Knows no frame and no engine.
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
"""Bytes of a socket's path: what macOS allows, which is less than Linux."""
_WIDEST = "4194304-999.sock"
_PATIENCE = 0.5  # seconds in which a socket that somebody listens on takes a connection
_taken: dict[str, tuple[int, int]] = {}  # names of this process's own engines, and which file each socket is
_lock = threading.Lock()


def folders() -> list[Path]:
    """Where engines of this user may be: the runtime folder, and one of our own in the temporary folder."""
    own = Path(gettempdir()) / f"radixkv-{os.geteuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime) / "radixkv", own] if os.path.isabs(runtime) else [own]


def own_folder() -> Path:
    """The first of these that is private and whose paths are short enough, made if it is missing.

    Raises UnsafeFolder if there is none; it says what is wrong with each.
    """
    reasons = []
    for folder in folders():
        reason = _unusable(folder)
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    raise UnsafeFolder(f"no folder for the monitor's socket: {'; '.join(reasons)}")


def is_private(folder: Path) -> bool:
    """Whether it is a folder of ours that nobody else can read or write."""
    return _exposed(folder) is None


def _unusable(folder: Path) -> str | None:
    """Why it cannot be used, made if it is missing; None if it can."""
    if len(os.fsencode(folder / _WIDEST)) > LONGEST_PATH:
        return f"its path is too long for a socket's, which has {LONGEST_PATH} bytes: set XDG_RUNTIME_DIR or TMPDIR"
    try:
        above = folder.parent.stat()
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            return f"anybody may rename what is in {folder.parent}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return _exposed(folder)


def _exposed(folder: Path) -> str | None:
    """How others could get at what is in it; None if they cannot."""
    try:
        there = folder.lstat()  # lstat: a link would lead to where somebody else wants us
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(there.st_mode):
        return "it is no folder"
    if there.st_uid != os.geteuid():
        return f"it belongs to user {there.st_uid}"
    if there.st_mode & 0o077:
        return f"others can enter it: chmod 700 {folder}"
    return None


# ---- socket files


def claim() -> tuple[Path, socket.socket]:
    """A socket of this process's own that listens, and its path: `<pid>.sock`, or `<pid>-2.sock` and so on.

    What a dead process of the same number left there is removed. Raises UnsafeFolder or OSError.
    """
    folder = own_folder()
    with _lock:
        for stem in _stems():
            path = folder / f"{stem}.sock"
            if stem in _taken or is_listening(path):
                continue
            listener = _bound(path)
            if listener is not None:
                _taken[stem] = _identity(path)
                return path, listener
    raise AssertionError("the numbers do not end")


def is_claimed(path: Path) -> bool:
    """Whether the socket that was claimed is still there: whoever cleans runtime folders asks no engine."""
    with _lock:
        return _is_ours(path)


def release(path: Path) -> None:
    """Remove a claimed socket and the description beside it, unless others did; what others put there stays.

    Not in a child, which has forgotten whose they were.
    """
    with _lock:
        mine = _is_ours(path)
        _taken.pop(path.stem, None)
    for each in (path.with_suffix(".json"), path) if mine else ():
        with suppress(OSError):  # the end of an engine is no time to complain
            each.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        return path.stem in _taken and _taken[path.stem] == _identity(path)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int]:
    """Which file it is; no other has that number while somebody listens on it."""
    there = path.lstat()
    return there.st_dev, there.st_ino


def _stems() -> Iterator[str]:
    yield str(os.getpid())
    for number in count(2):
        yield f"{os.getpid()}-{number}"


def _bound(path: Path) -> socket.socket | None:
    """A listening socket at the path; None if somebody else was faster."""
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
    """Whether somebody listens at a socket's path; one who is busy does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PATIENCE)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
    return True


def _forget_the_parents() -> None:
    global _lock
    _lock = threading.Lock()  # the parent may have held it
    _taken.clear()


os.register_at_fork(after_in_child=_forget_the_parents)


# ---- who is who


def peer_user(connection: socket.socket) -> int | None:
    """The user at the other end of a Unix socket; None where the system does not tell."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(user)
    if sys.platform == "darwin":  # struct xucred: version, user, number of groups, groups
        _, user = struct.unpack_from("2I", connection.getsockopt(0, getattr(socket, "LOCAL_PEERCRED", 1), 76))
        return int(user)
    return None


def is_trusted_peer(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is this user, or root, who can read all anyway."""
    return peer_user(connection) in (None, os.geteuid(), 0)


def process_start(pid: int) -> str | None:
    """What no later process of the same number has: the boot and the tick in which it began. None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks and brackets
    except OSError:
        return None
    return f"{boot}:{fields[19]}"
