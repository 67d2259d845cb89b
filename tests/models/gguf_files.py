"""Write small models as llama.cpp's converter does: its names, its keys, its order of rows, its offset of norms.

Names come from the name map of the `gguf` package and keys from its writer, so nothing here is radixkv's own table.
Rows are reordered after they are quantised, so the dequantised weights are those of the reference model bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {  # by model_type of transformers
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "granite": "granite", "llama": "llama",
    "mistral": "llama", "mixtral": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 8.0],
}  # fmt: skip
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_t = transformers
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _t.LlamaConfig(**SIZES),
    "llama, tied": lambda: _t.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
    "llama, biases": lambda: _t.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": lambda: _t.LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=32),
    "llama, linear": lambda: _t.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mistral, window": lambda: _t.MistralConfig(**SIZES, sliding_window=21),
    "mixtral": lambda: _t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: _t.Qwen2Config(**SIZES),
    "qwen2, yarn": lambda: _t.Qwen2Config(**SIZES, rope_parameters=YARN),
    # transformers' reader of these two ignores the stated size of heads or of experts, and assumes its defaults
    "qwen3": lambda: _t.Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=True),
    "qwen3_moe": lambda: _t.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True
    ),
    "gemma": lambda: _t.GemmaConfig(**SIZES, head_dim=32),
    "gemma2": lambda: _t.Gemma2Config(
        **SIZES, head_dim=32, sliding_window=21, query_pre_attn_scalar=32, attn_logit_softcapping=3.0
    ),
    "gemma3": lambda: _t.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=32, sliding_window=21, query_pre_attn_scalar=32,
        rope_parameters=GEMMA3,
    ),
    "phi3": lambda: _t.Phi3Config(**SIZES, sliding_window=37),
    "phi3, longrope": lambda: _t.Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "granite": lambda: _t.GraniteConfig(
        **SIZES, attention_multiplier=0.125, embedding_multiplier=6.0, residual_multiplier=0.25, logits_scaling=4.0
    ),
    "smollm3": lambda: _t.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}),
}  # fmt: skip

# Positions of the scales in a block; random blocks get small ones, and random numbers else.
_SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,),
    "Q5_0": (0,), "IQ2_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
_OFFSET = {"gemma", "gemma2", "gemma3"}
_INTERLEAVED = {"llama", "granite", "smollm3"}


def made(config: Any) -> Any:
    """Return a random model in float32; norms have few digits, so that the offset of a file does not round them."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randint(-64, 64, parameter.shape) / 256)
            else:
                parameter.normal_(0.0, 0.2)
    return model


def write(model: Any, path: Path, kind: str = "F32", *, shards: int = 1, change: Any = None, **metadata: Any) -> Path:
    """Write `model` and give it the weights that the file then has; returns the first file.

    Matrices are stored as `kind`, norms and biases in 32 bits. `change` edits the tensors, (numbers or blocks, type) by
    name, before they are written. `metadata` replaces keys; None removes one. Names that begin with a dot are the
    architecture's.
    """
    arch = ARCHITECTURES[model.config.model_type]
    tensors = _tensors(model, arch, Kind[kind])
    if change is not None:
        change(tensors)
    keys = {**_keys(model.config, arch), **{f"{arch}{k}" if k[0] == "." else k: v for k, v in metadata.items()}}
    limit = -(-len(tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=limit)
    for key, value in keys.items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, (stored, stored_kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if shards == 1 else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


# ---- metadata


def _keys(config: Any, arch: str) -> dict[str, Any]:
    """The keys that the converter writes."""
    full = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = int(head_dim * full.get("partial_rotary_factor", 1.0))
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "rope.freq_base": float(full["rope_theta"]),
        "attention.key_length": head_dim if arch != "phi3" else None,
        "attention.value_length": head_dim if arch != "phi3" else None,
        "rope.dimension_count": rotary if arch in _INTERLEAVED or arch == "phi3" else None,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
    }
    if full["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    if arch == "phi3":
        original = config.original_max_position_embeddings
        keys |= {
            "rope.scaling.original_context_length": original,
            "attention.sliding_window": config.sliding_window or 0,
        }
        if full["rope_type"] == "longrope":
            stretch = config.max_position_embeddings / original
            keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    special = {"bos": config.bos_token_id, "eos": config.eos_token_id, "padding": config.pad_token_id}
    return {
        "general.name": "Random",
        "general.file_type": 0,
        "general.quantization_version": 2,
        **{f"{arch}.{key}": value for key, value in keys.items()},
        **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in special.items()},
    }


# ---- tensors


@torch.no_grad()
def _tensors(model: Any, arch: str, kind: Kind) -> dict[str, tuple[np.ndarray[Any, Any], Kind]]:
    """Store every weight, and replace it in the model by its value in the file."""
    config, names = model.config, gguf.get_tensor_name_map(_model_arch(arch), model.config.num_hidden_layers)
    stored: dict[str, tuple[np.ndarray[Any, Any], Kind]] = {}
    for name, parameter in model.named_parameters():
        weights = parameter.numpy()
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(weights, 2, axis=1), strict=True):
                blocks = _quantised(half, kind)
                half[:] = _dequantised(blocks, kind)
                stored[f"blk.{layer}.ffn_{part}_exps.weight"] = blocks, kind
            continue
        base, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        theirs = names.get_name(base) or {"lm_head": "output"}[base]
        if weights.ndim == 1:
            norm = arch in _OFFSET and base.endswith("norm")
            stored[f"{theirs}.{suffix}"] = _permuted(weights + np.float32(norm), theirs, config, arch), Kind.F32
            continue
        blocks = _quantised(weights, kind)
        weights[:] = _dequantised(blocks, kind)
        stored[f"{theirs}.{suffix}"] = _permuted(blocks, theirs, config, arch), kind
    return {**stored, **_factors(config)}


def _model_arch(arch: str) -> Any:
    return next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def _quantised(weights: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Quantise by the package, or draw random blocks of a type that it cannot write."""
    if kind.name not in _SCALES:
        return gguf.quants.quantize(np.ascontiguousarray(weights), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(weights.size)
    blocks = draw.integers(0, 256, (weights.size // block, size), np.uint8)
    for at in _SCALES[kind.name]:
        scales = draw.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*weights.shape[:-1], -1)


def _dequantised(stored: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    return gguf.quants.dequantize(stored, kind)


def _permuted(stored: np.ndarray[Any, Any], name: str, config: Any, arch: str) -> np.ndarray[Any, Any]:
    """Interleave the two halves of each head's rows of q and k, as the converter does for models like Llama."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-1])
    if heads is None or arch not in _INTERLEAVED:
        return stored
    halves = stored.reshape(heads, 2, len(stored) // heads // 2, *stored.shape[1:])
    return halves.swapaxes(1, 2).reshape(stored.shape)


def _factors(config: Any) -> dict[str, tuple[np.ndarray[Any, Any], Kind]]:
    """The tensors that hold factors of rotary frequencies: of Llama 3.1, and of Phi-3."""
    rope: Mapping[str, Any] = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        long, short = (np.array(rope[f"{each}_factor"], np.float32) for each in ("long", "short"))
        return {"rope_factors_long.weight": (long, Kind.F32), "rope_factors_short.weight": (short, Kind.F32)}
    if rope.get("rope_type") != "llama3":
        return {}
    frequencies = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": ((1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32), Kind.F32)}
