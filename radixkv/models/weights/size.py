"""Count the bytes of a model's weights."""

from __future__ import annotations

from radixkv.models.loaded import LoadedModel
from radixkv.models.packed import PackedLinear
from radixkv.models.quantized.layers import quantized_weights


def weight_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of the weights in memory; a tied head counts twice if it was repacked."""
    plain = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    packed = sum(repacked(loaded)) * loaded.dtype.itemsize
    return plain + packed + sum(each.nbytes for each in quantized_weights(loaded.model))


def repacked(loaded: LoadedModel) -> list[int]:
    """Return how many numbers each repacked layer has; they are not parameters."""
    return [each.in_features * each.out_features for each in loaded.model.modules() if isinstance(each, PackedLinear)]
