"""Many arrays of numbers that go to a device in one copy, each to a fixed place.

Knows places and one copy. Does not know what the numbers mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Numbers that each array is padded to: 64 bytes, so that kernels may load 16 of them at a time."""


class Staging:
    """Arrays of at most `sizes` int32 numbers, on the host and on a device."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """Allocate both, zeroed; on the host in pinned memory if the device is a GPU."""
        self._sizes = list(sizes)
        self._starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        with torch.inference_mode(False):  # they are written outside of inference mode, too
            self._here = torch.zeros(self._starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
            self._there = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self._numbers: NDArray[np.int32] = self._here.numpy()
        self._sent = torch.Event(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device, and on the host."""
        return self._here.nbytes

    def wait(self) -> None:
        """Until the last copy is through: what it reads must not change before."""
        if self._sent is not None:
            self._sent.synchronize()

    def put(self, index: int, numbers: NDArray[np.int32]) -> None:
        """Write an array on the host; behind `wait`, before `send`."""
        assert len(numbers) <= self._sizes[index]
        start = self._starts[index]
        self._numbers[start : start + len(numbers)] = numbers

    def send(self, last: int) -> None:
        """Copy everything to the device, of the last array so many numbers; returns before that is through."""
        used = self._starts[-2] + last
        self._there[:used].copy_(self._here[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def there(self, index: int, count: int | None = None) -> Tensor:
        """The first `count` numbers of an array on the device, or all."""
        start = self._starts[index]
        return self._there[start : start + (self._sizes[index] if count is None else count)]
