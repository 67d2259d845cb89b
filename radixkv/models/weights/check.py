"""Check that the weights of a checkpoint and the model that its configuration describes match one to one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.checkpoint import StoredTensor

_log = logging.getLogger(__name__)
_COMPUTED = {"inv_freq", "masked_bias"}  # in older files; models now compute them
_OF_KV = {"k_scale", "v_scale"}  # of a KV cache in 8 bits, which is not kept
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers")  # layers after the last, for tokens after the next
# Words in the names of parts outside of a decoder's layers: inputs other than text, and outputs other than tokens.
_OUTSIDE = {
    "vision", "visual", "vit", "image", "images", "img", "video", "audio", "speech", "mm", "multi", "modal",
    "multimodal", "connector", "resampler", "projector", "pooler", "mtp", "nextn",
}  # fmt: skip


def check_weights(model: Any, found: Mapping[str, Any], name: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse missing weights, which would be random, and unused weights of layers, biases or norms.

    `found` is transformers' loading info. Raises InvalidInput for wrong shapes and missing experts, UnsupportedModel
    for wrong names and for an unknown quantization method. Unused weights of parts that the model does not have (an
    image tower, for example) cause one warning.
    """
    _check_quantized(model, name)
    _check_experts(name, tensors)
    if found["mismatched_keys"]:
        key, stored, wanted = min(found["mismatched_keys"])
        raise InvalidInput(
            f"{name!r}: {key} has the shape {_shape(stored)} in the files, and the configuration asks for "
            f"{_shape(wanted)}{_more(found['mismatched_keys'])}: the two do not belong together"
        )
    if found["missing_keys"]:
        first = min(found["missing_keys"])
        count = len(found["missing_keys"])
        raise UnsupportedModel(f"{name!r} lacks {count} weights, {first} among them; they would be random")
    _check_unused(model, sorted(found["unexpected_keys"]), name, tensors)


def _check_quantized(model: Any, name: str) -> None:
    """Refuse an unknown quantization method: transformers would skip it and use the stored numbers as weights."""
    stated = getattr(model.config, "quantization_config", None)  # removed again where weights were widened at load
    if stated and getattr(model, "hf_quantizer", None) is None:
        method = stated.get("quant_method") if isinstance(stated, Mapping) else getattr(stated, "quant_method", None)
        raise UnsupportedModel(
            f"{name!r} is quantized by {method!r}, which transformers does not know: what is stored would be taken for "
            "the weights themselves"
        )


def _check_experts(name: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse gaps in the experts' numbers: transformers stacks experts in their order, and would close a gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for key in tensors:
        prefix, found, rest = key.partition(".experts.")
        if found and rest.partition(".")[0].isdecimal():
            numbers[prefix + found].add(int(rest.partition(".")[0]))
    for experts, here in numbers.items():
        missing = next(number for number in range(len(here) + 1) if number not in here)
        if missing < len(here):
            raise InvalidInput(f"{name!r} lacks {experts.lstrip('.')}{missing}, and has {max(here)}: fetch it again")


def _check_unused(model: Any, keys: Sequence[str], name: str, tensors: Mapping[str, StoredTensor]) -> None:
    keys = [key for key in keys if not _computed(key, tensors)]
    parts, config = {each for each, _ in model.named_modules()}, model.config.get_text_config()
    before = f"{model.base_model_prefix}." if _headless(model, tensors) else ""
    needed = [key for key in keys if _belongs(key, parts, config) or _belongs(before + key, parts, config)]
    if needed:
        raise UnsupportedModel(
            f"{name!r}: the model that the configuration describes has no place for {needed[0]}{_more(needed)}, and "
            "would answer otherwise without. If it is meant to, load it with transformers and pass the model"
        )
    if keys:
        _log.warning("%s: %d weights are of parts that it runs without, %s among them", name, len(keys), keys[0])


def _headless(model: Any, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the files belong to the model without a head, whose names lack the first word."""
    weights = {key for key, _ in model.named_parameters()}
    return any(key not in weights and f"{model.base_model_prefix}.{key}" in weights for key in tensors)


def _computed(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether models now compute this tensor themselves or do not need it: frequencies, masks, KV scales."""
    return key.rpartition(".")[2] in _COMPUTED | _OF_KV or (key in tensors and not tensors[key].floating)


def _belongs(key: str, parts: Collection[str], config: Any) -> bool:
    """Return whether a weight belongs to a part that the model has or should have.

    That is a part of a layer, one more layer, or a norm, projection or position table next to the layers. Names that
    contain one of `_OUTSIDE`, and layers that predict later tokens, do not count.
    """
    words = key.split(".")
    depth = next(at for at in range(len(words), -1, -1) if ".".join(words[:at]) in parts)
    inside, rest = words[:depth], words[depth:]
    if len(rest) < 2 or any(word.isdigit() for word in inside):
        return True
    if rest[0].isdigit():
        return not _guesses_ahead(int(rest[0]), config)
    return _holds_layers(inside, parts) and not any(_OUTSIDE & set(word.split("_")) for word in (*inside, rest[0]))


def _holds_layers(inside: Sequence[str], parts: Collection[str]) -> bool:
    """Return whether the outermost part of these contains numbered parts."""
    split = (part.split(".") for part in parts)
    return any(words[:1] == inside[:1] and any(map(str.isdigit, words)) for words in split)


def _guesses_ahead(layer: int, config: Any) -> bool:
    """Return whether this layer follows the last one and predicts later tokens, which decoding does not need."""
    last = int(getattr(config, "num_hidden_layers", 0))
    return any(last <= layer < last + int(getattr(config, name, None) or 0) for name in _AHEAD)


def _shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _more(keys: Collection[Any]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
