"""Freeze rotary frequencies that transformers would choose anew for each batch.

longrope and dynamic NTK pick their frequencies from the largest position of the whole batch, so that a short sequence
would change its answer when it runs beside a long one, and cached keys would be wrong for whoever reads them. Knows
transformers' rotary modules; does not know layers or pools.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixkv.errors import UnsupportedModel


def freeze(model: nn.Module, max_length: int) -> list[str]:
    """Fix the frequencies of every rotary module of `model` to those for sequences of up to `max_length` tokens.

    Returns the names of the modules that were changed: their answers for short sequences may differ from what
    transformers computes for a short sequence alone. Raises UnsupportedModel for a module that cannot be frozen.
    """
    frozen = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_moving(kinds):
            _freeze_one(module, name, kinds, max_length)
            frozen.append(name)
        elif isinstance(kinds, dict) and any(_is_moving(kind) for kind in kinds.values()):
            raise UnsupportedModel(
                f"{name} mixes rotary types {sorted(set(kinds.values()))}, some of which depend on the batch"
            )
    return frozen


def _is_moving(kind: str) -> bool:
    """Whether transformers recomputes frequencies of this type in each forward."""
    return "dynamic" in kind or kind == "longrope"


def _freeze_one(module: Any, name: str, kind: str, max_length: int) -> None:
    """Give `module` the frequencies for `max_length`, and a type that transformers leaves alone."""
    if not all(hasattr(module, wanted) for wanted in ("inv_freq", "original_inv_freq", "config")):
        raise UnsupportedModel(f"{name} chooses its rotary frequencies from the batch ({kind}) and cannot be frozen")
    frequencies = module.original_inv_freq
    if kind == "longrope":
        parameters = module.config.rope_parameters
        if max_length > parameters["original_max_position_embeddings"]:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=max_length)
    elif max_length > module.original_max_seq_len:
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
            module.config, module.inv_freq.device, seq_len=max_length
        )
    with torch.no_grad():
        module.inv_freq.copy_(frequencies)
    module.rope_type = f"frozen-{kind.replace('dynamic', 'ntk')}"
