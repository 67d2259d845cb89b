"""Read the recurrent state of a hybrid model from its config.json: the kinds of its layers, and the size of each state.

The sizes follow transformers' mixers, which keep as many columns of a convolution as its kernel has, in the dtype
of the weights, and recurrent states in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from radixkv.sizing.kv_size import LayerState

Config = Mapping[str, Any]

LAYER_KINDS = {
    **dict.fromkeys(("linear_attention", "mamba", "conv"), (None, True)),
    **dict.fromkeys(("moe", "mlp"), (None, False)),
    **dict.fromkeys(("hybrid", "hybrid_attention"), ("full_attention", True)),
}
"""The attention of a layer type, None for no attention, and whether the layer keeps state."""

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H


def is_hybrid(config: Config) -> bool:
    """Return whether the sizes of this model type's states are known."""
    return str(config.get("model_type")) in _STATES


def layer_kinds(config: Config, count: int) -> list[str]:
    """Return the type of each of `count` layers of a hybrid model whose config does not list them; or ValueError."""
    try:
        return _kinds(config, count)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"it does not state which of its layers attend: {error}") from error


def _kinds(config: Config, count: int) -> list[str]:
    if pattern := config.get("hybrid_override_pattern"):
        return [_PATTERN.get(each, each) for each in pattern]
    parts = config.get("linear_attn_config") or {}
    if "kda_layers" in parts:  # counted from 1
        return ["linear_attention" if at in parts["kda_layers"] else "full_attention" for at in range(1, count + 1)]
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * count
    if "attn_layer_indices" in config:
        return _at(config["attn_layer_indices"] or (), "linear_attention", count)
    if "full_attn_idxs" in config:
        return _at(config["full_attn_idxs"], "conv", count)
    interval = config.get("full_attention_interval", config.get("layer_group_size", 4))
    return ["linear_attention" if at % interval else "full_attention" for at in range(1, count + 1)]


def _at(attention: Any, other: str, count: int) -> list[str]:
    """Return a list of `other` with attention at some indices."""
    return ["full_attention" if at in attention else other for at in range(count)]


def layer_state(config: Config) -> LayerState:
    """Return the state that each layer with state keeps. Raises ValueError if the config lacks a number."""
    try:
        return _STATES[config["model_type"]](config)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it states no size of its recurrent state: {error}") from error


def _delta_net(config: Config) -> LayerState:
    """Return the state of a gated delta net (Qwen3.5, Qwen3-Next, OLMo hybrid)."""
    heads = config.get("num_attention_heads")
    keys, values = (_whole(config, f"linear_num_{kind}_heads", heads) for kind in ("key", "value"))
    key_dim = _whole(config, "linear_key_head_dim", 3 * _whole(config, "hidden_size") // (4 * keys))
    value_dim = _whole(config, "linear_value_head_dim", 2 * key_dim)
    channels = 2 * keys * key_dim + values * value_dim
    return LayerState(channels * _whole(config, "linear_conv_kernel_dim", 4), values * key_dim * value_dim)


def _kimi_delta(config: Config) -> LayerState:
    """Return the state of Kimi's delta attention: convolutions of queries, keys and values, and a matrix per head."""
    own = config.get("linear_attn_config") or {}
    heads = _whole(own, "num_heads", config.get("linear_num_heads", config.get("num_attention_heads")))
    dim = _whole(own, "head_dim", config.get("linear_head_dim", config.get("head_dim")))
    kernel = config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4))
    return LayerState(3 * heads * dim * _whole(own, "short_conv_kernel_size", kernel), heads * dim * dim)


def _short_convolution(config: Config) -> LayerState:
    """Return the state of LFM's convolution: the last columns of the hidden states."""
    return LayerState(_whole(config, "hidden_size") * _whole(config, "conv_L_cache", 3), 0)


def _mamba(heads: str, dim: str, state: str, groups: str, kernel: str) -> Callable[[Config], LayerState]:
    """Return a function for Mamba-2, whose fields have these names in a family."""

    def size(config: Config) -> LayerState:
        if type(config.get(dim)) is int:
            width = _whole(config, heads) * _whole(config, dim)
        else:  # "auto"
            expanded = _whole(config, "mamba_expand", 2) * _whole(config, "hidden_size")
            width = _whole(config, "mamba_d_ssm", expanded)
        channels = width + 2 * _whole(config, groups, 1) * _whole(config, state)
        return LayerState(channels * _whole(config, kernel, 4), width * _whole(config, state))

    return size


def _whole(config: Config, field: str, default: Any = None) -> int:
    """Return a field of a config, or the default, an int above 0. Raises ValueError for anything else."""
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{field} is {value!r}, not a whole number above 0 and below 2**31")
    return value


_USUAL = _mamba("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_STATES: dict[str, Callable[[Config], LayerState]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _delta_net),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _kimi_delta),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_convolution),
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), _USUAL),
    "zamba2": _mamba("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
    "nemotron_h": _mamba("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
}
