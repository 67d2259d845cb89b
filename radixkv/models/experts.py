"""Let steps of models with experts be recorded where transformers' grouped product would wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixkv.device import device_of
from radixkv.models.loaded import LoadedModel

MOST_TOKENS = 8
"""Tokens of a step whose experts are gathered: a copy of the weights of each chosen expert for each token."""


@contextmanager
def recordable(loaded: LoadedModel, tokens: int) -> Iterator[None]:
    """Compute experts without a wait for the device while this is open, if the step has few `tokens`.

    torch's `grouped_mm` reads the number of tokens of each expert on the host, except in bfloat16 on sm_90 and sm_100
    (torch 2.13, GroupedMMUtils.h). In its place `batched_mm` gathers the experts' weights, which costs one more read
    and one write of them.
    """
    model: Any = loaded.model
    swap = tokens <= MOST_TOKENS and grouped_mm_waits(loaded) and hasattr(model, "get_experts_implementation")
    before = model.get_experts_implementation() if swap else {}
    if "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def grouped_mm_waits(loaded: LoadedModel) -> bool:
    """Return whether the experts' product waits for the GPU in each layer."""
    device = device_of(loaded.device)
    if loaded.num_experts < 2 or not device.is_gpu:
        return False
    return loaded.dtype != torch.bfloat16 or device.properties().generation not in (9, 10)
