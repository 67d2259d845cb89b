"""Build a small random model of every class that AutoModelForCausalLM maps to, in float64.

Fields of configurations are set by name; `overrides` has the other settings that an architecture needs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_parts.overrides import OVERRIDES, VARIANTS

WINDOW = 53
"""Shorter than the trial's prompts, and longer than the self-test's unless a layer names its window."""

CONTEXT = 128
"""The longest sequence: the trial fills it."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff", "d_inner"), 48),
    **dict.fromkeys(("feed_forward_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers",), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 6),  # a decoder of another depth must not matter
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(("max_target_positions",), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers",), 1),
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "rotary_dim": 4,
    "kv_channels": 8,
    "zero_expert_num": 2,
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shape_embed_dim", "pronunciation_embed_dim"), 24),
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), 97),
    **dict.fromkeys(("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"), 32),
    **dict.fromkeys(("o_lora_rank", "router_hidden_size"), 16),
    **dict.fromkeys(("image_token_id", "image_token_index"), 90),  # text may also have them
    **dict.fromkeys(("video_token_id", "video_token_index"), 91),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 92),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""The value of each field, in every configuration that has it, unless an override sets it."""

_IF_SET: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "swa_head_dim"), 16),  # differs from hidden_size / heads
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    "index_topk": 7,  # fewer than a prompt has, or nothing is left out
    "index_n_heads": 2,
    "index_head_dim": 16,
    "attention_chunk_size": WINDOW - 1,  # of whole blocks
    "local_attention": 2 * WINDOW,
    "floor_scale": 16,
    "attn_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("image_size", "position_embedding_size"), 32),
    **dict.fromkeys(("output_proj_dims", "mm_embed_dim", "output_channels", "mlp_dim", "out_hidden_size"), 32),
    "original_max_position_embeddings": CONTEXT,
}
"""The same for fields whose own default is not None; setting them elsewhere would change the architecture."""


class CannotBeBuilt(Exception):
    """transformers itself cannot make a model of this class here; the message has the reason."""


def classes() -> dict[str, tuple[str, ...]]:
    """Return every class that AutoModelForCausalLM maps to, with its model types; sorted by name."""
    found: dict[str, list[str]] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(name if isinstance(name, str) else name[0], []).append(kind)
    return {name: tuple(kinds) for name, kinds in sorted(found.items(), key=lambda item: item[0].lower())}


def variants() -> dict[str, tuple[str, ...]]:
    """Return other architectures of these classes: "CLASS with FEATURE" -> its model type."""
    every = classes()
    return {name: (kind,) for name, (kind, _) in VARIANTS.items() if class_of(name) in every}


def class_of(name: str) -> str:
    """Return the class of a variant's name, or of its own."""
    return name.partition(" with ")[0]


def build(name: str, kinds: tuple[str, ...]) -> Any:
    """Build a random model of a class or variant in float64, the same each time. Raises CannotBeBuilt."""
    fields = dict(VARIANTS[name][1]) if name in VARIANTS else {}
    options = {"attn_implementation": "eager", "experts_implementation": fields.pop("experts_implementation", "eager")}
    try:
        made = config(_kind(kinds), fields)
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(made, **options)
    except MemoryError:
        raise
    except Exception as error:
        raise CannotBeBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if type(model).__name__ != class_of(name):
        raise CannotBeBuilt(f"{kinds[0]} makes a {type(model).__name__}")
    return _spread(model.eval().double())


def _kind(kinds: tuple[str, ...]) -> str:
    """Return the type for text only among the types of a class, else the first."""
    return next((kind for kind in kinds if kind.endswith("_text")), kinds[0])


def config(kind: str, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a small configuration of this model type, with `more` fields."""
    return _small(CONFIG_MAPPING[kind], more)


def _small(kind: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a small configuration of this class with `more` fields, small parts included."""
    fields = {**OVERRIDES.get(kind.model_type, {}), **more}
    for name, part in getattr(kind, "sub_configs_defaults", {}).items():
        fields[name] = _small(_class_of(part), fields.get(name, {}))
    return _make(kind, fields)


def _class_of(part: Any) -> Any:
    """Return the configuration class of a part, which is named directly or by its model type."""
    return part if isinstance(part, type) else CONFIG_MAPPING[part.model_type]


def _make(kind: Any, overrides: dict[str, Any]) -> Any:
    """Return a configuration with small fields, except for `overrides`."""
    fields = _defaults(kind)
    given = {name: SMALL[name] for name in fields if name in SMALL}
    given |= {name: _IF_SET[name] for name in fields if name in _IF_SET and fields[name] is not None}
    if "is_decoder" in fields:
        given["is_decoder"] = True
    if "kv_lora_rank" in fields:
        given["num_key_value_heads"] = SMALL["num_attention_heads"]  # each head has keys of its own, decompressed
    given |= overrides
    return kind(**given)


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a configuration's class."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}


@torch.no_grad()
def _spread(model: Any) -> Any:
    """Give the model large weights, so that attention, gates and routers matter, and all tokens differ."""
    torch.manual_seed(12)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.2)
        elif parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if "sink" in name else 0.1)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0.0, 0.1)
    return model
