"""Let transformers compute in float64 where it always uses float32.

Softmaxes, norms and routers convert to float32, which is narrower than float64: their rounding would hide small errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _kept(tensor: Tensor, dtype: Any) -> bool:
    """Return whether a cast would lose half of a float64's bits."""
    return tensor.dtype == torch.float64 and dtype == torch.float32


@contextmanager
def exact() -> Iterator[None]:
    """Keep float64 from being narrowed to float32, on all threads, while this is open."""
    own = {(owner, name): getattr(owner, name) for owner, name in _WIDE}
    for (owner, name), wide in _WIDE.items():
        setattr(owner, name, wide(own[owner, name]))
    try:
        yield
    finally:
        for (owner, name), function in own.items():
            setattr(owner, name, function)


def _to(own: Any) -> Any:
    """Wrap `Tensor.to`, whose dtype may be a keyword or any of its arguments."""

    def to(self: Tensor, *args: Any, **options: Any) -> Any:
        dtype = options.get("dtype", next((each for each in args if isinstance(each, torch.dtype)), None))
        if not _kept(self, dtype):
            return own(self, *args, **options)
        others = [each for each in args if not isinstance(each, torch.dtype)]
        options.pop("dtype", None)
        return own(self, *others, **options) if others or options else self

    return to


def _type(own: Any) -> Any:
    """Wrap `Tensor.type`."""
    return lambda self, dtype=None, **options: self if _kept(self, dtype) else own(self, dtype, **options)


def _float(own: Any) -> Any:
    """Wrap `Tensor.float`."""
    return lambda self, *args: self if self.dtype == torch.float64 else own(self, *args)


def _softmax(own: Any) -> Any:
    """Wrap a softmax, which may convert its input first."""
    return lambda x, *args, dtype=None, **options: own(x, *args, dtype=None if _kept(x, dtype) else dtype, **options)


_WIDE: dict[tuple[Any, str], Any] = {
    (Tensor, "to"): _to,
    (Tensor, "type"): _type,
    (Tensor, "float"): _float,
    (Tensor, "softmax"): _softmax,
    (functional, "softmax"): _softmax,
    (functional, "log_softmax"): _softmax,
}
