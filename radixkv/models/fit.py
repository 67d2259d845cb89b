"""Do the weights in a checkpoint fit the model that its configuration describes, each to each?

Knows names and shapes of weights, and what transformers says of them after loading. Knows no files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.checkpoint import Stored

_log = logging.getLogger(__name__)
_COMPUTED = {"inv_freq", "masked_bias"}  # older files have these, and a model makes them itself
_OF_KV = {"k_scale", "v_scale"}  # of a KV cache in 8 bits, which is not kept
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers")  # layers behind the last, for tokens after the next


def check(model: Any, found: Mapping[str, Any], name: str, tensors: Mapping[str, Stored]) -> None:
    """Refuse a model some of whose weights would be random, or whose files have more layers, biases or norms than it.

    `found` is transformers' loading info. Raises InvalidInput for shapes, UnsupportedModel for names. Weights of parts
    that the model has nothing of (an image tower, say) get one warning.
    """
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


def _check_unused(model: Any, keys: Sequence[str], name: str, tensors: Mapping[str, Stored]) -> None:
    keys = [key for key in keys if not _computed(key, tensors)]
    parts, config = {each for each, _ in model.named_modules()}, model.config.get_text_config()
    # The files of a model without a head leave the first word out.
    needed = [key for key in keys if any(_belongs(k, parts, config) for k in (key, f"{model.base_model_prefix}.{key}"))]
    if needed:
        raise UnsupportedModel(
            f"{name!r}: the model that the configuration describes has no place for {needed[0]}{_more(needed)}, and "
            "would answer otherwise without. If it is meant to, load it with transformers and pass the model"
        )
    if keys:
        _log.warning("%s: %d weights are of parts that it runs without, %s among them", name, len(keys), keys[0])


def _computed(key: str, tensors: Mapping[str, Stored]) -> bool:
    """Whether a tensor is one that models make themselves now, or do without: frequencies, masks, scales of KV."""
    return key.rpartition(".")[2] in _COMPUTED | _OF_KV or (key in tensors and not tensors[key].floating)


def _belongs(key: str, parts: Collection[str], config: Any) -> bool:
    """Whether a weight is of a part that the model has, of one of its layers, or of a layer behind the last."""
    words = key.split(".")
    depth = next(at for at in range(len(words), -1, -1) if ".".join(words[:at]) in parts)
    inside, rest = words[:depth], words[depth:]
    if len(rest) < 2 or any(word.isdigit() for word in inside):
        return True
    return rest[0].isdigit() and not _guesses_ahead(int(rest[0]), config)


def _guesses_ahead(layer: int, config: Any) -> bool:
    """Whether a layer of this number is one behind the last that predicts more tokens at once: decoding needs none."""
    last = int(getattr(config, "num_hidden_layers", 0))
    return any(last <= layer < last + int(getattr(config, name, None) or 0) for name in _AHEAD)


def _shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _more(keys: Collection[Any]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
