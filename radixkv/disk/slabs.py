"""Files with slots of one size, for the images of blocks.

A slot is written by one thread, and durable after `sync`. Each read says how much of a slot is there; its checksum is
in the index. The files are opened relative to a checked folder, and are private.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
_SLAB = 256 << 20  # bytes


class Slabs:
    """`num_slots` slots of `image_bytes` in files of up to 256 MiB, in an open folder, whose descriptor it owns."""

    def __init__(self, folder: int, image_bytes: int, num_slots: int) -> None:
        """Remove the slots beyond `num_slots`, which earlier settings left. Raises OSError."""
        self._folder, self._image_bytes = folder, image_bytes
        self.per_slab = max(1, _SLAB // image_bytes)
        self._files: dict[int, int] = {}
        self._removed: list[int] = []  # open until the end: a reader may have one
        self._unsynced: set[int] = set()
        for slab in self._present():
            left = num_slots - slab * self.per_slab
            if left <= 0:
                os.unlink(_name(slab), dir_fd=folder)
            elif left < self.per_slab and os.fstat(self._file(slab, 0)).st_size > left * image_bytes:
                os.ftruncate(self._file(slab, 0), left * image_bytes)

    def read(self, slot: int, image: Image) -> bool:
        """Fill an image; returns whether all of it was there. Any thread may read. Raises OSError."""
        slab, place = divmod(slot, self.per_slab)
        try:
            return os.preadv(self._file(slab, 0), [image.data], place * self._image_bytes) == self._image_bytes
        except FileNotFoundError:
            return False

    def write(self, slot: int, image: Image) -> None:
        """Write an image. Raises OSError, also if the disk has room for a part of it only."""
        slab, place = divmod(slot, self.per_slab)
        file = self._file(slab, os.O_CREAT)
        self._unsynced.add(slab)
        at, rest = place * self._image_bytes, image.data
        while rest:
            written = os.pwrite(file, rest, at)
            at, rest = at + written, rest[written:]

    def sync(self) -> None:
        """Make the written images durable. Raises OSError; then none of them may be counted on."""
        while self._unsynced:
            os.fdatasync(self._file(next(iter(self._unsynced)), 0))
            self._unsynced.pop()
        os.fsync(self._folder)

    def forget_writes(self) -> None:
        """Do not synchronize what was written."""
        self._unsynced.clear()

    def clear(self) -> None:
        """Empty and remove all files; a read of an old one finds nothing. Raises OSError."""
        for slab in self._present():
            with suppress(FileNotFoundError):
                os.truncate(self._file(slab, 0), 0)
                os.unlink(_name(slab), dir_fd=self._folder)
        self._removed += self._files.values()
        self._files = {}
        self._unsynced.clear()

    def free_bytes(self) -> tuple[int, int]:
        """Return the free bytes and the size of the file system. Raises OSError, also if the folder was deleted."""
        if not os.fstat(self._folder).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the folder was deleted")
        found = os.fstatvfs(self._folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def close(self) -> None:
        """Close all files and the folder."""
        for file in (*self._files.values(), *self._removed, self._folder):
            os.close(file)
        self._files, self._removed = {}, []

    def _present(self) -> list[int]:
        names = [name for name in os.listdir(self._folder) if name.startswith("slab-") and name[5:].isdecimal()]
        return sorted(int(name[5:]) for name in names)

    def _file(self, slab: int, create: int) -> int:
        """Open a slab once; two threads that open it at once leave one file open until the end."""
        file = self._files.get(slab)
        if file is None:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | create
            file = self._files.setdefault(slab, os.open(_name(slab), flags, 0o600, dir_fd=self._folder))
        return file


def _name(slab: int) -> str:
    return f"slab-{slab:05d}"
