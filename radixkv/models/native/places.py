"""Choose the operators of a model by the place where it runs."""

from __future__ import annotations

import logging

from radixkv.device import device_of
from radixkv.models.loaded import LoadedModel
from radixkv.models.native import fused
from radixkv.models.native.compiled import CompiledOperators
from radixkv.models.native.layers import TORCH, NativeModel
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import quantized_weights

_log = logging.getLogger(__name__)


def should_fuse(loaded: LoadedModel) -> bool:
    """Return whether layers should be fused: on a GPU, around attention in Triton."""
    return loaded.attention == "triton" and device_of(loaded.device).is_gpu


def use_operators(loaded: LoadedModel, *, fuse: bool) -> None:
    """Let a native model compute by compiled products if its weights have 8 or 4 bits, and with `fuse` by kernels.

    Else it computes in torch.
    """
    model, library = loaded.model, kernels() if quantized_weights(loaded.model) else None
    assert isinstance(model, NativeModel)
    model.operators = TORCH if library is None else CompiledOperators(model, library)
    if not fuse:
        return
    if (reason := fused.obstacle(model.switches)) is not None:
        _log.info("%s: its layers run in torch: %s", loaded.name, reason)
        return
    try:
        with device_of(loaded.device).current():
            model.operators = fused.FusedOperators(model)
    except RuntimeError as error:  # of memory, or of parameters that cannot be moved
        _log.warning("%s: its layers run in torch: %s: %s", loaded.name, type(error).__name__, error)


def is_fused(model: object) -> bool:
    """Return whether the layers of a model are fused."""
    return isinstance(model, NativeModel) and isinstance(model.operators, fused.FusedOperators)
