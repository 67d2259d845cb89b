"""Compare logits that were computed in two ways, within the rounding of each dtype, and compute with float32 weights.

Weights are widened layer by layer, so that only one layer takes the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Allowed root-mean-square error relative to the logits' spread. Rounding gives 1e-6 in float32, up to 6e-2 in 16 bits;
an architecture that runs incorrectly is off by 1e-1 and more. (float64 is loose because many models mix in float32.)"""


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the root-mean-square difference over the spread of `expected`; NaN if either has a NaN."""
    logits, expected = logits.double(), expected.double()
    spread = (expected - expected.mean()).square().mean().sqrt().clamp_min(1e-12)
    return float((logits - expected).square().mean().sqrt() / spread)


def agree(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether both are equal up to the rounding of a model in `dtype`; NaN never is.

    Products of float32 that may round to TF32, which has as many bits as float16, are compared as float16.
    """
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16
    return relative_error(logits, expected) <= TOLERANCE.get(dtype, 1e-1)


# ---- weights and products in float32


@contextmanager
def full_precision() -> Iterator[None]:
    """Round no product of float32 to TF32 while this is open: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 lets them all."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def widened(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Hold these parameters in float32 while this is open; afterwards they lie where they were."""
    layer = _Layer(list(parameters))
    layer.widen()
    try:
        yield
    finally:
        layer.restore()


@contextmanager
def widened_by_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Hold the parameters of `dtype` in float32 during the forward of their layer, while this is open.

    A layer is a member of an outermost list of modules; outside of these, each module with parameters of its own is
    one. Afterwards the parameters lie where they were. A forward costs a conversion of all weights. Models that read a
    weight outside of its layer's forward fail by mixed dtypes.
    """
    with ExitStack() as hooks:
        for module, parameters in _layers(model):
            layer = _Layer([each for each in parameters if each.dtype == dtype])
            hooks.callback(module.register_forward_pre_hook(layer.widen).remove)
            hooks.callback(module.register_forward_hook(layer.restore, always_call=True).remove)
        yield


class _Layer:
    """The parameters of one layer, and their tensors while they are widened."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def widen(self, *_: Any) -> None:
        """Replace the tensors by copies in float32."""
        self._narrow = [(each, _exchange(each, each.detach().float())) for each in self._parameters]

    def restore(self, *_: Any) -> None:
        """Put the tensors back."""
        for parameter, tensor in self._narrow:
            _exchange(parameter, tensor)
        self._narrow = []


def _exchange(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Give a parameter another tensor, and return its own."""
    if not hasattr(parameter, "placements"):
        before, parameter.data = parameter.data, tensor
        return before
    other = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call] # `data` of a rank's part is a copy
    return other


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield each layer with its parameters."""
    if own := list(module.parameters(recurse=False)):
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((each, list(each.parameters())) for each in child)
        else:
            yield from _layers(child)
