"""Read tensors of safetensors files in pieces.

Files are not mapped, because the pages of a map count as memory of the process.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import InvalidInput
from radixkv.models.checkpoint import Checkpoint, StoredTensor

_BUFFER = 1 << 22  # bytes that are read and widened at a time
_OWN_MAP = 1 << 18  # bytes
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class FileTensor:
    """A tensor of an open file, read when it is indexed, as a slice of safetensors is. Any thread may read."""

    def __init__(self, stored: StoredTensor, file: BinaryIO, buffer: NDArray[np.uint8], lock: Lock) -> None:
        """Read through `buffer` under `lock`, which all tensors share. Raises KeyError for an unusual dtype."""
        self._stored, self._file, self._buffer, self._lock = stored, file, buffer, lock
        self._dtype = DTYPES[stored.dtype]

    def __getitem__(self, index: object) -> Tensor:
        """Read the whole tensor; floats become float32, a piece at a time."""
        assert index is ...
        found = _empty(self._stored.shape, torch.float32 if self._dtype.is_floating_point else self._dtype)
        self.read_into(found)
        return found

    def read_into(self, found: Tensor) -> None:
        """Read the whole tensor into a contiguous one of this shape and any dtype."""
        flat, step = found.view(-1), len(self._buffer) // self._dtype.itemsize
        with self._lock:
            self._file.seek(self._stored.piece.offset)
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step]
                raw = self._buffer[: len(piece) * self._dtype.itemsize]
                if self._file.readinto(raw.data) != len(raw):  # type: ignore[attr-defined]  # of files opened for bytes
                    raise InvalidInput(f"{self._file.name} ended within a tensor: fetch or copy it again")
                piece.copy_(torch.from_numpy(raw).view(self._dtype))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without content; a large one in a map of its own, which is returned to the system at its end.

    Hundreds of freed tensors of a few megabytes would remain in malloc's heap, between other memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_MAP:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


@contextmanager
def file_tensors(found: Checkpoint) -> Iterator[dict[str, FileTensor]]:
    """Open the files of a checkpoint, and yield their tensors by name."""
    buffer, lock = np.empty(_BUFFER, np.uint8), Lock()
    with ExitStack() as stack:
        paths = {each.piece.file for each in found.tensors.values()}
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        yield {name: FileTensor(each, files[each.piece.file], buffer, lock) for name, each in found.tensors.items()}
