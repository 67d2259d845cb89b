"""Read the sizes and options of a Llama-like model: biases, norms, scales, windows and rotary embeddings.

`TYPES` lists the fields that each type of model may have, with transformers' defaults. A configuration with any other
field, or with a value that no test has compared with transformers' model, has no `Switches`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from radixkv.models.native.rotary import KINDS, Rotation


@dataclass(frozen=True)
class Switches:
    """The sizes of a model and the options of its arithmetic. `windows` and `rotation_of` have an entry per layer.

    `stacked`: one projection for queries, keys and values, and one for gate and up. `sandwich`: norms after attention
    and MLP, too. With `norm_offset`, norms scale by one plus their weight. `rotation_of` is the number of the layer's
    entry in `rotations`; None for a layer that rotates nothing.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    scale: float
    embedding_scale: float
    residual_scale: float
    logits_divisor: float
    softcap: float | None
    logits_softcap: float | None
    windows: tuple[int | None, ...]
    rotations: tuple[Rotation, ...]
    rotation_of: tuple[int | None, ...]
    activation: str = "silu"
    head_norms: bool = False
    stacked: bool = False
    sandwich: bool = False
    norm_offset: bool = False


class NotListed(Exception):
    """A configuration has a field or a value that is in no table; the text names it."""


_REQUIRED: Any = object()
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_COMMON = {
    **dict.fromkeys(_SIZES, _REQUIRED),
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0,
    "partial_rotary_factor": None, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN = {
    **_COMMON, "num_key_value_heads": 32, "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {
    **_COMMON, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
TYPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, **_BIASES},
    "mistral": {**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "smollm3": {
        **_COMMON, **_BIASES, "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "pad_token_id": 128004,
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "granite": {
        **_COMMON, **_BIASES, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "phi3": {
        **_COMMON, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None,
        "eos_token_id": 32000, "pad_token_id": 32000,
    },
    "gemma": {**_GEMMA, "num_key_value_heads": 16},
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **{name: value for name, value in _GEMMA2.items() if name != "attn_logit_softcapping"},
        "rope_local_base_freq": 10_000.0, "rope_theta": 1_000_000.0, "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
}  # fmt: skip
"""The fields of each type that may change logits, by `model_type`, with the defaults of transformers."""

_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        (
            "model_type", "architectures", "attention_dropout", "resid_pdrop", "embd_pdrop", "dtype", "torch_dtype",
            "initializer_range", "transformers_version", "use_cache", "_name_or_path", "name_or_path",
            "pretraining_tp", "is_llama_config", "transformers.js_config", "tokenizer_class", "unsloth_fixed",
            "cache_implementation", "_sliding_window_pattern",
        )
    ),
    "rope_interleaved": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False, None),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_mrope": (False,),
    "attn_logit_softcapping": (None,),
}  # fmt: skip
"""Fields that no listed type reads, and with which values. None: with any value."""
_GEMMA_LAYERS = {"activation": "gelu_pytorch_tanh", "norm_offset": True}
_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_norms": True},
    "phi3": {"stacked": True},
    "gemma": _GEMMA_LAYERS,
    "gemma2": {**_GEMMA_LAYERS, "sandwich": True},
    "gemma3_text": {**_GEMMA_LAYERS, "sandwich": True, "head_norms": True},
}
"""The switches that all models of a type share, unless they have their defaults."""

_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window", "original_max_position_embeddings")
_OTHER_SIZES = ("sliding_window_pattern", "no_rope_layer_interval")
_NUMBERS = (
    "rms_norm_eps", "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "rope_theta", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip
_VALUE_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys((*_SIZES, *_OTHER_SIZES, "max_window_layers", "pretraining_tp"), (int,)),
    **dict.fromkeys((*_OPTIONAL_SIZES, "bos_token_id", "pad_token_id"), (int, NoneType)),
    **dict.fromkeys(_NUMBERS, (float, int, NoneType)),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), (float,)),
    **dict.fromkeys(("tie_word_embeddings", "use_cache"), (bool,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), (bool, NoneType)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict, NoneType)),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list, NoneType)),
}
"""The types of the fields' values; transformers reports others."""
_LIMITS = {
    **dict.fromkeys((*_SIZES, *_OPTIONAL_SIZES, *_OTHER_SIZES), 2**31),
    **dict.fromkeys(_NUMBERS, math.inf),
}
"""Fields whose values are above 0, and below this."""


def switches_of(config: Mapping[str, Any]) -> Switches:
    """Return the switches of a configuration, as `config.json` of transformers has it. Raises NotListed."""
    kind = str(config.get("model_type"))
    if kind not in TYPES:
        raise NotListed(f"model_type {kind!r}")
    usual = TYPES[kind]
    for name, value in config.items():
        allowed = _WITHOUT_EFFECT.get(name, ())
        if name not in usual and allowed is not None and value not in allowed:
            raise NotListed(f"{name}={value!r}")
    try:
        return _read(kind, {name: _checked(name, value) for name, value in {**usual, **config}.items()})
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # of values of another kind than usual
        raise NotListed(f"{type(error).__name__}: {error}") from error


def _checked(name: str, value: Any) -> Any:
    """Return the value of a field, as a float where it is a number; raises NotListed for another type or range."""
    if name in _VALUE_TYPES and type(value) not in _VALUE_TYPES[name]:
        raise NotListed(f"{name}={value!r}")
    if name in _LIMITS and value is not None and not 0 < value < _LIMITS[name]:
        raise NotListed(f"{name}={value!r}")
    return float(value) if name in _NUMBERS and value is not None else value


def _read(kind: str, fields: Mapping[str, Any]) -> Switches:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    padding = fields["pad_token_id"]
    if padding is not None and not -1 <= padding < fields["vocab_size"]:
        raise NotListed("a padding token beyond the vocabulary")
    kv_heads = fields["num_key_value_heads"] or heads
    head_dim = fields["head_dim"] or hidden // heads
    if hidden % heads or heads % kv_heads or head_dim % 2:
        raise NotListed(f"{heads} heads and {kv_heads} KV heads of {head_dim} numbers, of {hidden}")
    layers = _LAYERS.get(kind, {})
    activation = fields["hidden_activation" if "sandwich" in layers else "hidden_act"]
    if activation != layers.get("activation", "silu"):
        raise NotListed(f"hidden_act={activation!r}")
    windows = _windows(kind, fields)
    rotations, rotation_of = _rotations(kind, fields, head_dim, windows)
    bias = fields.get("attention_bias") or False
    return Switches(
        vocabulary=fields["vocab_size"],
        hidden=hidden,
        intermediate=fields["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        epsilon=fields["rms_norm_eps"],
        tied=fields["tie_word_embeddings"],
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=fields.get("mlp_bias") or False,
        scale=fields.get("attention_multiplier") or (fields.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if kind.startswith("gemma") else fields.get("embedding_multiplier") or 1.0,
        residual_scale=fields.get("residual_multiplier") or 1.0,
        logits_divisor=fields.get("logits_scaling") or 1.0,
        softcap=fields.get("attn_logit_softcapping"),
        logits_softcap=fields.get("final_logit_softcapping"),
        windows=windows,
        rotations=rotations,
        rotation_of=rotation_of,
        **layers,
    )


# ---- options of single layers


_MOST_LAYERS = 4096


def _windows(kind: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer, None for layers that see all tokens."""
    count, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if count > _MOST_LAYERS:
        raise NotListed(f"{count} layers")
    if pattern := 2 if kind == "gemma2" else fields.get("sliding_window_pattern"):
        sliding = [number % pattern > 0 for number in range(1, count + 1)]
    elif kind in ("mistral", "phi3"):
        sliding = [window is not None] * count
    else:
        window = window if fields.get("use_sliding_window") else None
        sliding = [window is not None and layer >= fields["max_window_layers"] for layer in range(count)]
    if (kinds := fields.get("layer_types")) is not None:
        if len(kinds) != count or not {*kinds} <= {"full_attention", "sliding_attention"}:
            raise NotListed(f"layer_types={kinds!r}")
        sliding = [each == "sliding_attention" for each in kinds]
    if any(sliding) and window is None:
        raise NotListed("layers with a window of no size")
    return tuple(window if slides else None for slides in sliding)


def _rotations(
    kind: str, fields: Mapping[str, Any], head_dim: int, windows: Sequence[int | None]
) -> tuple[tuple[Rotation, ...], tuple[int | None, ...]]:
    """Return the distinct rotations of a model, and the number of each layer's."""
    stated, older, base = fields["rope_parameters"], fields["rope_scaling"] or {}, fields["rope_theta"]
    if kind == "gemma3_text":
        # transformers merges both, ignores the older name of a type there, and does not find `truncate`.
        if older and (stated is not None or "rope_type" not in older):
            raise NotListed(f"rope_scaling={older!r}")
        stated = stated or {"full_attention": older}
        if not {*stated} <= {"full_attention", "sliding_attention"} or any(
            "truncate" in (each or {}) for each in stated.values()
        ):
            raise NotListed(f"rope_parameters={stated!r}")
        full = _rotation(kind, fields, head_dim, stated.get("full_attention") or {}, base)
        local = stated.get("sliding_attention") or {}
        near = _rotation(kind, fields, head_dim, local, fields["rope_local_base_freq"])
        return (full, near), tuple(0 if window is None else 1 for window in windows)
    rotations = (_rotation(kind, fields, head_dim, older or stated or {}, base),)
    if kind != "smollm3":
        return rotations, (0,) * len(windows)
    rotates = fields["no_rope_layers"]
    if rotates is None:
        rotates = [number % fields["no_rope_layer_interval"] for number in range(1, len(windows) + 1)]
    return rotations, tuple(0 if rotates[layer] else None for layer in range(len(windows)))


def _rotation(kind: str, fields: Mapping[str, Any], head_dim: int, stated: Mapping[str, Any], base: float) -> Rotation:
    """Return a rotation from `rope_parameters`, completed from other fields as transformers does."""
    scaling = {name: _checked(name, value) for name, value in {"rope_theta": base, **stated}.items()}
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    if (
        not isinstance(stated.get("rope_type", ""), str)
        or name not in KINDS
        or ((kind == "phi3") != (name == "longrope") and name != "default")
    ):
        raise NotListed(f"rope_type={name!r}")
    others = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    if unknown := stated.keys() - {*KINDS[name]} - others:
        raise NotListed(f"rope_parameters with {min(unknown)}")
    part = scaling.get("partial_rotary_factor") or fields["partial_rotary_factor"] or 1.0
    dim = int(head_dim * part)
    if (part != 1.0 and kind != "phi3") or dim % 2 or not 0 < dim <= head_dim:
        raise NotListed(f"partial_rotary_factor={part}")
    context, original = fields["max_position_embeddings"], "original_max_position_embeddings"
    before = fields.get(original) or scaling.get(original) or context
    values = {each: scaling[each] for each in KINDS[name] if scaling.get(each) is not None}
    rotation = Rotation(name, scaling["rope_theta"], dim, context, before, values)
    found, _ = rotation.frequencies()
    if found.shape != (dim // 2,) or not found.isfinite().all():
        raise NotListed(f"{name} frequencies that are not {dim // 2} finite numbers")
    return rotation
