"""Make layers of our own around the parameters of a transformers model that the caller has built.

Both models then have the same parameters, and the caller's model stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from radixkv.models.architecture import is_plain
from radixkv.models.attention_interface import ForwardSignature, own_attention
from radixkv.models.native.files import empty_model
from radixkv.models.native.layers import NativeModel, Rotary
from radixkv.models.rounding import agree

_log = logging.getLogger(__name__)
_TOKENS = 5
_OWN_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def borrowed(model: Any) -> NativeModel | None:
    """Return layers of our own around a model's parameters; None if it is not listed, or computes something else.

    A model with hooks, replaced forwards or modules of other packages is not listed. Costs two forwards of five tokens.
    """
    parameters = dict(model.named_parameters())
    dtypes = {each.dtype for each in parameters.values()}
    if len(dtypes) != 1 or not all(map(_is_known, model.modules())):
        return None
    native = empty_model(model.config.to_diff_dict(), dtypes.pop())
    if native is None:
        return None
    shapes = {name: each.shape for name, each in native.named_parameters()}
    if shapes != {name: each.shape for name, each in parameters.items()}:
        return None
    for owner, key, name in _places(native):
        owner[key] = model.get_parameter(name)
    native.model.rotations.to(model.device, torch.promote_types(model.dtype, torch.float))
    _take_buffers(native, model)
    native.generation_config = model.generation_config
    vars(native.config).update({name: getattr(model.config, name) for name in _OWN_TOKENS})
    if not _agree(native.eval(), model):
        _log.debug("%s computes something else than the layers of radixkv", type(model).__name__)
        return None
    return native


def _is_known(module: Any) -> bool:
    """Return whether a module is one of torch or transformers, without hooks, and in the mode for answers."""
    home = type(module).__module__
    return is_plain(module) and not module.training and home.startswith(("torch.nn.modules.", "transformers."))


def _places(native: NativeModel) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield dictionary, key and name of each parameter; a tied weight has two."""
    for prefix, module in native.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module._parameters, key, f"{prefix}.{key}"


def _take_buffers(native: NativeModel, model: Any) -> None:
    """Take the model's own frequencies and its scale of embeddings, which may have been rounded or changed.

    Five tokens would not show that. LongRoPE keeps the choice that was made here.
    """
    decoder = model.base_model
    if (scale := decoder.embed_tokens._buffers.get("embed_scale")) is not None:
        native.switches = replace(native.switches, embedding_scale=scale.item())
    held = decoder.rotary_emb._buffers
    names = ("full_attention_inv_freq", "sliding_attention_inv_freq")
    for own, name in zip(native.model.rotations.values(), names, strict=False):
        found = held.get("inv_freq", held.get(name))
        if isinstance(own, Rotary) and own.rotation.kind != "longrope" and found is not None:
            own.frequencies = found


@torch.inference_mode()
def _agree(native: NativeModel, model: Any) -> bool:
    """Return whether both give the same logits for a few tokens."""
    tokens = torch.arange(_TOKENS, device=model.device) % native.switches.vocabulary
    with own_attention(model):
        expected = ForwardSignature.of(model).logits(model, tokens, tokens, use_cache=False)
    return agree(native(tokens[None]).logits[0], expected, expected.dtype)
