"""Compute with the weights of a model in float32, layer by layer, so that only one layer takes the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
        self._narrow = [(each, each.data) for each in self._parameters]
        for parameter, data in self._narrow:
            parameter.data = data.float()

    def restore(self, *_: Any) -> None:
        """Put the tensors back."""
        for parameter, data in self._narrow:
            parameter.data = data
        self._narrow = []


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield each layer with its parameters."""
    if own := list(module.parameters(recurse=False)):
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((each, list(each.parameters())) for each in child)
        else:
            yield from _layers(child)
