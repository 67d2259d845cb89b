"""Read the sizes and options of a Llama-like model: biases, norms, scales, windows and rotary embeddings.

`TYPES` lists the fields that each type of model may have, with transformers' defaults. A configuration with any other
field, or with a value that no test has compared with transformers' model, has no `Switches`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from radixkv.models.native.rotary import KINDS, Rotation

T = TypeVar("T")


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
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    stacked: bool
    sandwich: bool
    norm_offset: bool
    scale: float
    embedding_scale: float
    residual_scale: float
    logits_divisor: float
    softcap: float | None
    logits_softcap: float | None
    windows: tuple[int | None, ...]
    rotations: tuple[Rotation, ...]
    rotation_of: tuple[int | None, ...]


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
_STRICT: Mapping[str, tuple[type, ...]] = {
    "use_cache": (bool,), "initializer_range": (float,), "pretraining_tp": (int,), "rms_norm_eps": (float,),
    "bos_token_id": (int, NoneType), "rope_parameters": (dict, NoneType), "rope_scaling": (dict, NoneType),
}  # fmt: skip
"""Fields whose values of other types transformers refuses: it reports them."""


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
        if type(value) not in _STRICT.get(name, (type(value),)):
            raise NotListed(f"{name}={value!r}")
    try:
        return _read(kind, _Fields({**usual, **config}))
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:  # of values of another kind than usual
        raise NotListed(str(error)) from error


class _Fields:
    """The fields of a configuration, checked when they are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, kind: type[T], usual: Any = None) -> T:
        """Return a field of this type, or `usual` in place of None. An int is also a float, but a bool is no int."""
        value = self._config.get(name)
        value = usual if value is None else value
        if kind is float and type(value) is int:
            return float(value)  # type: ignore[return-value]
        if type(value) is not kind:
            raise NotListed(f"{name}={value!r}")
        return value

    def size(self, name: str, usual: int | None = None) -> int:
        """Return a whole number of at least 1 and below 2**31."""
        if not 0 < (found := self.get(name, int, usual)) < 2**31:
            raise NotListed(f"{name}={found}")
        return found

    def positive(self, name: str, usual: float | None = None) -> float:
        """Return a number above 0."""
        if not (found := self.get(name, float, usual)) > 0.0:
            raise NotListed(f"{name}={found}")
        return found

    def optional(self, name: str) -> float | None:
        """Return a number above 0, or None."""
        return None if self._config.get(name) is None else self.positive(name)

    def raw(self, name: str) -> Any:
        """Return a field as it is; None without it."""
        return self._config.get(name)


def _read(kind: str, fields: _Fields) -> Switches:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if not -1 <= fields.get("pad_token_id", int, -1) < fields.size("vocab_size"):
        raise NotListed("a padding token beyond the vocabulary")
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", hidden // heads)
    if hidden % heads or heads % kv_heads or head_dim % 2:
        raise NotListed(f"{heads} heads and {kv_heads} KV heads of {head_dim} numbers, of {hidden}")
    bias = fields.get("attention_bias", bool, False)
    windows = _windows(kind, fields)
    rotations, rotation_of = _rotations(kind, fields, head_dim, windows)
    return Switches(
        vocabulary=fields.size("vocab_size"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        epsilon=fields.positive("rms_norm_eps"),
        tied=fields.get("tie_word_embeddings", bool),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=fields.get("mlp_bias", bool, False),
        windows=windows,
        rotations=rotations,
        rotation_of=rotation_of,
        **_of_type(kind),
        **_scales(kind, fields, head_dim),
    )


def _of_type(kind: str) -> dict[str, Any]:
    """Return the switches that all models of a type share."""
    gemma = kind.startswith("gemma")
    return {
        "activation": "gelu_pytorch_tanh" if gemma else "silu",
        "head_norms": kind in ("qwen3", "gemma3_text"),
        "stacked": kind == "phi3",
        "sandwich": kind in _SANDWICH,
        "norm_offset": gemma,
    }


_SANDWICH = ("gemma2", "gemma3_text")


def _scales(kind: str, fields: _Fields, head_dim: int) -> dict[str, Any]:
    """Return the scales and caps of a model; refuse another activation than its type's."""
    gemma = kind.startswith("gemma")
    activation = fields.raw("hidden_activation" if kind in _SANDWICH else "hidden_act")
    if activation != _of_type(kind)["activation"]:
        raise NotListed(f"hidden_act={activation!r}")
    multiplier = fields.size("hidden_size") ** 0.5 if gemma else fields.positive("embedding_multiplier", 1.0)
    scale = fields.positive("query_pre_attn_scalar", head_dim) ** -0.5
    return {
        "scale": fields.positive("attention_multiplier", scale),
        "embedding_scale": multiplier,
        "residual_scale": fields.positive("residual_multiplier", 1.0),
        "logits_divisor": fields.positive("logits_scaling", 1.0),
        "softcap": fields.optional("attn_logit_softcapping"),
        "logits_softcap": fields.optional("final_logit_softcapping"),
    }


# ---- options of single layers


_MOST_LAYERS = 4096


def _windows(kind: str, fields: _Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, None for layers that see all tokens."""
    layers = range(fields.size("num_hidden_layers"))
    if len(layers) > _MOST_LAYERS:
        raise NotListed(f"{len(layers)} layers")
    window = None if fields.raw("sliding_window") is None else fields.size("sliding_window")
    if kind in ("mistral", "phi3"):
        return (window,) * len(layers)
    sliding = [False for _ in layers]
    if kind == "gemma2":
        sliding = [(layer + 1) % 2 > 0 for layer in layers]
    elif kind == "gemma3_text":
        sliding = [(layer + 1) % fields.size("sliding_window_pattern") > 0 for layer in layers]
    elif not fields.get("use_sliding_window", bool, False):
        window = None
    else:
        sliding = [window is not None and layer >= fields.get("max_window_layers", int) for layer in layers]
    if (kinds := fields.raw("layer_types")) is not None:
        if len(kinds) != len(layers) or not {*kinds} <= {"full_attention", "sliding_attention"}:
            raise NotListed(f"layer_types={kinds!r}")
        sliding = [each == "sliding_attention" for each in kinds]
    if any(sliding) and window is None:
        raise NotListed("layers with a window of no size")
    return tuple(window if slides else None for slides in sliding)


def _rotations(
    kind: str, fields: _Fields, head_dim: int, windows: Sequence[int | None]
) -> tuple[tuple[Rotation, ...], tuple[int | None, ...]]:
    """Return the distinct rotations of a model, and the number of each layer's."""
    stated = fields.raw("rope_scaling") or fields.raw("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise NotListed(f"rope_parameters={stated!r}")
    base = fields.raw("rope_theta")
    if kind == "gemma3_text":
        nested, older = fields.raw("rope_parameters"), fields.raw("rope_scaling") or {}
        # transformers merges both, ignores the older name of a type there, and does not find `truncate`.
        if older and (nested is not None or "rope_type" not in older):
            raise NotListed(f"rope_scaling={older!r}")
        nested = nested or {"full_attention": older}
        if not {*nested} <= {"full_attention", "sliding_attention"} or any(
            "truncate" in (each or {}) for each in nested.values()
        ):
            raise NotListed(f"rope_parameters={nested!r}")
        local = nested.get("sliding_attention") or {}
        full = _rotation(kind, fields, head_dim, nested.get("full_attention") or {}, base)
        near = _rotation(kind, fields, head_dim, local, fields.raw("rope_local_base_freq"))
        return (full, near), tuple(0 if window is None else 1 for window in windows)
    rotation = _rotation(kind, fields, head_dim, stated, base)
    layers = range(len(windows))
    if kind != "smollm3":
        return (rotation,), (0,) * len(layers)
    interval = fields.size("no_rope_layer_interval")
    rotates = fields.raw("no_rope_layers")
    rotates = [(layer + 1) % interval for layer in layers] if rotates is None else rotates
    if len(rotates) < len(layers):
        raise NotListed(f"no_rope_layers={rotates!r}")
    return (rotation,), tuple(0 if rotates[layer] else None for layer in layers)


def _rotation(kind: str, fields: _Fields, head_dim: int, stated: Mapping[str, Any], base: Any) -> Rotation:
    """Return a rotation from `rope_parameters`, completed from other fields as transformers does."""
    context = fields.size("max_position_embeddings")
    scaling = _Fields({"rope_theta": base, **stated})
    name = scaling.raw("rope_type") or scaling.raw("type") or "default"
    if (
        not isinstance(stated.get("rope_type", ""), str)
        or name not in KINDS
        or ((kind == "phi3") != (name == "longrope") and name != "default")
    ):
        raise NotListed(f"rope_type={name!r}")
    unknown = stated.keys() - KINDS[name] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown - {"original_max_position_embeddings"}:
        raise NotListed(f"rope_parameters with {min(unknown)}")
    part = scaling.get("partial_rotary_factor", float, fields.raw("partial_rotary_factor") or 1.0)
    dim = int(head_dim * part)
    if (part != 1.0 and kind != "phi3") or dim % 2 or not 0 < dim <= head_dim:
        raise NotListed(f"partial_rotary_factor={part}")
    original = fields.raw("original_max_position_embeddings")
    if original is None:
        original = scaling.size("original_max_position_embeddings", context)
    values = {each: scaling.raw(each) for each in KINDS[name] if scaling.raw(each) is not None}
    rotation = Rotation(name, scaling.positive("rope_theta"), dim, context, original, values)
    try:
        found, _ = rotation.frequencies()
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise NotListed(f"{name} frequencies: {error}") from error
    if found.shape != (dim // 2,) or not found.isfinite().all():
        raise NotListed(f"{name} frequencies that are not {dim // 2} finite numbers")
    return rotation
