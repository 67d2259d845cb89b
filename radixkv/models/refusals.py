"""What can run neither over the pool nor over a cache seeded from it, told by class and configuration alone.

Knows what kinds of state transformers' models keep. Does not run a model.
"""

from __future__ import annotations

from typing import Any

from radixkv.errors import UnsupportedModel

# A layer of any other type keeps state or picks keys in a way that a pool of keys and values does not reproduce.
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def check(model: Any) -> None:
    """Raise UnsupportedModel, with the reason, for a model that keeps more than keys and values of its own tokens."""
    kind, config = type(model).__name__, model.config
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{kind} has recurrent state, which cannot be shared by prefix")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder; radixkv runs decoders")
    config = config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedModel(f"{kind} attends to something else than its text, too; radixkv runs decoders")
    if getattr(config, "index_topk", None):
        raise UnsupportedModel(f"{kind} picks the keys that it attends to by an index, which the pool does not keep")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(f"{kind} has layers of type {', '.join(unknown)}")


def short(error: Exception) -> str:
    """The kind of an error that a model raised, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
