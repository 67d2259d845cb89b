"""Check in the interpreter that kernels read and write only inside the tensors that a launch is given.

The interpreter itself reads any address. Of two overlapping tensors, the union counts. A mask leaves addresses out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel reads or writes outside of its tensors."""


def _extents(arguments: list[Any]) -> NDArray[np.int64]:
    """Return the first byte and the byte after the last of each tensor, ascending and disjoint: [n, 2]."""
    found: list[list[int]] = []
    tensors = [each for each in arguments if isinstance(each, torch.Tensor) and each.numel()]
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _check(extents: NDArray[np.int64], pointers: Any, mask: Any, verb: str) -> None:
    """Raise OutOfBounds unless each address in the mask lies in a tensor, with all of its bytes."""
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    addresses = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data).astype(bool)].astype(np.int64)
    index = np.searchsorted(extents[:, 0], addresses, side="right") - 1
    outside = (index < 0) | (addresses + width > extents[index, 1])
    if outside.any():
        raise OutOfBounds(f"a kernel {verb} {int(outside.sum())} of {len(addresses)} numbers outside of its tensors")


@contextmanager
def checked() -> Iterator[None]:
    """Check all launches while this is open; kernels that find addresses in memory cannot be checked."""
    extents = [np.empty((0, 2), dtype=np.int64)]
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        extents[0] = _extents([*arguments, *named.values()])
        return call(self, *arguments, **named)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(extents[0], pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(extents[0], pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", launched)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        yield
