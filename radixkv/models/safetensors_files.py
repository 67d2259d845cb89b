"""Read tensors of safetensors files in pieces.

Files are not mapped, because the pages of a map count as memory of the process.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import InvalidInput

_BUFFER = 1 << 22  # bytes that are read and widened at a time
_OWN_MAP = 1 << 18  # bytes
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class FileTensor:
    """A tensor of a file, read when it is indexed, as a slice of safetensors is."""

    def __init__(
        self, file: BinaryIO, buffer: NDArray[np.uint8], offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> None:
        """Read through `buffer`, which all tensors of a file share."""
        self._file, self._buffer, self._offset = file, buffer, offset
        self._dtype, self._shape = dtype, tuple(shape)

    @property
    def place(self) -> tuple[int, int]:
        """The first byte in the file, and the number of bytes."""
        return self._offset, math.prod(self._shape) * self._dtype.itemsize

    def __getitem__(self, index: object) -> Tensor:
        """Read the whole tensor; floats become float32, a piece at a time."""
        assert index is ...
        found = _empty(self._shape, torch.float32 if self._dtype.is_floating_point else self._dtype)
        self.read_into(found)
        return found

    def read_into(self, found: Tensor) -> None:
        """Read the whole tensor into a contiguous one of this shape and any dtype."""
        flat, step = found.view(-1), len(self._buffer) // self._dtype.itemsize
        self._file.seek(self._offset)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            raw = self._buffer[: len(piece) * self._dtype.itemsize]
            if self._file.readinto(raw.data) != len(raw):  # type: ignore[attr-defined]  # of every file opened for bytes
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


def file_tensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, FileTensor]]:
    """Yield the tensors of a safetensors file, whose header was checked; `stack` closes the file.

    Raises ValueError for an unusual dtype.
    """
    file = stack.enter_context(path.open("rb", buffering=0))
    size, buffer = int.from_bytes(file.read(8), "little"), np.empty(_BUFFER, np.uint8)
    for name, entry in json.loads(file.read(size)).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is stored as {entry['dtype']}")
        offset = 8 + size + entry["data_offsets"][0]
        yield name, FileTensor(file, buffer, offset, DTYPES[entry["dtype"]], entry["shape"])
