"""The folder of a disk cache: its lock, a folder for each fingerprint, and the digests of model files.

The folder is private, since it holds facts about users' text, and one engine uses it at a time. A fingerprint is a
digest of all that decides the bits of a block. Folders of other fingerprints are left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from radixkv import private_files
from radixkv.disk.records import Index
from radixkv.errors import InvalidInput

_log = logging.getLogger("radixkv.disk")
FORMAT = 1  # of images and slots
_ABOUT, _DIGESTS, _LOCK = "about.json", "digests.json", "lock"
_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "afs", "fuse.sshfs")


class FolderFacts(NamedTuple):
    """A fingerprint's folder: its name, the model, its bytes on disk, its blocks, and the time of its last use."""

    name: str
    model: str
    nbytes: int
    blocks: int
    used: float


class DiskFolder:
    """The folder of a disk cache, locked by this process until `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and lock it; it is created if it is missing. Raises InvalidInput, which names the setting."""
        self.path = Path(path).expanduser().absolute()
        folder = -1
        try:
            folder = private_files.open_folder(self.path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(_LOCK, flags, 0o600, dir_fd=folder)
        except OSError as error:
            raise InvalidInput(f"disk_cache={str(path)!r} cannot be used: {error}") from error
        finally:
            if folder >= 0:
                os.close(folder)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise InvalidInput(
                f"disk_cache={str(path)!r} is used by process {owner}: one engine at a time uses a folder"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def close(self) -> None:
        """Release the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child process may have it open
        os.close(self._lock)

    def place(self, facts: Mapping[str, Any], model: str) -> Path:
        """Return the folder of a fingerprint, which is created if it is missing; `model` is shown. Raises OSError."""
        if kind := _network(self.path):
            _log.warning("disk_cache=%s is on a network file system (%s): locks may not hold there", self.path, kind)
        name = fingerprint(facts)
        path = self.path / name
        os.close(private_files.open_folder(path))
        private_files.write(path / _ABOUT, json.dumps({"model": model, **facts}, default=str, indent=1).encode())
        return path

    def digest(self, files: Mapping[Path, str]) -> str:
        """Return a digest of the bytes of files, which have these stamps; one of the same stamp is not read again.

        Raises OSError for a file that was changed.
        """
        record = self.path / _DIGESTS
        try:
            known = dict(json.loads(record.read_bytes()))
        except (OSError, ValueError, TypeError):
            known = {}
        found: dict[str, Any] = {}
        for path, key in sorted(files.items()):
            found[key] = known.get(key) or _digest(path)
            if stamp(path) != key:
                raise OSError(f"{path} was changed after it was loaded")
        if found.keys() - known.keys():
            kept = dict(list({**known, **found}.items())[-1000:])
            private_files.write(record, json.dumps(kept).encode())
        return hashlib.sha256("\n".join(map(str, found.values())).encode()).hexdigest()


def stamp(file: Path) -> str:
    """Return the name, size, time and inode of a file, which change with its content. Raises OSError."""
    real = file.resolve()
    found = real.stat()
    return f"{real} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the name of the folder for such facts.

    >>> fingerprint({"dtype": "float32"}) == fingerprint({"dtype": "bfloat16"})
    False
    """
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def listed(path: str | os.PathLike[str]) -> list[FolderFacts]:
    """Return the facts of each fingerprint's folder, last used first. Raises OSError."""
    found = []
    for each in Path(path).iterdir():
        try:
            about = json.loads((each / _ABOUT).read_bytes())
            sizes = [(file.stat().st_blocks * 512, file.stat().st_mtime) for file in each.iterdir()]
        except (OSError, ValueError):
            continue
        nbytes, used = sum(size for size, _ in sizes), max(when for _, when in sizes)
        found.append(FolderFacts(each.name, str(about.get("model", "?")), nbytes, _blocks(each), used))
    return sorted(found, key=lambda facts: -facts.used)


def delete(path: str | os.PathLike[str], name: str) -> None:
    """Delete the folder of a fingerprint. Raises InvalidInput for an unknown name, and while an engine runs."""
    with closing(DiskFolder(path)) as folder:
        if name not in [facts.name for facts in listed(path)]:
            raise InvalidInput(f"{path} has no folder {name!r}: without a name, its folders are listed")
        shutil.rmtree(folder.path / name)


def _blocks(folder: Path) -> int:
    if not (folder / "index.sqlite3").exists():
        return 0
    try:
        with closing(Index(folder / "index.sqlite3", writes=False)) as index:
            return len(index)
    except sqlite3.Error:
        return 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _network(path: Path) -> str | None:
    """Return the type of a folder's file system if it is a network file system."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return None
    above = [(len(place), kind) for place, kind in mounts if path.is_relative_to(place)]
    kind = max(above, default=(0, ""))[1]
    return kind if kind.startswith(_NETWORK) else None
