"""Read the limits of a transformers model from its class and configuration.

`max_length` and `window_limit` read the configuration. `check_supported` refuses models that keep other things than
keys, values and recurrent states. Nothing here runs a model to find out whether it keeps to its configuration: `probe`
and `selftest` do.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from radixkv.errors import UnsupportedModel
from radixkv.models.attention_interface import ForwardSignature
from radixkv.models.recurrent.mixers import has_mixers

_UNLIMITED = 1 << 30  # the context of a model that names no limit
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # a model has one of them, or none
_REACHES = ("sliding_window", "attention_chunk_size", "window_size")


def max_length(model: Any) -> int:
    """Return the longest sequence in tokens that the positions allow and in which the model attends to all keys.

    Beyond `keep_window_size` keys, Doge drops keys by a score that equal tokens share, so the choice depends on how the
    prompt was cut. BigBird skips most keys of longer sequences, but only if it has seen no shorter one before.
    """
    config = model.config.get_text_config()
    positions = min(int(found) for name in _POSITIONS if (found := getattr(config, name, None) or _UNLIMITED) > 0)
    limits = [positions - ForwardSignature.of(model).first_position, getattr(config, "keep_window_size", None)]
    if getattr(config, "attention_type", None) == "block_sparse" and hasattr(model.base_model, "set_attention_type"):
        limits.append((5 + 2 * config.num_random_blocks) * config.block_size)
    return min(int(limit) for limit in limits if limit)


def window_limit(config: Any, kind: str | None = None) -> int | None:
    """Return the window of layers of this kind in tokens, their own included; None without a limit.

    Without a kind, return the window of the layers that see least.
    """
    if kind == "full_attention" or getattr(config, "use_sliding_window", None) is False:
        return None
    found = [getattr(config, name, None) for name in _REACHES]
    return max((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)


def unlisted_window(config: Any, listed: set[int]) -> int | None:
    """Return a window that the configuration names although no layer kind has it; None if it is in `listed`."""
    kinds = set(getattr(config, "layer_types", None) or ())
    limit = None if kinds else window_limit(config)
    return None if limit in listed else limit


# The attention of each layer type; None for layers without. Other types select keys by an index, or compress them.
_ATTENTION = {
    **{kind: kind for kind in ("full_attention", "sliding_attention", "chunked_attention")},
    **dict.fromkeys(("linear_attention", "conv", "mamba", "moe", "mlp"), None),
    "attention": "full_attention",
    "hybrid": "full_attention",  # and a recurrent state
    "hybrid_sliding": "sliding_attention",
}
_STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")


def attention_kinds(config: Any) -> list[str]:
    """Return the layer types of the layers with attention, in order; empty if the configuration lists no types."""
    kinds = getattr(config, "layer_types", None) or ()
    return [kind for kind in (_ATTENTION.get(each, each) for each in kinds) if kind is not None]


def check_supported(model: Any) -> None:
    """Raise UnsupportedModel, with the reason, for a model that stores anything that radixkv cannot keep.

    It keeps keys and values of each token, and recurrent states that go through transformers' cache of states.
    """
    kind, config = kind_of(model), model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder; radixkv runs decoders")
    config = config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedModel(f"{kind} attends to something else than its text, too; radixkv runs decoders")
    if getattr(config, "index_topk", None):
        raise UnsupportedModel(f"{kind} picks the keys that it attends to by an index, which the pool does not keep")
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(types - _ATTENTION.keys()):
        raise UnsupportedModel(f"{kind} has layers of type {', '.join(unknown)}")
    stateful = getattr(model, "_is_stateful", False) or types & {*_STATEFUL}
    if stateful and not has_mixers(model):
        raise UnsupportedModel(f"{kind} has recurrent state that does not go through transformers' cache of states")


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has no hooks, and the forward of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def kind_of(model: Any) -> str:
    """Return the name of a model's architecture, for messages: its class, or what layers of our own stand for."""
    found: str = getattr(model, "kind", None) or type(model).__name__
    return found


def short_error(error: Exception) -> str:
    """Return the type of an error that a model raised, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
