"""Write files that only their owner may read, and that a reader finds whole or not at all.

Saved conversations, recordings and traces hold texts or facts about texts. So a new file has mode 0600 and is created
under a random name, where no other user can place a link. It then replaces the target in one step; a link of that name
is replaced, not followed. File and folder are synchronized with the disk. After an error, nothing of the new file is
left. A process that is killed may leave a file `.radixkv-RANDOM.new` in the folder, never a damaged target.

`open_folder` is for files that are trusted when they are read again: it checks that no other user can replace them.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_MOST_LINKS = 40  # that are followed, as Linux does
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PASS = _OPEN | getattr(os, "O_PATH", 0)  # for a folder that may be entered, and not read


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a new file, which replaces `path` when the block ends; if the block raises, `path` stays as it was.

    Two writers at once do not disturb each other: the file of the last one remains. Raises OSError.
    """
    target = Path(path)
    fresh, file = _fresh(target)
    try:
        with file:
            yield file
            _sync(file)
        fresh.replace(target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _sync_folder(target)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file in place of `path`. Raises OSError."""
    with replacing(path) as file:
        file.write(data)


def begin(path: str | os.PathLike[str], head: bytes) -> IO[bytes]:
    """Return a new open file in place of `path`, which begins with `head`. Raises OSError.

    The caller appends to it, and calls `close`.
    """
    target = Path(path)
    fresh, file = _fresh(target)
    try:
        file.write(head)
        _sync(file)
        fresh.replace(target)
    except BaseException:
        _discard(file)
        fresh.unlink(missing_ok=True)
        raise
    _sync_folder(target)
    return file


def create(path: str | os.PathLike[str], buffering: int = -1) -> IO[bytes]:
    """Return a new open file at `path`, for a caller of `begin`.

    Raises FileExistsError, also for a link, and OSError.
    """
    file: IO[bytes] = open(path, "xb", buffering, opener=_private)  # noqa: SIM115 - the caller closes it
    _sync_folder(Path(path))
    return file


def open_own(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file of this user to read its bytes. Raises PermissionError for any other file, and OSError."""
    file: IO[bytes] = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    found = os.fstat(file.fileno())
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        file.close()
        raise PermissionError(f"{path} is no regular file, or belongs to another user: {found.st_uid}")
    return file


def no_link(path: str, flags: int) -> int:
    """Open a file for `open`: no link, and without blocking, in case the path is a pipe. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def open_folder(path: str | os.PathLike[str]) -> int:
    """Open a folder that no other user can read or change, and return its descriptor; the caller closes it.

    It is for files that are trusted when they are read again, such as compiled code. Every folder from the root to it,
    and every link between them, belongs to this user or to root, and no other user may write there. A sticky folder of
    root's, such as /tmp, may be writable, since only the owner of an entry can replace it. The last folder is this
    user's, with mode 0700, and no link. Missing folders are created with mode 0700, whatever the umask is.

    Open its files relative to the descriptor, as in `os.open(name, flags, dir_fd=folder)`: then they are in the folder
    that was checked. Raises PermissionError, which names the folder and what to do, NotADirectoryError and OSError.
    """
    names = list(reversed(Path(path).absolute().parts))
    place, links = Path("/"), 0
    folder: int | None = None
    try:
        while names:
            name = names.pop()
            found = _found_or_made(name, folder)
            _check_owner(place / name, found)
            if names and stat.S_ISLNK(found.st_mode) and links < _MOST_LINKS:
                links += 1
                names += reversed(Path(os.readlink(name, dir_fd=folder)).parts)
                continue
            place /= name
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(f"{place} is no folder: remove it")
            parent, folder = folder, os.open(name, _PASS if names else _OPEN, dir_fd=folder)
            if parent is not None:
                os.close(parent)
            _check_folder(place, os.fstat(folder), is_last=not names)
    except BaseException:
        if folder is not None:
            os.close(folder)
        raise
    assert folder is not None
    return folder


def open_cache(name: str) -> int:
    """Open the folder `cache_path` as `open_folder` does, and raise as it does."""
    return open_folder(cache_path(name))


def cache_path(name: str) -> Path:
    """Return the folder `name` of radixkv in the user's cache; XDG_CACHE_HOME sets another cache.

    Raises RuntimeError where there is no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixkv" / name


def close(file: IO[bytes]) -> None:
    """Synchronize a file with the disk, and close it also if that fails. May be called twice. Raises OSError."""
    if file.closed:
        return
    try:
        _sync(file)
    except OSError:
        _discard(file)
        raise
    file.close()


# ---- inside


def _found_or_made(name: str, folder: int | None) -> os.stat_result:
    """Return the status of an entry of a folder, itself if it is a link; create a private folder if it is missing."""
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process has created it
            os.mkdir(name, 0o700, dir_fd=folder)
            os.chmod(name, 0o700, dir_fd=folder)  # a umask may have taken the owner's rights
        return os.lstat(name, dir_fd=folder)


def _check_owner(place: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{place} belongs to another user, {found.st_uid}: choose a folder of your own")


def _check_folder(place: Path, found: os.stat_result, *, is_last: bool) -> None:
    """Raise PermissionError for a folder in which another user could replace an entry; the last one is private."""
    _check_owner(place, found)
    if is_last and found.st_uid != os.geteuid():
        raise PermissionError(f"{place} belongs to another user, root: choose a folder of your own")
    if is_last and found.st_mode & 0o077:
        raise PermissionError(f"other users may read or write {place}: chmod 700 it")
    is_sticky = found.st_mode & stat.S_ISVTX and found.st_uid == 0
    if found.st_mode & 0o022 and not is_sticky:
        raise PermissionError(f"other users may write to {place}: chmod go-w it, or choose a folder elsewhere")


def _fresh(target: Path) -> tuple[Path, IO[bytes]]:
    """Create a file next to `target`. Raises FileExistsError for a target that must not be replaced, such as a pipe.

    Other OSErrors name `target`, not the new file.
    """
    with suppress(FileNotFoundError):
        mode = target.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise FileExistsError(f"{target} exists and is no regular file: name another one")
    fresh = target.with_name(f".radixkv-{secrets.token_hex(8)}.new")
    try:
        return fresh, open(fresh, "xb", opener=_private)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(target)) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(target: Path) -> None:
    """Make the name of a file durable, on file systems that can."""
    with suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _discard(file: IO[bytes]) -> None:
    """Close a file that cannot be written."""
    with suppress(OSError):
        file.close()
