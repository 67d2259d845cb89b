"""Choose the operators of a model by the place where it runs."""

from __future__ import annotations

from radixkv.models.loaded import LoadedModel
from radixkv.models.native.compiled import CompiledOperators
from radixkv.models.native.layers import NativeModel
from radixkv.models.native.operators import TORCH
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import quantized_weights


def use_operators(loaded: LoadedModel, *, fuse: bool) -> None:
    """Let a native model compute with compiled products if weights have 8 or 4 bits, else in torch."""
    model, library = loaded.model, kernels() if quantized_weights(loaded.model) else None
    assert isinstance(model, NativeModel)
    model.operators = TORCH if library is None else CompiledOperators(model, library)
