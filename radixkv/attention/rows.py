"""Some of a step's query rows: read and written in place where they are adjacent."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Rows:
    """Row indices [n], all different, on a device."""

    def __init__(self, rows: NDArray[np.int64], device: torch.device) -> None:
        """Notice whether the rows are one range, in order."""
        self.count = len(rows)
        adjacent = self.count > 0 and bool((rows == rows[0] + np.arange(self.count)).all())
        self.start = int(rows[0]) if adjacent else None
        self.index = torch.from_numpy(rows).to(device)

    def __len__(self) -> int:
        """How many rows these are."""
        return self.count

    def covers(self, total: int) -> bool:
        """Whether these are all the rows of a step that has `total`, in order."""
        return self.start == 0 and self.count == total

    def pick(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor [T, ...]; a view if they are adjacent."""
        if self.covers(len(tensor)):
            return tensor
        return tensor.index_select(0, self.index) if self.start is None else tensor.narrow(0, self.start, self.count)

    def add(self, total: Tensor, output: Tensor, share: Tensor) -> None:
        """Add output [n, kv_heads, group, dv], weighed by share [n, kv_heads, group], to these rows of `total`."""
        if self.start is None:
            total.index_add_(0, self.index, output * share[..., None])
        else:
            total.narrow(0, self.start, self.count).addcmul_(output, share[..., None])
