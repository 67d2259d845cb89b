"""Map the architectures of GGUF files to models of transformers: the configuration, and the names of weights.

`ARCHITECTURES` has one row per architecture of llama.cpp. A row is complete: every key and tensor that it does not
mention makes the file unsupported, because ignoring one could change the answers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader
from radixkv.gguf.model_keys import ModelKeys
from radixkv.gguf.rope import (
    FACTORS,
    LONG,
    SHORT,
    llama3_parameters,
    longrope_parameters,
    rope_base,
    rope_parameters,
    stated_scaling,
)

Config = dict[str, Any]

_LAYER = {  # tensors of a layer in most architectures, and the part of transformers' layer that each one belongs to
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture become a model of transformers.

    `complete` sets the fields of the configuration that differ from a Llama's, given the common ones. `layer` has the
    part of transformers' layer by the tensor's name in a layer. `config_tensors` are read into the configuration.
    """

    model_type: str
    complete: Callable[[ModelKeys, Config], None]
    layer: Mapping[str, str]
    interleaved: bool = False  # rows of q and k alternate between the two halves of a head, as llama.cpp rotates them
    norm_offset: float = 0.0  # llama.cpp adds it to the weights of norms
    config_tensors: tuple[str, ...] = ()


def config_of(header: GGUFHeader) -> Config:
    """Return the configuration of a model as `config.json` of transformers has it. Costs no reading of weights.

    Raises UnsupportedModel for an architecture without a row in `ARCHITECTURES`, and for metadata that radixkv does not
    compute exactly; InvalidInput for metadata that are missing or broken.
    """
    row, keys = architecture_of(header), ModelKeys(header)
    if header.value("general.quantization_version", int, 2) != 2:
        raise keys.unsupported("general.quantization_version is not 2")
    hidden = keys.size("embedding_length")
    layers = keys.size("block_count")
    if layers > len(header.tensors):
        raise InvalidInput(
            f"{header.path}: {layers:,} layers in {len(header.tensors):,} tensors: fetch or copy it again"
        )
    vocabulary = _vocabulary(header, hidden)
    config: Config = {
        "model_type": row.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": layers,
        **_heads(header, keys, hidden),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.value("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": float_dtype(header),
        **{f"{name}_token_id": _token(header, key, vocabulary) for name, key in _SPECIAL_TOKENS.items()},
    }
    row.complete(keys, config)
    keys.check_read()
    return config


def _heads(header: GGUFHeader, keys: ModelKeys, hidden: int) -> Config:
    """Return the heads of the attention and their size."""
    heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads or 1)
    if (value_dim := keys.size("attention.value_length", head_dim)) != head_dim:
        raise keys.unsupported(f"keys have {head_dim} numbers a head, values have {value_dim}")
    kv_heads = keys.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise InvalidInput(
            f"{header.path}: {heads} heads cannot share {kv_heads} KV heads evenly: fetch or copy it again"
        )
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def architecture_of(header: GGUFHeader) -> Architecture:
    """Return the row of a file's architecture. Raises UnsupportedModel, with the names of all rows, if it has none."""
    row = ARCHITECTURES.get(header.architecture)
    if row is None:
        raise UnsupportedModel(
            f"{header.path}: radixkv reads no GGUF files of the architecture {header.architecture!r}, only "
            f"{', '.join(sorted(ARCHITECTURES))}: load the safetensors that the file was made from"
        )
    if header.architecture == "llama" and "blk.0.ffn_gate_inp.weight" in header.tensors:
        return _MIXTRAL
    return row


def float_dtype(header: GGUFHeader) -> str:
    """Return the dtype of the weights of layers in 16 or 32 bits, as torch calls it; bfloat16 if any is quantised."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    kinds = {each.type_name for each in header.tensors.values() if len(each.shape) > 1}
    if len(kinds) > 1:
        kinds.discard("F32")  # some converters keep the router of experts in 32 bits
    return names.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


_SPECIAL_TOKENS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}


def _token(header: GGUFHeader, key: str, vocabulary: int) -> int | None:
    """Return a special token; None if there is none, or if it has no row in the embedding."""
    found = header.value(key, int, -1)
    return found if 0 <= found < vocabulary else None


def _vocabulary(header: GGUFHeader, hidden: int) -> int:
    """Return the rows of the embedding, which may be more than the tokenizer has tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel(f"{header.path} has no tensor token_embd.weight, so it holds no whole language model")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise InvalidInput(
            f"{header.path}: token_embd.weight has the shape {list(embedding.shape)}, and embedding_length is "
            f"{hidden:,}: fetch or copy it again"
        )
    return embedding.shape[0]


# ---- what sets an architecture apart


def _llama(keys: ModelKeys, config: Config) -> None:
    tensors = keys.header.tensors
    scaling = stated_scaling(keys)
    if FACTORS in tensors:
        if scaling:
            raise keys.unsupported(f"rotary frequencies are scaled twice, by {FACTORS} and by rope.scaling")
        scaling = llama3_parameters(keys, config["head_dim"], rope_base(keys))
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"], scaling=scaling)
    window = keys.size("attention.sliding_window", 0, least=0)
    if 0 < window < config["max_position_embeddings"]:
        config.update(model_type="mistral", sliding_window=window)
    elif config["model_type"] == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors


def _mixtral(keys: ModelKeys, config: Config) -> None:
    _llama(keys, config)
    config.update(
        model_type="mixtral",
        sliding_window=config.get("sliding_window"),
        **_experts(keys, "num_local_experts"),
    )


def _experts(keys: ModelKeys, field: str) -> Config:
    """Return the number of experts as `field`, and the number of those that run for a token."""
    count, used = keys.size("expert_count"), keys.size("expert_used_count")
    if used > count:
        raise InvalidInput(f"{keys.header.path}: {used} of {count} experts run for each token: fetch or copy it again")
    return {field: count, "num_experts_per_tok": used}


def _qwen2(keys: ModelKeys, config: Config) -> None:
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"])


def _qwen3(keys: ModelKeys, config: Config) -> None:
    _qwen2(keys, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.header.tensors


def _qwen3moe(keys: ModelKeys, config: Config) -> None:
    _qwen3(keys, config)
    chosen = _experts(keys, "num_experts")
    width = config["intermediate_size"] // chosen["num_experts_per_tok"] or 1
    config.update(
        **chosen,
        moe_intermediate_size=keys.size("expert_feed_forward_length", width),
        norm_topk_prob=True,  # llama.cpp always normalises the weights of the chosen experts
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma(keys: ModelKeys, config: Config) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"])


def _gemma2(keys: ModelKeys, config: Config) -> None:
    _scaled_like_gemma(keys, config, hidden_over_heads=46)
    window = keys.size("attention.sliding_window", 4096)
    config.update(
        rope_parameters=rope_parameters(keys, config["head_dim"]),
        sliding_window=window,
        layer_types=_layer_types(config, every=2),
        attn_logit_softcapping=keys.value("attn_logit_softcapping", float, 50.0) or None,
        final_logit_softcapping=keys.value("final_logit_softcapping", float, 30.0) or None,
    )


def _gemma3(keys: ModelKeys, config: Config) -> None:
    _scaled_like_gemma(keys, config, hidden_over_heads=62)
    window = keys.size("attention.sliding_window", 0, least=0)
    local = {"rope_type": "default", "rope_theta": rope_base(keys, "rope.freq_base_swa")}
    config.update(
        rope_parameters={"full_attention": rope_parameters(keys, config["head_dim"]), "sliding_attention": local},
        sliding_window=window or config["max_position_embeddings"],
        layer_types=_layer_types(config, every=keys.size("attention.sliding_window_pattern", 6) if window else 1),
        attn_logit_softcapping=None,
        final_logit_softcapping=keys.value("final_logit_softcapping", float, 0.0) or None,
    )


def _scaled_like_gemma(keys: ModelKeys, config: Config, *, hidden_over_heads: int) -> None:
    """Set the scale of attention, which no key has: the models of 27B, by their number of layers, have their own."""
    large = config["num_hidden_layers"] == hidden_over_heads
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )


def _layer_types(config: Config, *, every: int) -> list[str]:
    """Return the kinds of layers: each `every`-th attends to all tokens, the others to a window."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


def _phi3(keys: ModelKeys, config: Config) -> None:
    context, scaling = config["max_position_embeddings"], None
    if LONG in keys.header.tensors or SHORT in keys.header.tensors:
        if keys.value("rope.scaling.type", str, "longrope") != "longrope":
            raise keys.unsupported(f"rotary frequencies are scaled twice, by {LONG} and by rope.scaling.type")
        scaling = longrope_parameters(keys, keys.size("rope.dimension_count", config["head_dim"]), context)
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"], partial=True, scaling=scaling)
    original = keys.value("rope.scaling.original_context_length", int, context)
    config["original_max_position_embeddings"] = original
    if "attention.sliding_window" in keys:
        window = keys.size("attention.sliding_window", least=0)
    elif context in _FIRST_PHI3:
        window = _FIRST_PHI3[context]
    else:
        raise keys.unsupported("phi3.attention.sliding_window is missing, and the model may have a window")
    config["sliding_window"] = window if 0 < window < context else None


_FIRST_PHI3 = {4096: 2047, 131_072: 0}  # windows by context; the first files of Phi-3 lack the key


def _smollm3(keys: ModelKeys, config: Config) -> None:
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"])
    config.update(no_rope_layer_interval=4, use_sliding_window=False)
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.header.tensors


def _granite(keys: ModelKeys, config: Config) -> None:
    keys.require("rope.scaling.finetuned", True)  # False: no rotary embeddings at all
    config.update(
        rope_parameters=rope_parameters(keys, config["head_dim"]),
        attention_multiplier=keys.value("attention.scale", float, 0.0) or config["head_dim"] ** -0.5,
        embedding_multiplier=keys.value("embedding_scale", float, 0.0) or 1.0,
        residual_multiplier=keys.value("residual_scale", float, 0.0) or 1.0,
        logits_scaling=keys.value("logit_scale", float, 0.0) or 1.0,
        attention_bias="blk.0.attn_q.bias" in keys.header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in keys.header.tensors,
    )


_DENSE = {name: part for name, part in _LAYER.items() if not name.startswith(("ffn_gate", "ffn_up", "ffn_down"))}
_MIXTRAL = Architecture("mixtral", _mixtral, {**_DENSE, **_EXPERTS}, interleaved=True, config_tensors=(FACTORS,))

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", _gemma, _LAYER, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, {**_LAYER, **_GEMMA_NORMS}, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, {**_LAYER, **_HEAD_NORMS, **_GEMMA_NORMS}, norm_offset=1.0),
    "granite": Architecture("granite", _granite, _LAYER, interleaved=True),
    "llama": Architecture("llama", _llama, _LAYER, interleaved=True, config_tensors=(FACTORS,)),
    "phi3": Architecture(
        "phi3", _phi3, {**_DENSE, **_FUSED, "ffn_down": "mlp.down_proj"}, config_tensors=(LONG, SHORT)
    ),
    "qwen2": Architecture("qwen2", _qwen2, _LAYER),
    "qwen3": Architecture("qwen3", _qwen3, {**_LAYER, **_HEAD_NORMS}),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe, {**_DENSE, **_HEAD_NORMS, **_EXPERTS}),
    "smollm3": Architecture("smollm3", _smollm3, _LAYER, interleaved=True),
}
