"""Freeze rotary frequencies that transformers would choose again for each batch.

longrope and dynamic NTK choose their frequencies from the largest position of the whole batch. A short sequence in one
batch with a long one would then change its answer, and cached keys would be wrong for other sequences.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixkv.errors import InvalidInput, UnsupportedModel


def freeze(model: Any, max_length: int) -> list[str]:
    """Fix the frequencies of every rotary module of `model` to those for sequences of up to `max_length` tokens.

    Returns the names of the modules that were changed: their answers for short sequences may differ from transformers'
    answers for a short sequence alone. Raises UnsupportedModel for a module that cannot be frozen.
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
        frequencies = getattr(module, "inv_freq", None)
        if kinds is not None and isinstance(frequencies, torch.Tensor) and not frequencies.isfinite().all():
            raise InvalidInput(f"{name} has frequencies that are not finite: correct rope_theta and rope_parameters")
        if kinds is not None and _is_of_text(module, model) and not _stands_still(module, kinds, max_length):
            raise UnsupportedModel(f"{name} still rotates a token by how long the longest sequence beside it is")
    return frozen


def _is_moving(kind: str) -> bool:
    """Return whether transformers recomputes frequencies of this type in each forward."""
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
            if "long_mscale" in parameters:  # Phimoe chooses between two scales by itself
                parameters["short_mscale"] = parameters["long_mscale"]
    elif max_length > module.original_max_seq_len:
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
            module.config, module.inv_freq.device, seq_len=max_length
        )
    with torch.no_grad():
        module.inv_freq.copy_(frequencies)
    module.rope_type = f"frozen-{kind.replace('dynamic', 'ntk')}"


def _is_of_text(module: Any, model: Any) -> bool:
    """Return whether `module` rotates tokens, and not pieces of images, whose positions have two numbers."""
    return type(getattr(module, "config", None)) is type(model.config.get_text_config())


@torch.no_grad()
def _stands_still(module: Any, kinds: Any, max_length: int) -> bool:
    """Return whether rotations do not depend on a token at the end of the context; True if that cannot be tried."""
    if "position_ids" not in signature(module.forward).parameters:
        return True
    near = (
        torch.arange(4, device=module.inv_freq.device)[None] if hasattr(module, "inv_freq") else torch.arange(4)[None]
    )
    far = torch.cat([near, near.new_full((1, 1), max_length - 1)], dim=1)
    x = torch.zeros(1, 1, 1, device=near.device)
    for kind in kinds if isinstance(kinds, dict) else [None]:
        options = {} if kind is None else {"layer_type": kind}
        single, batched = (module(x, position_ids=positions, **options) for positions in (near, far))
        if not all(torch.equal(a, b[:, :4]) for a, b in zip(_parts(single), _parts(batched), strict=True)):
            return False
    return True


def _parts(rotation: Any) -> list[torch.Tensor]:
    """Return cosines and sines [1, tokens, dim], or complex numbers that are both."""
    return [rotation] if isinstance(rotation, torch.Tensor) else list(rotation)
